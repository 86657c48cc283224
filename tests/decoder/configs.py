"""Tiny decoders: one a choice of the config, with gains and biases drawn at random, since ones and zeros hide mistakes."""

from functools import cache

import torch

import streamlens as sl
from tests.models.tiny import randomise

SIZES = {"n_vocab": 40, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_length": 64, "d_mlp_multiple": 8}
PLACEMENTS = ("pre", "post", "deepnorm", "sandwich", "reordered", "parallel", "mix-ln", "layernorm-scaling")
LAYERNORM = {"norm": "layernorm", "norm_bias": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
_SCALED = {"rope_factor": 4.0, "rope_original_length": 8}

CASES = {name: {"placement": name, "mix_share": 0.5} for name in PLACEMENTS}
CASES |= {f"{name}, layernorm and biases": {"placement": name, "mix_share": 0.5, "mlp": "gelu"} | LAYERNORM for name in PLACEMENTS}
CASES |= {f"{name}, attention only": {"placement": name, "mix_share": 0.5, "mlp": "none"} for name in PLACEMENTS if name != "parallel"}
POSITIONS = {
    "none": {"positions": "none"},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
    "alibi": {"positions": "alibi", "n_heads": 6},
    "rope": {},
    "rope interleaved, partial": {"rope_pairs": "interleaved", "rotary_dims": 4},
    "linear": {"rope_scaling": "linear", "rope_factor": 4.0},
    "ntk": {"rope_scaling": "ntk", "rope_factor": 4.0},
    "dynamic": {"rope_scaling": "dynamic", **_SCALED},
    "yarn": {"rope_scaling": "yarn", **_SCALED},
    "llama3": {"rope_scaling": "llama3", **_SCALED},
}
ATTENTION = {
    "gqa": {"n_kv_heads": 2},
    "mqa, wide heads": {"n_kv_heads": 1, "d_head": 10},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window on some layers": {"window": 3, "window_layers": (0, 2), "n_kv_heads": 2},
    "window and alibi": {"window": 3, "positions": "alibi"},
    "window and dynamic": {"window": 3, "rope_scaling": "dynamic", **_SCALED},
    "softcap": {"attention_softcap": 2.0},
    "sink": {"sink": True, "n_kv_heads": 2},
    "sink, softcap and window": {"sink": True, "attention_softcap": 2.0, "window": 3},
    "qk norm by head": {"qk_norm": "head"},
    "qk norm of the width": {"qk_norm": "width", "n_kv_heads": 2},
}
CASES |= {f"positions {name}": changes for name, changes in POSITIONS.items()} | ATTENTION
CASES |= {
    "norms without parameters": {"norm_parameters": False},
    "layernorms without parameters": {"norm": "layernorm", "norm_parameters": False, "placement": "sandwich"},
    "no final norm": {"final_norm": False},
    "norm on the embedding": {"embed_norm": True},
    "parallel, two norms": {"placement": "parallel", "parallel_norms": 2},
    "relu": {"mlp": "relu"},
    "geglu": {"mlp": "geglu", "gelu": "tanh"},
    "experts": {"n_experts": 4},
    "experts, shared ones too": {"n_experts": 4, "n_shared_experts": 2, "expert_weights_sum_to_one": False},
    "plain experts": {"n_experts": 3, "mlp": "gelu", "n_experts_active": 1},
    "tied": {"tied": True},
    "softcap of logits": {"logit_softcap": 3.0, "unembed_bias": True},
    "multipliers": {"embed_multiplier": 3.3, "residual_multiplier": 0.2234567, "logit_scale": 0.3},
    "multipliers and deepnorm": {"residual_multiplier": 0.2234567, "placement": "deepnorm"},
    "one layer": {"n_layers": 1},
}


def decoder(dtype=torch.float64, seed=0, **changes):
    """A tiny decoder in eval mode."""
    module = sl.Decoder(sl.DecoderConfig(**SIZES | changes), seed=seed).eval()
    randomise(module, seed)
    return module.to(dtype)


@cache
def proven(name):
    """The decoder of a case, opened and proven once for all tests, which must leave it as it was."""
    return sl.load(decoder(**CASES[name]))


def tokens(batch=2, length=11, seed=0):
    return torch.randint(0, SIZES["n_vocab"], (batch, length), generator=torch.Generator().manual_seed(seed))
