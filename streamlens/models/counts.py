"""What a model weighs and what a token costs: counted over its real parameters and its real cache, not computed from the config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from streamlens.models.norms import looks_like_norm
from streamlens.models.settings import setting
from streamlens.models.structure import text_config
from streamlens.stream.run import borrowed

_EXPERTS = re.compile(r"(^|[._])experts?(_|\.|$)")
_SHARED = re.compile(r"shared_?experts?")
_LENGTHS = (2, 4)  # tokens of the two passes whose caches are compared


def n_experts(module: nn.Module) -> tuple[int, int]:
    """(routed experts of a mixture layer, those that a token uses), (0, 0) for a dense model."""
    config = text_config(module)
    ffn = setting(config, "ffn_config")  # DBRX
    active = setting(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") or setting(ffn, "moe_top_k")
    routed = {path: weight for path, weight in module.named_parameters() if is_expert(path)}
    if not routed or not isinstance(active, int):
        return 0, 0
    fused = [weight.shape[0] for weight in routed.values() if weight.dim() == 3]
    lists = [len(part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList) and path.endswith("experts")]
    return next(iter(fused + lists), setting(ffn, "moe_num_experts") or 0), active


def is_expert(path: str) -> bool:
    """True for the parameters of routed experts, fused into one tensor or not; shared experts run for every token."""
    return bool(_EXPERTS.search(path)) and not _SHARED.search(path)


def parameters(module: nn.Module) -> tuple[int, int]:
    """(all parameters, those that one token uses), shared tensors counted once."""
    total, active = n_experts(module)
    sizes = {path: weight.numel() for path, weight in module.named_parameters()}
    routed = sum(size for path, size in sizes.items() if is_expert(path)) if total else 0
    return sum(sizes.values()), sum(sizes.values()) - (routed * (total - active) // total if total else 0)


def multiply_adds(module: nn.Module, applications: Mapping[str, int] | None = None) -> int:
    """Multiply-adds a token in products with weights: every matrix once, of the experts those that a token uses, the unembedding too.

    Looking up an embedding costs none, and norms, biases and attention scores are not in it. `applications` says how often
    a block (its path) runs where that is not once.
    """
    total, active = n_experts(module)
    looked_up = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    unembed = module.get_output_embeddings().weight
    cost = unembed.numel()
    for path, weight in _matrices(module):
        if weight is unembed or id(weight) in looked_up:
            continue
        share = active / total if total and is_expert(path) else 1
        cost += round(weight.numel() * share) * _times(path, applications or {})
    return cost


def _matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter that multiplies vectors: two axes or more, neither a norm's gain nor a bias of experts."""
    norms = {id(weight) for part in module.modules() if looks_like_norm(part) for weight in part.parameters()}
    for path, weight in module.named_parameters():
        if weight.dim() > 1 and id(weight) not in norms and not path.endswith("bias"):
            yield path, weight


def _times(path: str, applications: Mapping[str, int]) -> int:
    return next((times for block, times in applications.items() if path.startswith(block + ".")), 1)


@torch.no_grad()
def cache_bytes(module: nn.Module) -> int:
    """The bytes that one more token adds to the cache of keys and values, measured on two tiny prompts.

    States of fixed size (state-space mixers) cancel, keys and values that later layers share count once, and a
    sliding-window layer stops growing at its window. 0 for a model that keeps no cache.
    """
    device = module.get_input_embeddings().weight.device
    sizes = []
    with borrowed(module):
        for length in _LENGTHS:
            ids = torch.arange(length, device=device)[None] + 1
            output = module(ids, use_cache=True)
            cache = _cache_of(output)
            held = {id(tensor): tensor for tensor in _tensors(cache)}.values()
            sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in held))
    return (sizes[1] - sizes[0]) // (_LENGTHS[1] - _LENGTHS[0])


def _cache_of(output):
    """By its newer or its older name in transformers; the native decoder's output is no mapping."""
    if hasattr(output, "cache"):
        return output.cache
    return output["cache"] if "cache" in output else output.get("past_key_values")


def _tensors(cache) -> Iterator[Tensor]:
    """Every tensor in a cache: a list of layers with keys and values, or nested tuples."""
    if isinstance(cache, Tensor):
        yield cache
    elif isinstance(cache, list | tuple):
        for part in cache:
            yield from _tensors(part)
    elif isinstance(cache, dict):
        yield from _tensors(list(cache.values()))
    elif hasattr(cache, "layers"):
        yield from _tensors([vars(layer) for layer in cache.layers])
