"""Blocks that add to their input in place, as some families do, under a forward of the user's own: the numbers are the same.

A leaf, a kept stream or a followed one that shares memory with what a block overwrites would be silently wrong.
"""

from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from tests.models import tiny
from tests.tolerances import ROUNDING

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]


def adding_in_place(layer):
    def forward(hidden_states, **kwargs):
        attn, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        hidden_states += attn
        hidden_states += layer.mlp(layer.post_attention_layernorm(hidden_states))
        return hidden_states

    return forward


@pytest.fixture(scope="module")
def in_place():
    module = deepcopy(tiny.proven("llama").module)
    for layer in module.model.layers:
        layer.forward = adding_in_place(layer)
    return sl.load(module)


@pytest.fixture(scope="module")
def plain():
    return tiny.proven("llama")


def test_it_is_noticed_and_the_users_forward_is_kept(in_place):
    assert in_place.anatomy.clones
    own = [layer.forward for layer in in_place.module.model.layers]
    sl.ablate(in_place, PROMPTS)
    assert [layer.forward for layer in in_place.module.model.layers] == own


@pytest.mark.parametrize("unit", ["block", "attn", "mlp"])
def test_removals_are_the_same(unit, in_place, plain):
    found, expected = (sl.ablate(model, PROMPTS, unit=unit, target="next", positions="all") for model in (in_place, plain))
    pd.testing.assert_frame_equal(found, expected, atol=10 * ROUNDING)


def test_contributions_are_the_same(in_place, plain):
    found, expected = (sl.attribute(model, PROMPTS, target="next", positions="all", check="full") for model in (in_place, plain))
    pd.testing.assert_frame_equal(found, expected, atol=10 * ROUNDING)


def test_norms_and_raw_tensors_are_the_same(in_place, plain):
    for measures in (None, ["scale", "gain", "cosine", "massive"]):  # scale: of what each norm reads
        found, expected = (sl.norms(model, PROMPTS, measures=measures) for model in (in_place, plain))
        pd.testing.assert_frame_equal(found, expected, atol=10 * ROUNDING)
    sites = ["embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "z"]
    found, expected = (sl.record(model, PROMPTS, sites=sites) for model in (in_place, plain))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.allclose(found[name], value, atol=10 * ROUNDING), name
    assert not torch.equal(found["blocks.0.hook_resid_pre"], found["blocks.0.hook_resid_mid"])
