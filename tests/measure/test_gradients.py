"""Gradient norms at every resid_pre: against torch's own backward pass through an untouched model."""

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError
from tests import slowgrowth
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_norms_are_those_of_a_plain_backward_pass(family):
    model = tiny.proven(family)
    df = sl.gradient_norms(model, PROMPTS)
    schema.validate(df, "gradients")
    for prompt, ids in enumerate(PROMPTS):
        truth, loss = slowgrowth.gradients(model.module, model.anatomy.block_paths, ids)
        rows = df[df.prompt == prompt]
        found = rows.pivot_table(index="layer", columns="position", values="value").to_numpy()
        assert abs(found - truth).max() <= 1e-4 * truth.max()
        assert rows.loss.to_numpy() == pytest.approx(loss, rel=1e-5)
    assert set(df[df.layer == model.n_layers].site) == {"final"}


def test_only_the_last_position_has_no_gradient_at_the_end():
    df = sl.gradient_norms(tiny.proven("llama"), PROMPTS)
    final = df[df.site == "final"]
    last = final.position == final.groupby("prompt").position.transform("max")
    assert (final[last].value == 0).all()
    assert (final[~last].value > 0).all()


def test_nothing_depends_on_the_batch():
    together, apart = (sl.gradient_norms(tiny.proven("gemma2"), PROMPTS, max_tokens=n) for n in (1000, 1))
    np.testing.assert_allclose(together.value, apart.value, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(training):
    module = tiny.model("llama").train(training)
    model = sl.load(module)
    next(module.parameters()).requires_grad_(False)
    before = {name: p.requires_grad for name, p in module.named_parameters()}
    with torch.no_grad():
        sl.gradient_norms(model, PROMPTS)
    assert before == {name: p.requires_grad for name, p in module.named_parameters()}
    assert all(p.grad is None for p in module.parameters())
    assert module.training is training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_prompt_of_one_token_is_refused():
    with pytest.raises(InputError, match="prompts must have 2 tokens or more, since the loss is of next tokens; got one of 1"):
        sl.gradient_norms(tiny.proven("llama"), [[1, 2], [3]])


def test_at_initialisation_post_norm_loses_the_gradient_on_its_way_back_and_pre_norm_does_not():
    """Xiong et al. 2020: the last layers of a post-norm network get much larger gradients than the first; of a pre-norm one they do not."""
    ids = torch.randint(500, (4, 32), generator=torch.Generator().manual_seed(0))
    ratio = {}
    for placement in ("pre", "post", "deepnorm"):
        config = sl.DecoderConfig(
            n_vocab=500, d_model=64, n_layers=10, n_heads=4, placement=placement, norm="layernorm", mlp="gelu",
            init="deepnorm" if placement == "deepnorm" else "xavier",
        )  # fmt: skip
        df = sl.gradient_norms(sl.load(sl.Decoder(config)), ids)
        norm = df[(df.position > 0) & (df.value > 0)].groupby("layer").value.median()
        ratio[placement] = norm[10] / norm[1]
    assert ratio["post"] > 3
    assert 0.3 < ratio["pre"] < 1
    assert ratio["deepnorm"] == pytest.approx(1, abs=0.3)
