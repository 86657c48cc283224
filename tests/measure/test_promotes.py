"""Promoted tokens: the attribution of every token of the vocabulary against the mean, sorted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError, NumericError
from streamlens.measure.components import components
from streamlens.measure.promotes import sources
from streamlens.stream import unembed
from tests.models import tiny
from tests.tolerances import ADDITIVITY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]
EVERY = list(range(60))


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def shares(family):
    """Every component's contribution to every token's centred logit: `[prompt, component...]` by target, and sum|parts|."""
    df = sl.attribute(tiny.proven(family), PROMPTS, target=[EVERY, EVERY], versus="mean")
    size = df.contribution.abs().groupby([df.prompt, df.target]).sum().max()
    return df, size


def named(df, component):
    """The rows of an attribution that a component of `promotes` stands for."""
    kind, layer, *rest = (*component, -1) if len(component) == 1 else component
    if kind == "head":
        return df[(df.component == "head") & (df.layer == layer) & (df["head"] == rest[0])]
    parts = {"attn": ("head", "attn", "attn_bias")}.get(kind, (kind,))
    return df[df.component.isin(parts) & (df.layer == layer)]


@pytest.mark.parametrize("component", [("head", 0, 1), ("head", 2, 3), ("attn", 1), ("mlp", 0), ("mlp", 2), ("embed",)])
def test_it_is_the_attribution_of_every_token_against_the_mean(family, shares, component):
    table, size = shares
    df = sl.promotes(tiny.proven(family), PROMPTS, component, top_k=7)
    schema.validate(df, "promotes")
    expected = named(table, component).groupby(["prompt", "target"]).contribution.sum()
    for (prompt, direction), rows in df.groupby(["prompt", "direction"], observed=True):
        truth = expected[prompt].sort_values(ascending=direction == "down", kind="stable")
        assert rows.k.tolist() == list(range(7))
        assert np.abs(rows.contribution.to_numpy() - truth.iloc[:7].to_numpy()).max() <= ADDITIVITY[torch.float32] * size
        at_ids = truth[rows.target.to_numpy()].to_numpy()
        assert np.abs(rows.contribution.to_numpy() - at_ids).max() <= ADDITIVITY[torch.float32] * size


def test_several_components_at_all_positions_of_a_padded_batch():
    model = tiny.proven("gpt2")
    together = sl.promotes(model, PROMPTS, [("pos_embed",), ("head", 1, 0)], positions="all", top_k=2)
    assert list(together.component.unique()) == ["pos_embed", "head"]
    assert len(together) == sum(map(len, PROMPTS)) * 2 * 2 * 2
    alone = sl.promotes(model, PROMPTS[1], ("head", 1, 0), positions="all", top_k=2)
    rows = together[(together.prompt == 1) & (together.component == "head")]
    assert rows.target.tolist() == alone.target.tolist()
    assert np.allclose(rows.contribution, alone.contribution, rtol=1e-5, atol=1e-6)


def test_components_are_numbered_as_in_the_attribution():
    anatomy = tiny.proven("gpt2").anatomy
    for paths in (anatomy.pos_embeds, ("transformer.wpe", "another")):
        a = replace(anatomy, pos_embeds=paths)
        assert {c for c in sources(a) if c.kind == "pos_embed"} == {c for c in components(a) if c.kind == "pos_embed"}


def test_nothing_depends_on_the_chunk(monkeypatch):
    asked = {"component": [("mlp", 1), ("head", 2, 3)], "positions": "all", "top_k": 3}
    whole = sl.promotes(tiny.proven("llama"), PROMPTS, **asked)
    monkeypatch.setattr(unembed, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(unembed, "CHUNK_ROWS", 3)
    chunked = sl.promotes(tiny.proven("llama"), PROMPTS, **asked)
    assert chunked.target.equals(whole.target)
    assert np.allclose(chunked.contribution, whole.contribution, rtol=1e-5, atol=1e-6)


def test_up_and_down_are_both_ends_of_one_order():
    df = sl.promotes(tiny.proven("llama"), PROMPTS[0], ("mlp", 1), top_k=60)
    up, down = (df[df.direction == d] for d in ("up", "down"))
    assert up.target.tolist() == down.target.tolist()[::-1]
    assert abs(up.contribution.sum()) <= 1e-4
    assert (up.contribution.diff().dropna() <= 0).all()


def test_bf16_is_exact_to_its_own_size():
    """A difference of two streams would be off by a rounding of the stream, not of the head."""
    narrow, wide = tiny.model("llama", torch.bfloat16), tiny.model("llama", torch.bfloat16).float()
    asked = {"component": ("head", 2, 1), "top_k": 60}
    a, b = (sl.promotes(sl.load(m), PROMPTS[0], **asked) for m in (narrow, wide))
    a, b = (x[x.direction == "up"].set_index("target").contribution for x in (a, b))
    assert (a - b[a.index]).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("mlp", r"component must be \('head', layer, head\), .*; got 'mlp'"),
        (("head", 1), r"component must be .*; got \('head', 1\)"),
        (("mlp", "1"), r"component must be .*; got \('mlp', '1'\)"),
        (("head", 1, 4), r"LlamaForCausalLM has no \('head', 1, 4\); head has layer 0 to \d, head 0 to 3$"),
        (("mixer", 1), r"LlamaForCausalLM has no \('mixer', 1\); it has embed, .*head"),
        (("norm_bias", 1), r"LlamaForCausalLM has no \('norm_bias', 1\)"),
        ([], r"component must be .*; got \[\]"),
    ],
)
def test_what_is_no_component_is_named(component, message):
    with pytest.raises(InputError, match=message):
        sl.promotes(tiny.proven("llama"), PROMPTS, component)


def test_a_component_named_twice_has_its_rows_once():
    model = tiny.proven("llama")
    once = sl.promotes(model, PROMPTS, [("mlp", 1), ("head", 0, 1)], top_k=3)
    assert sl.promotes(model, PROMPTS, [("mlp", 1), ("head", 0, 1), ("mlp", 1, 0)], top_k=3).equals(once)
    schema.validate(once, "promotes")


def test_top_k_is_part_of_a_vocabulary():
    with pytest.raises(InputError, match="top_k must be from 1 to the vocabulary's 60; got 0"):
        sl.promotes(tiny.proven("llama"), PROMPTS, ("mlp", 1), top_k=0)


def test_what_is_not_finite_is_an_error():
    module = tiny.model("llama")
    model = sl.load(module)
    with torch.no_grad():
        module.model.embed_tokens.weight[7] = float("nan")
    with pytest.raises(NumericError, match="a contribution is not finite in"):
        sl.promotes(model, [[5, 7, 9]], ("mlp", 1))
