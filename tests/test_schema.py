"""The tidy tables: what a row is, which dtypes it has, and that concat, merge and Parquet do not lose them."""

import numpy as np
import pandas as pd
import pytest

from streamlens import schema
from streamlens.errors import InputError


def norms(prompts=2, text="The cat", **attrs):
    rows = [(p, f"{text} {p}", 0, "The", layer, -1, -1, "resid_pre", "l2", 1.5 + layer) for p in range(prompts) for layer in range(3)]
    df = pd.DataFrame(rows, columns=[column.name for column in schema.NORMS.columns])
    df.attrs = {"model": "tiny", "additivity_error": 1e-7, **attrs}
    return df


def dtypes(df):
    return {name: str(dtype) for name, dtype in df.dtypes.items()}


DTYPES = {column.name: column.dtype for column in schema.NORMS.columns}


@pytest.mark.parametrize("name", schema.TABLES)
def test_a_table_describes_each_of_its_columns_once(name):
    described = schema.describe(name)
    assert described["column"].is_unique
    assert described["dtype"].isin(["int32", "int64", "float64", "category", "bool"]).all()
    assert (described["meaning"] != "").all()
    assert described["key"].any()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("attribution", "prompt position target versus component layer sublayer head neuron expert source"),
        (
            "ablation",
            "prompt position target versus unit method layer sublayer span head together expert at reference sample seed blocks n_removed "
            "metric",
        ),
        ("norms", "prompt position layer sublayer head site measure"),
    ],
)
def test_the_key_is_the_documented_one(name, key):
    described = schema.describe(name)
    assert described.loc[described["key"], "column"].to_list() == key.split()


def test_an_unknown_table_is_named():
    with pytest.raises(InputError, match=r"table_name must be one of 'attribution', .*; got 'norm'"):
        schema.describe("norm")


def test_apply_orders_columns_and_imposes_dtypes():
    df = norms().assign(template="ABBA", score=1)
    shuffled = df[["score", "template", *reversed(list(DTYPES))]].iloc[::-1]
    out = schema.apply(shuffled, "norms")
    assert list(out.columns) == [*DTYPES, "score", "template"]
    assert dtypes(out) == {**DTYPES, "score": "int64", "template": "category"}
    assert list(out.index) == list(range(6))
    assert out["prompt"].to_list() == [1, 1, 1, 0, 0, 0]
    assert out.attrs == df.attrs


def test_apply_restores_what_plain_pandas_loses():
    one, two = schema.apply(norms(text="The cat"), "norms"), schema.apply(norms(text="A dog"), "norms")
    both = pd.concat([one, two])
    assert str(both["prompt_text"].dtype) != "category"  # the reason for apply
    assert dtypes(schema.apply(both, "norms")) == DTYPES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": [0.5] * 6}, r"norms.layer must be whole numbers of 32 bits; got 0\.5"),
        ({"layer": [2**40] * 6}, r"norms.layer must be whole numbers of 32 bits; got 1099511627776"),
        ({"layer": [np.nan] * 6}, r"norms.layer must have no nulls, -1 stands for none; got 6 nulls"),
        ({"value": ["high"] * 6}, r"norms.value must be float64; got str"),
    ],
)
def test_apply_refuses_values_that_do_not_fit(change, message):
    with pytest.raises(InputError, match=message):
        schema.apply(norms().assign(**change), "norms")


def test_a_missing_column_is_named():
    with pytest.raises(InputError, match=r"df must be norms table with columns site, measure; got prompt"):
        schema.apply(norms().drop(columns=["site", "measure"]), "norms")


def test_validate_accepts_what_apply_gives():
    schema.validate(schema.apply(norms(), "norms"), "norms")


def test_validate_refuses_a_wrong_dtype():
    df = schema.apply(norms(), "norms")
    with pytest.raises(InputError, match=r"norms.layer must be int32; got int64"):
        schema.validate(df.assign(layer=df["layer"].astype("int64")), "norms")


def test_validate_refuses_a_null_in_the_key():
    df = schema.apply(norms(), "norms")
    df.loc[2, "site"] = None
    with pytest.raises(InputError, match=r"norms.site is part of the key and must have no nulls; got 1"):
        schema.validate(df, "norms")


def test_validate_refuses_repeated_rows_unless_a_model_column_tells_them_apart():
    one = schema.apply(norms(), "norms")
    both = pd.concat([one, one], ignore_index=True)
    with pytest.raises(InputError, match=r"one row for each prompt, position, .*; got 6 repeated, first \{'prompt': 0"):
        schema.validate(both, "norms")
    schema.validate(both.assign(model=["a"] * 6 + ["b"] * 6), "norms")


