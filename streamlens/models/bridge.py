"""TransformerLens' `TransformerBridge`: the transformers model inside one, and one around a transformers model.

A bridge replaces submodules of the model that it wraps, in place. So neither direction touches what the user holds:
both work on a copy of the module tree that shares the parameter tensors.
"""

from __future__ import annotations

import copy as copying

import torch
from torch import nn

from streamlens.errors import UnsupportedModelError
from streamlens.models.checks import is_transformers_model
from streamlens.stream.run import borrowed

# Largest difference between a bridge and the model inside it, relative to the largest logit: the bridge computes
# attention in an order of its own, so a few roundings of the dtype are allowed.
_LIMIT = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def share_tree(module: nn.Module) -> nn.Module:
    """A copy of the module tree of `module` on the same parameter tensors; tied weights stay tied.

    Submodules, buffers, hook dictionaries and the config are the copy's own; parameters and hook functions are shared.
    """
    return copying.deepcopy(module, _shared(module))


def _shared(module: nn.Module) -> dict[int, object]:
    """A memo by which `deepcopy` keeps the parameters, plain tensor attributes and hook functions of a module tree."""
    memo: dict[int, object] = {}
    for part in module.modules():
        held = list(part._parameters.values())
        held += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
        for name, hooks in vars(part).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                held += hooks.values()
        memo.update((id(value), value) for value in held if value is not None)
    return memo


def is_bridge(source) -> bool:
    """True for a TransformerLens bridge of any kind; told by its class's name, since importing the library takes seconds."""
    return any(kind.__name__ == "BridgeCore" and kind.__module__.startswith("transformer_lens.") for kind in type(source).__mro__)


def wrapped_module(bridge) -> nn.Module:
    """The transformers model inside a TransformerBridge, on the bridge's own parameters; the bridge is left as it is.

    Raises :class:`UnsupportedModelError` where the bridge wraps no transformers model, or where its logits are not that
    model's: its compatibility mode may fold and centre weights in ways that only the bridge itself can run.
    """
    model = getattr(bridge, "original_model", None)
    if not is_transformers_model(model):
        raise UnsupportedModelError(f"{type(bridge).__name__} wraps no transformers model; open the model itself instead")
    memo = _shared(model)
    _take_off(model, memo)
    module = copying.deepcopy(model, memo)
    _drop_added_bias(module.get_output_embeddings())
    left = [name for name, part in module.named_modules() if type(part).__module__.startswith("transformer_lens.")]
    if left:
        raise UnsupportedModelError(f"the TransformerBridge cannot be taken off {type(module).__name__}: {left[0]} stays a bridge")
    _check_same_logits(bridge, model, module)
    return module


def _take_off(module: nn.Module, memo: dict[int, object]) -> None:
    """Let `deepcopy` put the copied original wherever a bridge component stands in the tree of `module`, innermost first."""
    original = module._modules.get("_original_component")
    # Beside its original a component holds views of it by TransformerLens' names, which are no part of the model.
    for part in [original] if original is not None else module.children():
        _take_off(part, memo)
    if original is not None:
        memo[id(module)] = copying.deepcopy(original, memo)


def _drop_added_bias(unembed: nn.Module | None) -> None:
    """TransformerLens gives an unembedding without a bias a buffer of zeros for one, which would be a component that the model has not."""
    added = unembed._buffers.get("bias") if unembed is not None else None
    if added is not None and not bool(added.any()):
        del unembed._buffers["bias"]
        unembed.register_parameter("bias", None)


def _check_same_logits(bridge, inside: nn.Module, module: nn.Module) -> None:
    weight = next(module.parameters())
    ids = torch.arange(1, 9, device=weight.device).remainder(module.config.get_text_config().vocab_size)[None]
    with borrowed(bridge), borrowed(inside), borrowed(module), torch.no_grad():
        theirs, ours = bridge(ids), module(ids, use_cache=False).logits
    error = ((theirs - ours).abs().max() / theirs.abs().max()).item()
    if not error <= _LIMIT.get(weight.dtype, 5e-2):
        raise UnsupportedModelError(
            f"the logits of this TransformerBridge differ from those of the {type(module).__name__} inside it by {error:.1g} of the "
            "largest logit; open a bridge without compatibility mode and without permanent hooks, or the model itself"
        )


def make_bridge(module: nn.Module, tokenizer=None, *, copy: bool = False, name: str = "streamlens"):
    """A TransformerBridge around a copy of `module`'s tree; `module` itself stays as it is.

    The parameter tensors are shared unless `copy` is true: what edits weights, such as `enable_compatibility_mode()`,
    needs `copy=True`. TransformerLens computes attention by its eager route, so logits differ from sdpa's by rounding.
    Raises :class:`UnsupportedModelError` where TransformerLens knows no adapter for the architecture.
    """
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    architecture = type(module).__name__
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(f"TransformerLens has no adapter for {architecture}, so no TransformerBridge can be made of it")
    tree = copying.deepcopy(module) if copy else share_tree(module)
    return build_bridge_from_module(
        tree, architecture, hf_config=copying.deepcopy(module.config), tokenizer=_own_tokenizer(tokenizer), model_name=name
    )


def _own_tokenizer(tokenizer):
    """A copy that TransformerLens may add tokens to. Marked as its `add_bos_token` kind, it is not loaded anew by name."""
    if tokenizer is None:
        return None
    own = copying.deepcopy(tokenizer)
    own.init_kwargs["add_bos_token"] = True
    return own
