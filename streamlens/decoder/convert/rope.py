"""Rotary settings by transformers' names."""

from __future__ import annotations

from typing import Any

from streamlens.decoder.config import DecoderConfig
from streamlens.errors import UnsupportedModelError

_KINDS = {"default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}
_FIELDS = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_length",
    "attention_factor": "rope_attention_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_truncate",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
    "low_freq_factor": "llama3_low_freq_factor",
    "high_freq_factor": "llama3_high_freq_factor",
}


def read_rope(parameters: dict[str, Any], d_head: int) -> dict[str, Any]:
    """Fields of a config from transformers' `rope_parameters`. Raises :class:`UnsupportedModelError` for a kind that it has not."""
    kind = parameters.get("rope_type", "default")
    if kind not in _KINDS:
        raise UnsupportedModelError(f"the native decoder has no rope scaling {kind!r}")
    fields = {"rope_base": float(parameters["rope_theta"]), "rope_scaling": _KINDS[kind]}
    fields |= {ours: parameters[theirs] for theirs, ours in _FIELDS.items() if parameters.get(theirs) is not None and kind != "default"}
    if kind == "dynamic":  # transformers measures from max_position_embeddings, whatever else is said
        fields.pop("rope_original_length", None)
    width = int(d_head * parameters.get("partial_rotary_factor", 1.0))
    return fields | ({"rotary_dims": width} if width != d_head else {})


def write_rope(c: DecoderConfig) -> dict[str, Any]:
    """transformers' `rope_parameters` of a config. Raises :class:`UnsupportedModelError` for what these cannot say."""
    kinds = {ours: theirs for theirs, ours in _KINDS.items()}
    if c.rope_scaling not in kinds or c.rope_pairs != "half":
        field = "rope_pairs" if c.rope_scaling in kinds else "rope_scaling"
        raise UnsupportedModelError(f"transformers has no {field} {getattr(c, field)!r} in this family")
    parameters = {"rope_type": kinds[c.rope_scaling], "rope_theta": c.rope_base}
    if c.rotary_width != c.head_width:
        parameters["partial_rotary_factor"] = c.rotary_width / c.head_width
    parameters |= {"factor": c.rope_factor} if c.rope_scaling != "none" else {}
    parameters |= {"original_max_position_embeddings": c.original_length} if c.rope_scaling in ("yarn", "llama3") else {}
    values = {theirs: getattr(c, ours) for theirs, ours in _FIELDS.items() if ours.startswith(c.rope_scaling)}
    values |= {"attention_factor": c.rope_attention_factor} if c.rope_scaling == "yarn" else {}
    return parameters | {name: value for name, value in values.items() if value is not None}
