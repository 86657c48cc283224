"""Arrays to tables: codes, categories, the user's own columns, and rows in order whatever the batches were."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from streamlens import frames, schema
from streamlens.frames.columns import repeat
from streamlens.measure.ablation import Removal
from streamlens.measure.attribution import Component, Shares
from streamlens.measure.growth import Column, Measured
from streamlens.prompts import Readouts, parse

PARTS = [Component("embed"), Component("head", 0, 0, 0), Component("head", 0, 0, 1), Component("mlp", 0, 0)]


class Tokenizer:
    """Ids 0-9; 7 and 8 read the same."""

    def decode(self, ids):
        return "".join("x" if i == 8 else "x" if i == 7 else chr(ord("a") + i) for i in ids)


@pytest.fixture
def prompts():
    frame = pd.DataFrame({"prompt": [[1, 2, 3], [4, 7], [8, 7]], "kind": ["p", "q", "p"], "size": [1, 2, 3]})
    return parse(frame, Tokenizer(), max_length=None, vocab_size=10)


@pytest.fixture
def labels(prompts):
    return frames.Labels(Tokenizer(), prompts)


def ints(*values):
    return np.array(values, dtype=np.int64)


def shares(prompt, position, target, versus, start):
    n = len(prompt)
    contribution = start + np.arange(4.0 * n).reshape(n, 4)
    return Shares(Readouts(ints(*prompt), ints(*position), ints(*target), ints(*versus)), contribution, contribution.sum(1), np.zeros(n))


def test_attribution_rows_are_ordered_by_prompt_and_position(labels):
    late, early = shares([2, 2], [0, 1], [5, 6], [-1, -1], 100.0), shares([0, 1], [2, 0], [5, 5], [6, -2], 0.0)
    df = frames.attribution([late, early], PARTS, labels)
    schema.validate(df, "attribution")
    first = df.iloc[::4]
    assert first.prompt.tolist() == [0, 1, 2, 2]
    assert first.position.tolist() == [2, 0, 0, 1]
    assert first.versus_token.tolist() == ["g", "mean", "", ""]
    assert first.token.tolist() == ["d", "e", "x", "x"]
    assert first.prompt_text.tolist() == ["bcd", "ex", "xx", "xx"]
    assert first.kind.tolist() == ["p", "q", "p", "p"]
    assert first["size"].tolist() == [1, 2, 3, 3]
    assert df.contribution.tolist() == [*map(float, range(8)), *map(float, range(100, 108))]
    assert df["head"].tolist() == [-1, 0, 1, -1] * 4
    assert df.component.tolist() == ["embed", "head", "head", "mlp"] * 4
    assert df.groupby(["prompt", "position", "target", "versus"]).contribution.sum().tolist() == first.logit.tolist()


def test_targets_of_one_place_keep_the_order_in_which_they_were_asked(labels):
    parts = [shares([1], [0], [5], [-1], 0.0), shares([0, 0], [2, 2], [6, 3], [-1, -1], 0.0)]
    assert frames.attribution(parts, PARTS, labels).target[::4].tolist() == [6, 3, 5]


def test_ids_that_read_the_same_share_a_category(labels):
    tokens = labels.tokens(ints(7, 8, 1, 8, -1, -2))
    assert tokens.tolist() == ["x", "x", "b", "x", "", "mean"]
    assert tokens.categories.is_unique


def test_without_a_tokenizer_tokens_are_numbers(prompts):
    labels = frames.Labels(None, prompts)
    assert labels.tokens(ints(7, -1, -2)).tolist() == ["7", "", "mean"]
    assert labels.at(ints(0, 1), ints(2, 1)).tolist() == ["3", "7"]


def test_ablation_has_no_row_for_an_absent_input(labels):
    nan = np.nan
    removal = Removal(
        ints(0, 0),
        ints(1, 2),
        {
            "loss": (np.array([1.0, nan]), np.array([[1.5, nan], [3.0, nan]])),
            "kl": (np.zeros(2), np.array([[0.1, 0.2], [0.3, 0.4]])),
        },
        Readouts(ints(0), ints(2), ints(5), ints(6)),
        {"logit_diff": (np.array([2.0]), np.array([[1.0], [-1.0]]))},
    )
    df = frames.ablation([removal], labels, {"unit": ["block"] * 2, "method": ["remove"] * 2, "layer": [0, 3]})
    schema.validate(df, "ablation")
    rows = [(r.position, r.layer, r.metric, r.target, r.versus, r.clean, r.ablated, r.delta) for r in df.itertuples()]
    assert rows == [
        (1, 0, "loss", -1, -1, 1.0, 1.5, 0.5),
        (1, 0, "kl", -1, -1, 0.0, 0.1, 0.1),
        (1, 3, "loss", -1, -1, 1.0, 3.0, 2.0),
        (1, 3, "kl", -1, -1, 0.0, 0.3, 0.3),
        (2, 0, "kl", -1, -1, 0.0, 0.2, 0.2),
        (2, 0, "logit_diff", 5, 6, 2.0, 1.0, -1.0),
        (2, 3, "kl", -1, -1, 0.0, 0.4, 0.4),
        (2, 3, "logit_diff", 5, 6, 2.0, -1.0, -3.0),
    ]
    assert df.kind.unique().tolist() == ["p"]


def test_norms_are_one_row_a_site_and_measure(labels):
    columns = tuple(Column(site, 0, sub, -1, measure) for site, sub in (("embed", -1), ("attn_out", 0)) for measure in ("l2", "rms"))
    late = Measured(ints(1), ints(1), columns, np.array([[1.0, 2.0, 3.0, 4.0]]))
    early = Measured(ints(0), ints(2), columns, np.array([[5.0, 6.0, 7.0, 8.0]]))
    df = frames.norms([late, early], labels)
    schema.validate(df, "norms")
    rows = [(r.prompt, r.position, r.site, r.layer, r.sublayer, r.measure, r.value) for r in df.itertuples()]
    assert rows == [
        (0, 2, "embed", 0, -1, "l2", 5.0),
        (0, 2, "embed", 0, -1, "rms", 6.0),
        (0, 2, "attn_out", 0, 0, "l2", 7.0),
        (0, 2, "attn_out", 0, 0, "rms", 8.0),
        (1, 1, "embed", 0, -1, "l2", 1.0),
        (1, 1, "embed", 0, -1, "rms", 2.0),
        (1, 1, "attn_out", 0, 0, "l2", 3.0),
        (1, 1, "attn_out", 0, 0, "rms", 4.0),
    ]
    assert df.kind.tolist() == ["p"] * 4 + ["q"] * 4
    assert df["size"].tolist() == [1] * 4 + [2] * 4


def test_a_stamp_holds_plain_values_only(labels):
    class Model:
        name, source, revision, dtype = "tiny", "memory", None, torch.bfloat16

    arguments = {"target": [[1, " a"], ["b"]], "at": torch.tensor([1, 2]), "of": dict, "r": range(2), "seed": np.int64(7)}
    df = frames.stamp(pd.DataFrame(), Model, arguments, error=0.5)
    assert df.attrs["arguments"] == {"target": [[1, " a"], ["b"]], "at": "tensor([1, 2])", "of": "dict", "r": [0, 1], "seed": 7}
    assert df.attrs["seed"] == 7
    assert json.loads(json.dumps(df.attrs)) == df.attrs
    assert (df.attrs["model"], df.attrs["dtype"], df.attrs["error"]) == ("tiny", "bfloat16", 0.5)


def test_codes_are_repeated_without_their_texts():
    repeated = repeat(pd.Categorical(["a", "b", "a"]), 2)
    assert repeated.tolist() == ["a", "a", "b", "b", "a", "a"]
    assert repeated.categories.tolist() == ["a", "b"]
