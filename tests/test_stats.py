"""Means over prompts with their intervals, and growth rates, against numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from streamlens import schema, stats
from streamlens.errors import InputError


def norms(rates=(1.05,), layers=6, positions=(0, 1, 2), first=100.0, model="tiny"):
    """One prompt a rate: its norm at layer l is 10 × rate^l, a hundred times that at position 0."""
    rows = [
        (p, "text", t, "x", layer, -1, -1, "final" if layer == layers else "resid_pre", "l2", 10 * rate**layer * (first if t == 0 else 1))
        for p, rate in enumerate(rates)
        for t in positions
        for layer in range(layers + 1)
    ]
    df = schema.apply(pd.DataFrame(rows, columns=[column.name for column in schema.NORMS.columns]), "norms")
    df.attrs["model"] = model
    return df


def test_the_mean_counts_each_prompt_once():
    df = pd.DataFrame({"prompt": [0, 0, 0, 1], "layer": [5] * 4, "x": [1.0, 2.0, 3.0, 10.0]})
    out = stats.mean_interval(df, "x", "layer")
    assert list(out.columns) == ["layer", "mean", "low", "high", "n"]
    assert out.loc[0, ["layer", "mean", "n"]].to_list() == [5, 6.0, 2]  # (2 + 10) / 2, not 16 / 4
    assert out.loc[0, ["low", "high"]].to_list() == [2.0, 10.0]  # a quarter of the draws takes one prompt twice


def test_the_interval_is_that_of_resampled_prompts():
    rng = np.random.default_rng(1)
    df = pd.DataFrame({"prompt": np.repeat(np.arange(100), 3), "x": rng.normal(size=300), "k": "a"})
    means = df.groupby("prompt")["x"].mean().to_numpy()
    out = stats.mean_interval(df, "x", "k", n_boot=20_000).iloc[0]
    draws = np.sort(means[rng.integers(0, 100, (20_000, 100))].mean(1))
    assert out["low"] == pytest.approx(draws[500], abs=0.004)
    assert out["high"] == pytest.approx(draws[19_500], abs=0.004)
    narrow = stats.mean_interval(df, "x", "k", level=0.5).iloc[0]
    assert out["low"] < narrow["low"] < out["mean"] < narrow["high"] < out["high"]


def test_a_group_is_resampled_over_the_prompts_that_have_it():
    df = pd.DataFrame({"prompt": [0, 1, 2, 3, 0], "k": ["all"] * 4 + ["one"], "x": [1.0, 2.0, 3.0, np.nan, 7.0]})
    out = stats.mean_interval(df, "x", ["k"]).set_index("k")
    assert out.loc["all", ["mean", "n"]].to_list() == [2.0, 3]
    assert 1.0 <= out.loc["all", "low"] < 2.0 < out.loc["all", "high"] <= 3.0
    assert out.loc["one", ["mean", "n"]].to_list() == [7.0, 1]
    assert out.loc["one", ["low", "high"]].isna().all()  # one prompt says nothing about spread


def test_resampling_in_pieces_changes_nothing(monkeypatch):
    rng = np.random.default_rng(2)
    df = pd.DataFrame({"prompt": np.repeat(np.arange(5), 40), "k": np.tile(np.arange(40), 5), "x": rng.normal(size=200)})
    whole = stats.mean_interval(df, "x", "k")
    monkeypatch.setattr(stats.means, "CELLS", 14_000)  # seven groups at a time
    pd.testing.assert_frame_equal(stats.mean_interval(df, "x", "k"), whole, rtol=1e-12)


def test_the_same_seed_gives_the_same_interval():
    df = pd.DataFrame({"prompt": range(8), "k": 0, "x": np.arange(8.0) ** 2})
    pd.testing.assert_frame_equal(stats.mean_interval(df, "x", "k", seed=3), stats.mean_interval(df, "x", "k", seed=3))
    assert not stats.mean_interval(df, "x", "k", seed=3).equals(stats.mean_interval(df, "x", "k", seed=4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": "y"}, r"value must name columns of df \(prompt, k, x\); got 'y'"),
        ({"by": ["k", "z"]}, r"by must name columns of df \(prompt, k, x\); got 'z'"),
        ({"by": []}, r"by must name one column or more besides unit 'prompt' and value 'x'; got \[\]"),
        ({"by": "prompt"}, r"by must name one column or more besides unit 'prompt'"),
        ({"level": 95.0}, r"level must lie between 0 and 1; got 95\.0"),
        ({"n_boot": 0}, r"n_boot must be a whole number, 1 or more; got 0"),
    ],
)
def test_bad_input_to_mean_interval(arguments, message):
    df = pd.DataFrame({"prompt": [0, 1], "k": "a", "x": [1.0, 2.0]})
    with pytest.raises(InputError, match=message):
        stats.mean_interval(df, **{"value": "x", "by": "k", **arguments})


def attribution(values, model=None):
    rows = [
        {"prompt": p, "component": "head", "layer": 0, "sublayer": 0, "head": h, "contribution": x}
        for p, heads in enumerate(values)
        for h, x in enumerate(heads)
    ]
    df = pd.DataFrame(rows)
    return df if model is None else df.assign(model=model)


def test_top_components_ranks_by_size_and_keeps_the_sign():
    out = stats.top_components(attribution([[0.1, -4.0, 1.0], [0.3, -6.0, 2.0]]), n=2)
    assert out["head"].to_list() == [1, 2]
    assert out["mean"].to_list() == [-5.0, 1.5]
    assert out.loc[0, ["low", "high", "n"]].to_list() == [-6.0, -4.0, 2]


def test_top_components_of_several_models_are_n_of_each():
    df = pd.concat([attribution([[1.0, 2.0, 3.0]], "b"), attribution([[50.0, 20.0, 30.0]], "a")])
    out = stats.top_components(df, n=2)
    assert list(zip(out["model"], out["head"], strict=True)) == [("a", 0), ("a", 2), ("b", 2), ("b", 1)]


def test_top_components_needs_a_number():
    with pytest.raises(InputError, match="n must be a whole number, 1 or more; got 0"):
        stats.top_components(attribution([[1.0]]), n=0)


def test_growth_of_an_exponential_is_its_rate():
    out = stats.growth_rate(norms([1.05, 1.05, 1.05]))
    assert list(out.columns) == ["model", "rate", "low", "high", "r2", "first", "last", "n_prompts"]
    row = out.iloc[0]
    assert row["model"] == "tiny"
    np.testing.assert_allclose(row[["rate", "low", "high", "r2"]].to_numpy(float), [1.05, 1.05, 1.05, 1.0], rtol=1e-12)
    assert row[["first", "last", "n_prompts"]].to_list() == [0, 6, 3]


def test_the_growth_of_several_prompts_is_that_of_the_mean_log_norm():
    row = stats.growth_rate(norms([1.02, 1.08])).iloc[0]
    assert row["rate"] == pytest.approx(np.sqrt(1.02 * 1.08), rel=1e-12)
    np.testing.assert_allclose([row["low"], row["high"]], [1.02, 1.08], rtol=1e-12)


def test_growth_is_the_least_squares_slope_over_the_range():
    df = norms([1.0])
    curve = np.array([1.0, 3.0, 4.0, 9.0, 11.0, 40.0, 41.0])
    df["value"] = curve[df["layer"]]
    row = stats.growth_rate(df, layers=(1, 4)).iloc[0]
    slope, offset = np.polyfit([1, 2, 3, 4], np.log(curve[1:5]), 1)
    residual = np.log(curve[1:5]) - offset - slope * np.array([1, 2, 3, 4])
    assert row["rate"] == pytest.approx(np.exp(slope), rel=1e-12)
    assert row["r2"] == pytest.approx(1 - residual.var() / np.log(curve[1:5]).var(), rel=1e-12)
    assert row[["first", "last"]].to_list() == [1, 4]
    assert np.isnan([row["low"], row["high"]]).all()  # one prompt


def test_each_replicate_is_a_fit_of_its_own():
    rng = np.random.default_rng(0)
    df = norms(np.exp(rng.normal(0.05, 0.02, size=12)))
    df["value"] *= np.exp(rng.normal(0, 0.1, size=len(df)))
    logs = np.log(df.loc[df["position"] > 0].groupby(["prompt", "layer"])["value"].apply(lambda v: np.exp(np.log(v).mean()))).unstack()
    draws = stats.means.resample(12, 2000, 0)
    slopes = [np.polyfit(np.arange(7), (drawn @ logs.to_numpy()) / 12, 1)[0] for drawn in draws]
    row = stats.growth_rate(df).iloc[0]
    np.testing.assert_allclose([row["low"], row["high"]], np.exp(np.quantile(slopes, [0.025, 0.975])), rtol=1e-10)


def test_skip_first_leaves_out_position_0():
    df = norms([1.05, 1.05])
    df.loc[df["position"] == 0, "value"] = 7.0  # flat
    assert stats.growth_rate(df).loc[0, "rate"] == pytest.approx(1.05)
    assert stats.growth_rate(df, skip_first=False).loc[0, "rate"] == pytest.approx(1.05 ** (2 / 3))
    with pytest.raises(InputError, match="skip_first must be False where every row is a first position"):
        stats.growth_rate(df[df["position"] == 0])


def test_a_constant_norm_has_rate_1_and_no_r2():
    row = stats.growth_rate(norms([1.0, 1.0])).iloc[0]
    assert row["rate"] == pytest.approx(1.0, abs=1e-14)
    assert np.isnan(row["r2"])


def test_several_models_have_a_row_each():
    df = schema.concat([norms([1.05, 1.06], model="b"), norms([1.02, 1.02], layers=4, model="a")], "norms")
    out = stats.growth_rate(df)
    assert out["model"].to_list() == ["b", "a"]
    assert out["last"].to_list() == [6, 4]
    assert out["rate"].to_list() == pytest.approx([np.sqrt(1.05 * 1.06), 1.02])


@pytest.mark.parametrize("layers", [(0, 7), (-1, 3), (3, 3), (4, 2), (2,), [1, 2, 3]])
def test_layers_out_of_range_are_refused(layers):
    with pytest.raises(InputError, match=r"layers must be \(first, last\), inclusive, with 0 <= first < last <= 6; got"):
        stats.growth_rate(norms(), layers=layers)


def test_a_single_layer_does_not_grow():
    df = norms()
    with pytest.raises(InputError, match="df must have norms at two layers or more; got layer 3 alone"):
        stats.growth_rate(df[df["layer"] == 3])


def test_a_gap_in_the_range_is_refused():
    df = norms()
    with pytest.raises(InputError, match=r"layers must be a range whose every layer is in df; got \(0, 6\), and df lacks \[3\]"):
        stats.growth_rate(df[df["layer"] != 3])


def test_growth_refuses_what_it_cannot_fit():
    df = norms()
    with pytest.raises(InputError, match="measure must be one of 'l2'; got 'rms'"):
        stats.growth_rate(df, measure="rms")
    with pytest.raises(InputError, match=r"df must have norms above 0 and finite; got 2 others, first 0\.0"):
        stats.growth_rate(df.assign(value=df["value"].where((df["layer"] != 2) | (df["position"] == 0), 0.0)))
    with pytest.raises(InputError, match="df must have norms above 0 and finite; got 1 others, first inf"):
        stats.growth_rate(df.assign(value=df["value"].where((df["layer"] != 2) | (df["position"] != 1), np.inf)))
    with pytest.raises(InputError, match="got several: give each model its name in a column `model`"):
        stats.growth_rate(pd.concat([df, df]))
    with pytest.raises(InputError, match="df must have the sites resid_pre and final; got attn_out"):
        stats.growth_rate(df.assign(site="attn_out"))
    ragged = pd.concat([df, norms([1.1, 1.1], layers=3).query("prompt == 1")])
    with pytest.raises(InputError, match="df must have the same layers for every prompt; prompt 1 lacks some"):
        stats.growth_rate(ragged)


def test_tables_of_single_prompts_put_together_are_not_one_prompt():
    one, other = (pd.DataFrame({"prompt": [0], "prompt_text": [text], "layer": [0], "value": [1.0]}) for text in "ab")
    with pytest.raises(InputError, match="got several texts as prompt 0: renumber tables put together"):
        stats.mean_interval(pd.concat([one, other]), "value", "layer")
    assert stats.mean_interval(pd.concat([one, other.assign(prompt=1)]), "value", "layer").n.tolist() == [2]
    models = pd.concat([one.assign(model="a"), other.assign(model="b")])
    assert stats.mean_interval(models, "value", ["model", "layer"]).n.tolist() == [1, 1]
    samples = pd.concat([one.assign(document=5), other.assign(document=6)])
    assert stats.mean_interval(samples, "value", "layer", unit="document").n.tolist() == [2]
