"""Heads by source position, against attention by hand; experts against their own weights; what a call leaves behind."""

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import streamlens as sl
from streamlens.errors import UnsupportedModelError
from streamlens.measure.sources import BySource, ByToken
from streamlens.models.attention import replaced_attention, watched_attention
from streamlens.stream.sources import SourceTap
from tests import byhand
from tests.measure.test_attribution import PROMPTS, check_contract
from tests.models import tiny
from tests.tolerances import HAND

SERVED = [family for family in tiny.FAMILIES if family != "bloom"]
PROJECTION = {"llama": "model.layers.{}.self_attn.o_proj.weight", "gpt2": "transformer.h.{}.attn.c_proj.weight"}


@pytest.mark.parametrize("family", PROJECTION)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_source_is_what_the_weights_give_by_hand(family, implementation):
    model, ids = tiny.proven(family), PROMPTS[0]
    before = model.module.config._attn_implementation
    model.module.set_attn_implementation(implementation)
    try:
        df = sl.attribute(model, [ids, PROMPTS[1]], target=11, versus=4, positions=[2, 0, -1], by="source")
    finally:
        model.module.set_attn_implementation(before)
    trace, weights = getattr(byhand, family)(model.module, ids), byhand.weights(model.module)
    direction = trace.unembed[11] - trace.unembed[4]
    size = sum(share.abs() for share in trace.shares(11, 4).values()).numpy()
    heads = df[(df.prompt == 0) & (df.component == "head")]
    assert sorted(heads.position.unique()) == [0, 2, 6]
    for (layer, head), rows in heads.groupby(["layer", "head"]):
        v, pattern = trace.inside["v", layer], trace.inside["pattern", layer][head]
        kv = head // (len(trace.inside["pattern", layer]) // v.shape[1])
        out = weights[PROJECTION[family].format(layer)]
        out = (out if family == "gpt2" else out.T)[head * v.shape[2] : (head + 1) * v.shape[2]]
        written = pattern[..., None] * (v[:, kv] @ out)  # [pos, source, d_model]
        truth = trace.norm(("head", layer, head), written.transpose(0, 1)).transpose(0, 1) @ direction
        for row in rows.itertuples():
            assert abs(row.contribution - truth[row.position, row.source]) <= HAND * size[row.position]
            assert abs(row.attention - pattern[row.position, row.source]) <= HAND


