"""Between transformers' models and the native decoder: the same weights, and logits that are compared before anybody gets them."""

from __future__ import annotations

import torch
from torch import nn

from streamlens.decoder.convert.family import Family
from streamlens.decoder.convert.layernormed import BLOOM, GPT2, GPT_NEOX, OPT
from streamlens.decoder.convert.llama import GEMMA, GEMMA2, GRANITE, LLAMA, MISTRAL, MIXTRAL, OLMO2, QWEN2, QWEN3
from streamlens.decoder.folder import check_weights
from streamlens.decoder.model import Decoder
from streamlens.errors import InputError, UnsupportedModelError
from streamlens.models import limits
from streamlens.stream.run import borrowed

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GRANITE, OLMO2, GEMMA, GEMMA2, GPT2, GPT_NEOX, BLOOM, OPT)
}
"""By transformers' `model_type`."""

_N_TOKENS = 12


def to_native(module: nn.Module, *, copy: bool = True) -> Decoder:
    """The native decoder with the weights of a transformers model (`copy` False: the tensors themselves where their shapes are ours).

    Raises :class:`UnsupportedModelError` for a family or a setting that it cannot express, and where its logits are not the model's.
    """
    family = FAMILIES.get(module.config.model_type)
    if family is None:
        raise UnsupportedModelError(
            f"the native decoder has no way to read {module.config.model_type!r} models; those that it reads are {', '.join(FAMILIES)}"
        )
    config = family.read(module.config)
    with torch.no_grad():
        state = {name: weight.detach() for name, weight in family.ours(module.state_dict(), config).items()}
    if copy:
        state = {name: weight.clone() for name, weight in state.items()}
    decoder = Decoder(config, seed=None)
    check_weights(decoder, {name: weight.shape for name, weight in state.items()}, type(module).__name__)
    decoder.load_state_dict(state, assign=True)
    decoder.tie().eval()
    _check_same_logits(module, decoder)
    return decoder


def to_transformers(decoder: Decoder, model_type: str) -> nn.Module:
    """A transformers model of a family with the weights of a native decoder.

    Raises :class:`InputError` for a `model_type` that is not known, and :class:`UnsupportedModelError` that names the first field
    of the config that the family cannot express.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if model_type not in FAMILIES:
        raise InputError(f"model_type must be one of {', '.join(FAMILIES)}; got {model_type!r}")
    family = FAMILIES[model_type]
    hf = AutoConfig.for_model(model_type, **family.write(decoder.config))
    wanted, got = decoder.config.settled().to_dict(), family.read(hf).settled().to_dict()
    for name, value in wanted.items():
        if got[name] != value:
            raise UnsupportedModelError(f"{model_type} models cannot express {name} {value!r}; theirs would be {got[name]!r}")
    module = AutoModelForCausalLM.from_config(hf, dtype=decoder.embed.weight.dtype).eval()
    with torch.no_grad():
        state = family.theirs(dict(decoder.state_dict()), decoder.config)
    module.load_state_dict(state)
    _check_same_logits(module, decoder)
    return module


@torch.no_grad()
def _check_same_logits(module: nn.Module, decoder: Decoder) -> None:
    weight = decoder.embed.weight
    # Within the trained length, where the dynamic NTK of transformers does not depend on what it has seen before.
    n_tokens = min(_N_TOKENS, max(1, decoder.config.max_length - 1))
    ids = torch.arange(n_tokens, device=weight.device).mul(7).remainder(weight.shape[0])[None]
    with borrowed(module), borrowed(decoder):
        ours, theirs = decoder(ids).logits, module(input_ids=ids, use_cache=False).logits
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error <= limits.room(weight.dtype):
        raise UnsupportedModelError(
            f"the native decoder's logits differ from those of {type(module).__name__} by {error:.2g} of the largest"
        )
