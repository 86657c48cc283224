"""PEFT: the transformers model inside a `PeftModel`, its adapters in place and active."""

from __future__ import annotations

import torch
from torch import nn

from streamlens.errors import UnsupportedModelError
from streamlens.models.checks import is_transformers_model
from streamlens.stream.run import borrowed

_LIMIT = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference between a PeftModel's logits and those of the model inside, relative to the largest logit."""


def is_peft(source) -> bool:
    """True for a `PeftModel` of any task; told by its class's name, so that nothing is imported to say no."""
    return any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.") for kind in type(source).__mro__)


def adapted_module(peft_model: nn.Module) -> nn.Module:
    """The transformers model that a `PeftModel` has put its adapters into; it is the user's own, and stays as it is.

    Raises :class:`UnsupportedModelError` where the adapter is not inside the model: a learned prompt is added around it.
    """
    module = peft_model.get_base_model()
    if not is_transformers_model(module):
        raise UnsupportedModelError(f"{type(peft_model).__name__} wraps no transformers model but a {type(module).__name__}")
    # For every adapter: a learned prompt puts tokens or keys of its own before the user's.
    if any(config.is_prompt_learning for config in peft_model.peft_config.values()):
        raise UnsupportedModelError(f"{type(peft_model).__name__} learns a prompt, which is no part of {type(module).__name__}")
    weight = module.get_input_embeddings().weight
    ids = torch.arange(1, 9, device=weight.device).remainder(weight.shape[0])[None]
    with borrowed(peft_model), torch.no_grad():
        theirs, ours = peft_model(input_ids=ids, use_cache=False).logits, module(input_ids=ids, use_cache=False).logits
    error = float((theirs - ours).abs().max() / theirs.abs().max())
    if not error <= _LIMIT[ours.dtype]:
        raise UnsupportedModelError(
            f"the logits of this {type(peft_model).__name__} differ from those of the {type(module).__name__} inside it by {error:.1g} "
            "of the largest logit; give its merge_and_unload()"
        )
    return module