def test_what_lies_behind_the_position_read_is_missed_and_the_worst_head_counts():
    """A head that attends ahead has no row for that; the second prompt's position 1 is row 5 of a batch of 4 positions each."""

    class Tap(SourceTap):
        def __init__(self):
            """Has one attention, which is made up."""

        def __contains__(self, key):
            return True

        def shares(self, key, g, at):
            return torch.tensor([[[1.0, 2.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]]), torch.full((1, 2, 4), 0.25)

    model, key = tiny.proven("llama"), (0, "write", "x")
    asked = (Tap(), key, torch.zeros(2, 4, 8), torch.tensor([5]), torch.tensor([[3.0, 10.0]]))
    part = BySource(model.module, model.anatomy, None).part(*asked)
    assert part.sources.tolist() == [[[1, 2, 0, 0], [1, 2, 0, 0]]]
    assert part.gap.tolist() == [7.0]
    part = ByToken(model.module, model.anatomy, None).part(*asked)
    assert (part.sources.tolist(), part.gap.tolist(), part.shares.tolist()) == ([[[2, 4, 0, 0]]], [7.0], [[13.0]])


@pytest.mark.parametrize("family", SERVED)
def test_rows_are_all_positions_up_to_the_one_that_is_read(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target="next", positions="all", by="source")
    check_contract(model, df, PROMPTS)
    heads = df[df.component == "head"]
    for (_, position, _, _, _), rows in heads.groupby(["prompt", "position", "layer", "sublayer", "head"]):
        assert rows.source.tolist() == list(range(position + 1))
    assert heads.attention.between(0, 1 + 1e-6).all()
    others = df[df.component != "head"]
    assert (others.source == -1).all()
    assert others.attention.isna().all()
    assert (others.source_token == "").all()
    assert (heads.source_token.astype(str) == [str(PROMPTS[p][s]) for p, s in zip(heads.prompt, heads.source, strict=True)]).all()


@pytest.mark.parametrize("family", SERVED)
def test_a_token_is_its_sum_over_all_heads(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target=11, versus=4, positions="all", by="token")
    check_contract(model, df, PROMPTS)
    fine = sl.attribute(model, PROMPTS, target=11, versus=4, positions="all", by="source")
    summed = fine[fine.component == "head"].groupby(["prompt", "position", "source"]).contribution.sum()
    tokens = df[df.component == "head"].set_index(["prompt", "position", "source"])
    assert (tokens[["layer", "sublayer", "head"]] == -1).all(axis=None)
    assert np.allclose(tokens.contribution, summed.loc[tokens.index], rtol=0, atol=1e-5 * summed.abs().max())
    assert "attention" not in df


def test_attention_that_cannot_be_read_is_refused_by_name():
    reason = "BloomForCausalLM cannot be split by source: BloomAttention of layer 0 does not attend through a function that it looks up"
    for by in ("source", "token"):
        with pytest.raises(UnsupportedModelError, match=reason):
            sl.attribute(tiny.proven("bloom"), PROMPTS, by=by)


@pytest.mark.parametrize("fails", [False, True])
def test_what_attends_is_as_it_was(fails, monkeypatch):
    model = tiny.proven("llama")
    before = dict(ALL_ATTENTION_FUNCTIONS), model.module.config._attn_implementation
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.module.modules())
    if fails:
        monkeypatch.setattr("streamlens.stream.sources.pattern_at", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sl.attribute(model, PROMPTS, by="source")
    else:
        sl.attribute(model, PROMPTS, by="source")
    assert (dict(ALL_ATTENTION_FUNCTIONS), model.module.config._attn_implementation) == before
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.module.modules()) == hooks
    assert not any("forward" in vars(part) for part in model.module.modules())


def test_watching_within_watching_leads_back():
    model, before, seen = tiny.proven("llama"), dict(ALL_ATTENTION_FUNCTIONS), []

    def attend(function, *args, **kwargs):
        seen.append("inner")
        return function(*args, **kwargs)

    with torch.no_grad(), watched_attention(model.module, lambda *_: seen.append("outer")):
        with replaced_attention(model.module, attend):
            model.module(torch.tensor(PROMPTS[:1]))
        assert set(seen) == {"inner"}
        model.module(torch.tensor(PROMPTS[:1]))
    assert seen.count("outer") == model.n_layers
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


def test_an_expert_is_its_own_weights_times_its_routing_weight():
    model, ids = tiny.proven("mixtral"), PROMPTS[0]
    df = sl.attribute(model, ids, target=11, versus=4, positions="all", by="expert")
    check_contract(model, df, [ids])
    kept, block = {}, model.module.model.layers[2].mlp
    handles = [block.register_forward_hook(lambda _, args, out: kept.update(x=args[0][0]))]
    handles += [model.module.model.norm.register_forward_hook(lambda _, args, out: kept.update(final=args[0][0]))]
    with torch.no_grad():
        model.module(torch.tensor([ids]))
        for handle in handles:
            handle.remove()
        weights = torch.softmax(kept["x"] @ block.gate.weight.T, -1)
        top, chosen = weights.topk(2, -1)
        top = top / top.sum(-1, keepdim=True)
        norm, head = model.module.model.norm, model.module.lm_head.weight
        scale = norm.weight / (kept["final"].square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        for position in range(len(ids)):
            rows = df[(df.position == position) & (df.layer == 2) & (df.component == "expert")].set_index("expert").contribution
            assert set(rows.index) == set(chosen[position].tolist())
            for weight, expert in zip(top[position], chosen[position].tolist(), strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ kept["x"][position]).chunk(2)
                written = weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
                assert abs(float((written * scale[position]) @ (head[11] - head[4])) - rows[expert]) <= 1e-5
