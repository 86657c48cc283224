"""Initial weights: the standard deviation that each scheme says, by role; the same for a seed, and nobody else's generator used."""

import math

import pytest
import torch

import streamlens as sl

SIZES = {"n_vocab": 300, "d_model": 96, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "d_mlp": 256}
D, L, M = 96, 4, 256
BETA = (8 * L) ** -0.25
EXPECTED = {
    "plain": {},
    "gpt2": {"o_proj": 0.02 / math.sqrt(2 * L), "down_proj": 0.02 / math.sqrt(2 * L)},
    "xavier": {
        "q_proj": math.sqrt(2 / (2 * D)),
        "v_proj": math.sqrt(2 / (2 * D)),
        "o_proj": math.sqrt(2 / (2 * D)),
        "up_proj": math.sqrt(2 / (D + M)),
        "down_proj": math.sqrt(2 / (D + M)),
        "unembed": math.sqrt(2 / (D + 300)),
    },
    "mup": {name: 0.02 * math.sqrt(64 / D) for name in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")} | {"unembed": 0.02 * 64 / D},
}
EXPECTED["deepnorm"] = EXPECTED["xavier"] | {n: BETA * EXPECTED["xavier"][n] for n in ("v_proj", "o_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize("init", EXPECTED)
def test_standard_deviations(init):
    module = sl.Decoder(sl.DecoderConfig(**SIZES, init=init), seed=1)
    block = module.blocks[1]
    found = {name: getattr(block.attn, name) for name in ("q_proj", "v_proj", "o_proj")}
    found |= {name: getattr(block.mlp, name) for name in ("up_proj", "down_proj")} | {"embed": module.embed, "unembed": module.unembed}
    for name, part in found.items():
        assert float(part.weight.detach().std()) == pytest.approx(EXPECTED[init].get(name, 0.02), rel=0.03), name


def test_gains_are_one_and_biases_zero():
    module = sl.Decoder(sl.DecoderConfig(**SIZES, norm="layernorm", norm_bias=True, qkv_bias=True, sink=True, qk_norm="head"))
    for name, weight in module.named_parameters():
        if weight.dim() == 1:
            assert bool((weight == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all()), name


def test_a_seed_gives_the_same_weights_and_leaves_the_user_s_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (sl.Decoder(sl.DecoderConfig(**SIZES), seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


@pytest.mark.parametrize("placement", ["pre", "post", "layernorm-scaling", "deepnorm"])
def test_deep_untrained_streams_stay_finite(placement):
    module = sl.Decoder(sl.DecoderConfig(50, 32, 24, 4, placement=placement, init="deepnorm" if placement == "deepnorm" else "gpt2"))
    assert bool(torch.isfinite(module(torch.arange(9)[None]).logits).all())
