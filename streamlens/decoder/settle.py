"""Two configs are alike where their settled forms are equal: what a None stands for filled in, what has no effect at its default."""

from __future__ import annotations

from dataclasses import fields, replace

_INITIAL = ("init", "init_std", "mup_base_width", "aux_loss", "d_mlp_multiple")
_YARN = ("yarn_beta_fast", "yarn_beta_slow", "yarn_truncate", "yarn_mscale", "yarn_mscale_all_dim")
_LLAMA3 = ("llama3_low_freq_factor", "llama3_high_freq_factor")
_EXPERTS = ("n_experts_active", "expert_weights_sum_to_one")


def settle(c):
    """The settled form of a config."""
    windows = [layer for layer in range(c.n_layers) if c.window_of(layer) is not None]
    filled = {
        "n_kv_heads": c.kv_heads,
        "d_head": c.head_width,
        "attention_scale": c.scale,
        "final_norm": c.has_final_norm,
        "d_mlp": None if c.mlp == "none" else c.mlp_width,
        "rotary_dims": c.rotary_width if c.positions == "rope" else None,
        "rope_original_length": c.original_length if c.rope_scaling in ("dynamic", "yarn", "llama3") else None,
        "window": c.window if windows else None,
        "window_layers": tuple(windows) if windows else None,
    }
    defaults = {f.name: f.default for f in fields(c)}
    return replace(c, **filled, **{name: defaults[name] for name in _without_effect(c)})


def _without_effect(c) -> list[str]:
    names = list(_INITIAL)
    names += [] if c.placement == "mix-ln" else ["mix_share"]
    names += [] if c.positions == "rope" else ["rope_base", "rope_pairs"]
    names += [] if c.rope_scaling == "yarn" else _YARN
    names += [] if c.rope_scaling == "llama3" else _LLAMA3
    names += [] if c.mlp in ("gelu", "geglu") else ["gelu"]
    names += [] if c.n_experts else _EXPERTS
    names += [] if c.norm_parameters and c.norm == "layernorm" else ["norm_bias"]
    return names
