"""What a source must be before its anatomy is looked at: a decoder-only language model with a head and finite weights."""

from __future__ import annotations

import torch
from torch import nn

from streamlens.errors import UnsupportedModelError

_SUMMABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ONLY = "streamlens reads decoder-only language models"


def is_transformers_model(source) -> bool:
    """True for a transformers `PreTrainedModel`; told by its class's name, so that nothing is imported to say no."""
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in type(source).__mro__)


def check_decoder(config) -> None:
    """Raise :class:`UnsupportedModelError` where a transformers `config` says that its model is not decoder-only.

    A config that knows no causal head is refused as well, before any weight is downloaded.
    """
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; {_ONLY}")
    if _bidirectional(config) or not _has_causal_head(config):
        raise UnsupportedModelError(f"{name} is an encoder-only model; {_ONLY}")


def _bidirectional(config) -> bool:
    """Families with a causal head as an option say in the config which of the two a checkpoint is."""
    from transformers.models.auto import modeling_auto

    optional = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or config.model_type == "bert-generation"
    return optional and not getattr(config, "is_decoder", getattr(config, "causal", False))


def _has_causal_head(config) -> bool:
    from transformers.models.auto import modeling_auto

    remote = getattr(config, "auto_map", None) or {}
    return config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in remote


def check_head(module: nn.Module) -> None:
    """Raise :class:`UnsupportedModelError` where a transformers model has no unembedding, or a masked one."""
    name = type(module).__name__
    if module.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    if getattr(module.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; {_ONLY}")
    # A decoder taken out of a multimodal model has a config that no automatic class knows; the proof at load decides about it.
    causal = name.endswith("ForCausalLM") or _has_causal_head(module.config)
    if name.endswith("ForMaskedLM") or _bidirectional(module.config) or not causal:
        raise UnsupportedModelError(f"{name} is an encoder-only model; {_ONLY}")


def check_finite(module: nn.Module) -> None:
    """Raise :class:`UnsupportedModelError` that names the first parameter with a NaN or an infinity.

    One reduction a parameter; meta tensors and quantised dtypes are skipped.
    """
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.is_meta or weight.dtype not in _SUMMABLE:
                continue
            # A sum is one pass without a mask in memory; only a sum that is not finite is looked at closely.
            total = weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
            if not torch.isfinite(total) and (bad := int((~torch.isfinite(weight)).sum())):
                raise UnsupportedModelError(
                    f"{type(module).__name__} has weights that are not finite: {name} holds {bad} NaN or infinite values"
                )
