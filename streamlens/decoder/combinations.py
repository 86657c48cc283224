"""Choices that do not go together, each refused in one sentence that names both fields."""

from __future__ import annotations

from collections.abc import Iterator

from streamlens.errors import InputError

_WHOLE = ("n_vocab", "d_model", "n_layers", "n_heads", "max_length", "d_mlp_multiple", "mup_base_width", "n_experts_active")
_WHOLE_OR_NONE = ("n_kv_heads", "d_head", "rotary_dims", "rope_original_length", "window", "d_mlp")
_POSITIVE = ("rope_base", "rope_factor", "norm_eps", "logit_scale", "embed_multiplier", "residual_multiplier", "init_std", "yarn_beta_fast")
_POSITIVE += ("yarn_beta_slow", "llama3_low_freq_factor", "llama3_high_freq_factor")
_POSITIVE_OR_NONE = ("attention_softcap", "attention_scale", "logit_softcap", "rope_attention_factor")
_COUNTS = ("n_experts", "n_shared_experts")

Clash = tuple[bool, str, str]
"""(whether it is there, what a choice needs, the field that stands in its way)."""


def refuse_impossible(c) -> None:
    """Raise :class:`InputError` for the first number out of range, or pair of fields that cannot both hold."""
    for sentence in _out_of_range(c):
        raise InputError(sentence)
    for clashes in (_heads, _positions, _norms, _attention, _mlp):
        for clash, need, field in clashes(c):
            if clash:
                raise InputError(f"{need}; got {field} {getattr(c, field)!r}")


def _out_of_range(c) -> Iterator[str]:
    for name in (*_WHOLE, *_WHOLE_OR_NONE, *_COUNTS):
        value, least = getattr(c, name), 0 if name in _COUNTS else 1
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not (whole or (name in _WHOLE_OR_NONE and value is None)):
            yield f"{name} must be a whole number of at least {least}{_or_none(name)}; got {value!r}"
    for name in (*_POSITIVE, *_POSITIVE_OR_NONE):
        value = getattr(c, name)
        if not ((isinstance(value, int | float) and 0 < value < float("inf")) or (name in _POSITIVE_OR_NONE and value is None)):
            yield f"{name} must be a number above 0{_or_none(name)}; got {value!r}"
    if c.parallel_norms not in (1, 2):
        yield f"parallel_norms must be 1 or 2; got {c.parallel_norms!r}"


def _or_none(name: str) -> str:
    return " or None" if name in (*_WHOLE_OR_NONE, *_POSITIVE_OR_NONE) else ""


def _heads(c) -> Iterator[Clash]:
    uneven = c.d_head is None and c.d_model % c.n_heads != 0
    yield uneven, f"d_model {c.d_model} must be a multiple of n_heads where d_head is None", "n_heads"
    yield c.n_heads % c.kv_heads != 0, f"n_heads {c.n_heads} must be a multiple of n_kv_heads", "n_kv_heads"


def _positions(c) -> Iterator[Clash]:
    rope, scaled = c.positions == "rope", c.rope_scaling != "none"
    yield c.positions == "sinusoidal" and c.d_model % 2 == 1, "positions 'sinusoidal' needs an even d_model", "d_model"
    yield scaled and not rope, f"rope_scaling {c.rope_scaling!r} needs positions 'rope'", "positions"
    yield c.rotary_dims is not None and not rope, f"rotary_dims {c.rotary_dims} needs positions 'rope'", "positions"
    yield not scaled and c.rope_factor != 1, f"rope_factor {c.rope_factor} needs a rope_scaling", "rope_scaling"
    yield c.rope_factor < 1, f"rope_scaling {c.rope_scaling!r} needs a rope_factor of at least 1", "rope_factor"
    steep = c.llama3_high_freq_factor > c.llama3_low_freq_factor
    need = f"llama3_high_freq_factor {c.llama3_high_freq_factor} must be above llama3_low_freq_factor"
    yield c.rope_scaling == "llama3" and not steep, need, "llama3_low_freq_factor"
    if rope:
        width, field = c.rotary_width, "d_head" if c.rotary_dims is None else "rotary_dims"
        yield width > c.head_width, f"d_head {c.head_width} must be at least rotary_dims", "rotary_dims"
        yield width % 2 == 1, "positions 'rope' turns pairs of coordinates, and their number must be even", field
        yield c.rope_scaling in ("ntk", "dynamic") and width < 4, f"rope_scaling {c.rope_scaling!r} needs two pairs or more", field


def _norms(c) -> Iterator[Clash]:
    yield c.norm_bias and c.norm == "rmsnorm", "norm_bias True needs norm 'layernorm'", "norm"
    yield c.norm_bias and not c.norm_parameters, "norm_bias True needs norm_parameters True", "norm_parameters"
    parallel = c.placement == "parallel"
    yield not parallel and c.parallel_norms == 2, "parallel_norms 2 needs placement 'parallel'", "placement"
    yield parallel and c.mlp == "none", "placement 'parallel' needs an mlp beside attention", "mlp"
    one_kind = c.placement == "mix-ln" and not 0 < c.n_post_norm < c.n_layers
    yield (
        one_kind,
        f"placement 'mix-ln' needs blocks of both kinds, and mix_share {c.mix_share} makes {c.n_post_norm} post-norm",
        "n_layers",
    )
    yield c.init == "mup" and c.tied, "init 'mup' draws the unembedding smaller than the embedding and needs tied False", "tied"


def _attention(c) -> Iterator[Clash]:
    layers = c.window_layers or ()
    yield c.window_layers is not None and c.window is None, f"window_layers {layers} needs a window", "window"
    outside = any(not 0 <= layer < c.n_layers for layer in layers)
    yield outside, f"window_layers {layers} must be numbers of layers, from 0 and below n_layers", "n_layers"


def _mlp(c) -> Iterator[Clash]:
    if c.mlp == "none":
        for name in ("d_mlp", "mlp_bias", "n_experts"):
            yield bool(getattr(c, name)), f"{name} {getattr(c, name)} needs an mlp", "mlp"
    yield c.n_experts > 0 and c.mlp_bias, f"n_experts {c.n_experts} needs mlp_bias False: experts have none", "mlp_bias"
    too_many = 0 < c.n_experts < c.n_experts_active
    yield too_many, f"n_experts {c.n_experts} must be at least n_experts_active", "n_experts_active"
    yield c.n_experts == 0 and c.n_shared_experts > 0, f"n_shared_experts {c.n_shared_experts} needs routed experts", "n_experts"