def test_concat_unites_categories_and_keeps_the_worst_error():
    frames = [norms(text="The cat", additivity_error=1e-7), norms(text="A dog", additivity_error=3e-6), norms(text="The cat")]
    frames = [schema.apply(frame.assign(prompt=frame["prompt"] + 10 * i), "norms") for i, frame in enumerate(frames)]
    out = schema.concat(frames, "norms")
    assert dtypes(out) == DTYPES
    assert out["prompt_text"].to_list() == [text for frame in frames for text in frame["prompt_text"]]
    assert len(out["prompt_text"].cat.categories) == 4
    assert out.attrs == {"model": "tiny", "additivity_error": 3e-6}
    assert frames[0].attrs["additivity_error"] == 1e-7


def test_concat_names_the_model_where_it_differs():
    frames = [schema.apply(norms(model=name), "norms") for name in ("a", "b")]
    out = schema.concat(frames, "norms")
    assert out["model"].to_list() == ["a"] * 6 + ["b"] * 6
    assert out.attrs["model"] == ["a", "b"]
    schema.validate(out, "norms")


def test_concat_fills_optional_columns_with_none_and_others_with_nulls():
    columns = {c.name: "x" if c.dtype == "category" else 0 for c in schema.ABLATION.columns if not c.optional}
    plain = schema.apply(pd.DataFrame([columns]), "ablation")
    drawn = schema.apply(plain.assign(reference="set", seed=7, template="ABBA"), "ablation")
    out = schema.concat([plain, drawn], "ablation")
    assert out["seed"].to_list() == [-1, 7]
    assert out["reference"].to_list() == ["", "set"]
    assert out["template"].isna().to_list() == [True, False]
    assert dtypes(out)["seed"] == "int32"
    assert dtypes(out)["reference"] == dtypes(out)["template"] == "category"


def test_concat_takes_an_empty_frame():
    full = schema.apply(norms(), "norms")
    assert dtypes(schema.concat([full.head(0), full], "norms")) == DTYPES


def test_concat_refuses_rows_that_two_frames_have():
    one, other = (schema.apply(norms(text=text), "norms") for text in ("The cat", "A dog"))
    with pytest.raises(InputError, match=r"frames must hold different rows; got, by prompt, position, .* 6 repeated, .*load\(name=\)"):
        schema.concat([one, other], "norms")
    assert len(schema.concat([one, other.assign(prompt=other["prompt"] + 10)], "norms")) == 12


def test_concat_refuses_no_frames():
    with pytest.raises(InputError, match="frames must be one DataFrame or more; got none"):
        schema.concat([], "norms")


@pytest.mark.parametrize("rows", [6, 0])
def test_parquet_keeps_schema_and_attrs_and_gives_the_same_bytes(tmp_path, rows):
    attrs = {"layers": (1, 2), "seed": np.int64(3), "arguments": {"b": {2, 1}, "a": None}}
    df = schema.apply(norms(**attrs).head(rows), "norms")
    path = schema.write_parquet(df, tmp_path / "norms.parquet")
    back = schema.read_parquet(path, "norms")
    pd.testing.assert_frame_equal(back, df, check_categorical=rows > 0)  # an empty frame loses its categories, not its dtypes
    assert back.attrs == {
        "additivity_error": 1e-7, "arguments": {"a": None, "b": ["1", "2"]}, "layers": [1, 2], "model": "tiny", "seed": 3
    }  # fmt: skip
    again = schema.write_parquet(back, tmp_path / "again.parquet")
    assert again.read_bytes() == path.read_bytes()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = schema.write_parquet(schema.apply(norms(), "norms"), tmp_path / "norms.parquet")
    before = path.read_bytes()
    with pytest.raises(Exception, match="Conversion failed"):
        schema.write_parquet(norms().assign(mixed=[1, "a", 2, "b", 3, "c"]), path)
    assert [p.name for p in tmp_path.iterdir()] == ["norms.parquet"]
    assert path.read_bytes() == before


def test_reading_a_missing_file_or_another_table_says_so(tmp_path):
    with pytest.raises(InputError, match=r"path must be a Parquet file of the norms table; got .*gone\.parquet', which does not exist"):
        schema.read_parquet(tmp_path / "gone.parquet", "norms")
    path = schema.write_parquet(schema.apply(norms(), "norms"), tmp_path / "norms.parquet")
    with pytest.raises(InputError, match="df must be lens table with columns"):
        schema.read_parquet(path, "lens")
