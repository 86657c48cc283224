"""What later layers and tokens take from a layer: against plainly hooked forward passes."""

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError
from streamlens.measure.units import variants
from tests import slowgrowth
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "olmo2", "bloom", "opt-post-norm", "gemma4"])
@pytest.mark.parametrize(("unit", "span"), [("block", "all"), ("block", "future"), ("attn", "all"), ("mlp", "future"), ("head", "all")])
def test_changes_by_plain_hooks(family, unit, span):
    model = tiny.proven(family)
    df = sl.depth_use(model, PROMPTS, unit=unit, positions=span, layers=[0, model.n_layers - 2])
    schema.validate(df, "depth_use")
    taken = variants(model.anatomy, unit, [0, model.n_layers - 2])
    assert len(df) == 2 * 3 * sum(model.n_layers - v.layer for v in taken)
    for prompt, ids in enumerate(PROMPTS):
        cut = len(ids) if span == "all" else int(0.5 * (len(ids) - 1))
        at = torch.tensor([[0 < t <= cut for t in range(len(ids))]])
        read = [t for t in range(1, len(ids)) if span == "all" or t > cut]
        clean, base = slowgrowth.writes_and_predictions(model, ids)
        for variant in taken[:: max(1, len(taken) // 3)]:
            changed, moved = slowgrowth.writes_and_predictions(model, ids, [site.change(None, at) for site in variant.sites])
            rows = df[(df.prompt == prompt) & (df.layer == variant.layer) & (df["head"] == variant.head)]
            for to in range(variant.layer + 1, model.n_layers + 1):
                if to < model.n_layers:
                    truth = ((changed[to] - clean[to]).norm(dim=-1) / clean[to].norm(dim=-1).clamp_min(1e-6))[read]
                else:
                    truth = (moved - base).norm(dim=-1)[read]
                found = rows[rows.layer_to == to].set_index("statistic")
                assert set(found.measure) == {"write" if to < model.n_layers else "prediction"}
                np.testing.assert_allclose(found.value["max"], float(truth.max()), rtol=2e-4, atol=1e-6)
                np.testing.assert_allclose(found.value["mean"], float(truth.mean()), rtol=2e-4, atol=1e-6)


def test_nothing_depends_on_the_batch():
    model = tiny.proven("llama")
    together, apart = (sl.depth_use(model, PROMPTS, positions="future", max_tokens=n) for n in (1000, 1))
    assert (together.drop(columns="value") == apart.drop(columns="value")).all(axis=None)
    np.testing.assert_allclose(together.value, apart.value, rtol=1e-3, atol=1e-6)
    assert together.groupby("prompt").cut.first().tolist() == [3, 1, 2]


def test_the_future_is_touched_through_attention_alone():
    """Without attention after it, a layer's removal at earlier positions cannot be seen at later ones."""
    model = tiny.proven("llama")
    last = sl.depth_use(model, PROMPTS, positions="future", layers=[model.n_layers - 1])
    assert (last.value == 0).all()
    assert (sl.depth_use(model, PROMPTS, layers=[model.n_layers - 1]).value > 0).all()


def test_the_model_is_left_as_it_was():
    model = sl.load(tiny.model("llama")).module
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    sl.depth_use(sl.load(model), PROMPTS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert before == {name: p.requires_grad for name, p in model.named_parameters()}


def test_bad_input_is_named():
    model = tiny.proven("llama")
    with pytest.raises(InputError, match='prompts must have 3 tokens or more for positions="future"; got one of 2'):
        sl.depth_use(model, [[1, 2, 3], [4, 5]], positions="future")
    with pytest.raises(InputError, match="prompts must have 2 tokens or more, since position 0 is never changed; got one of 1"):
        sl.depth_use(model, [[1]])
    with pytest.raises(InputError, match=r"cut must lie between 0 and 1; got 1.5"):
        sl.depth_use(model, PROMPTS, cut=1.5)
    with pytest.raises(InputError, match=r"unit must be one of .*; got 'neuron'"):
        sl.depth_use(model, PROMPTS, unit="neuron")
