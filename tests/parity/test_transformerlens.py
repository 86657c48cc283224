"""Heads against TransformerLens' own decomposition, which folds and centres weights of a copy and projects every head's result.

Differences of logits, since it centres the unembedding. It moves the value bias, with what the norm's bias adds to it, to the
attention's output bias; a head of ours keeps its share, so that share is taken off before comparing.
"""

from functools import cache

import numpy as np
import pytest
import torch
from transformer_lens.tools.analysis import direct_logit_attribution

import streamlens as sl
from tests import byhand
from tests.models import tiny
from tests.tolerances import PARITY

IDS = [5, 9, 3, 22, 41, 17, 8]
TARGET, VERSUS = 11, 4


@cache
def theirs(family, unit):
    """Their attribution `[pos]` by label, on a copy of the weights in compatibility mode."""
    bridge = tiny.proven(family).bridge(copy=True)
    bridge.enable_compatibility_mode()
    found = direct_logit_attribution(
        bridge, torch.tensor([IDS]), answer_tokens=torch.tensor([TARGET]), incorrect_tokens=torch.tensor([VERSUS]), unit=unit, pos=None
    )
    return dict(zip(found.labels, found.attribution[:, 0].detach().double().numpy(), strict=True))


@cache
def ours(family):
    return sl.attribute(tiny.proven(family), IDS, target=TARGET, versus=VERSUS, positions="all")


def share(df, **where):
    """Our contribution `[pos]` of all rows with these values."""
    rows = df[np.logical_and.reduce([df[name] == value for name, value in where.items()])]
    return rows.groupby("position").contribution.sum().to_numpy()


def size(df):
    return df.contribution.abs().groupby(df.position).sum().to_numpy()


def value_biases(family):
    """b_V W_O of every (layer, head), with the norm's bias in b_V: vectors that a head writes at every position."""
    module = tiny.proven(family).module
    w, found = byhand.weights(module), {}
    for layer in range(3):
        if family == "llama":
            bias = w[f"model.layers.{layer}.self_attn.v_proj.bias"].view(2, 8).repeat_interleave(2, dim=0)
            out = w[f"model.layers.{layer}.self_attn.o_proj.weight"].T
        else:
            name = f"transformer.h.{layer}"
            bias = w[f"{name}.attn.c_attn.bias"] + w[f"{name}.ln_1.bias"] @ w[f"{name}.attn.c_attn.weight"]
            bias, out = bias[-32:].view(4, 8), w[f"{name}.attn.c_proj.weight"]
        found |= {(layer, h): bias[h] @ out[h * 8 : (h + 1) * 8] for h in range(4)}
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_heads_agree(family):
    df, found = ours(family), theirs(family, "head")
    trace = getattr(byhand, family)(tiny.proven(family).module, IDS)
    direction = trace.unembed[TARGET] - trace.unembed[VERSUS]
    moved = []
    for (layer, head), write in value_biases(family).items():
        constant = (trace.norm(("head", layer, head), write.expand(len(IDS), -1)) @ direction).numpy()
        gap = abs(share(df, component="head", layer=layer, head=head) - constant - found[f"L{layer}H{head}"])
        assert (gap <= PARITY * size(df)).all(), (layer, head)
        moved.append(abs(constant).max())
    assert np.median(moved) > 1e-2  # the comparison would fail without it


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sublayers_and_embeddings_agree(family):
    """Here nothing moves: the biases stay within the attention's and the MLP's whole write."""
    df, found = ours(family), theirs(family, "component")
    if family == "gpt2":
        assert (abs(share(df, component="pos_embed") - found["pos_embed"]) <= PARITY * size(df)).all()
    assert (abs(share(df, component="embed") - found["embed"]) <= PARITY * size(df)).all()
    for layer in range(3):
        attn = share(df, component="head", layer=layer) + share(df, component="attn_bias", layer=layer)
        # What the norm before attention adds to every value arrives in their output bias, so the whole is the same.
        assert (abs(attn - found[f"{layer}_attn_out"]) <= PARITY * size(df)).all(), layer
        assert (abs(share(df, component="mlp", layer=layer) - found[f"{layer}_mlp_out"]) <= PARITY * size(df)).all(), layer


def test_their_head_rows_lump_the_rest_together():
    """Their `remainder` is all that is no head, which the tables keep apart."""
    found = theirs("llama", "head")
    df = ours("llama")
    constants = value_biases("llama")
    trace = byhand.llama(tiny.proven("llama").module, IDS)
    moved = sum(
        (trace.norm(("head", *key), w.expand(7, -1)) @ (trace.unembed[TARGET] - trace.unembed[VERSUS])).numpy()
        for key, w in constants.items()
    )
    rest = df[df.component != "head"].groupby("position").contribution.sum().to_numpy()
    assert (abs(rest + moved - found["remainder"]) <= PARITY * size(df)).all()
