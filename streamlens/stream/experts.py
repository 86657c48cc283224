"""Experts, as transformers holds them: one module a layer, called with each token's experts and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from streamlens.models.anatomy import Anatomy
from streamlens.models.mixtures import INDEX, WEIGHTS, takes_slots


def experts_of(module: nn.Module, anatomy: Anatomy) -> dict[str, tuple[str, int]]:
    """The experts module of each write that has one, by the path of the write's leaf, with the number of experts."""
    found = {}
    for _, write in anatomy.writes():
        for name, part in module.get_submodule(write.leaf).named_modules(prefix=write.leaf):
            if takes_slots(type(part)):
                found[write.leaf] = name, _number(part)
    return found


def without_experts(named: dict[str, Any], gone: list[tuple[int, Tensor | None, int]], n: int) -> dict[str, Any]:
    """The arguments of an experts module over `n` copies of a batch, some experts' weights at zero.

    `gone` holds (copy, the positions `[batch, pos]` where, None for all, expert).
    """
    index = next(named[name] for name in INDEX if name in named)
    name = next(name for name in WEIGHTS if name in named)
    weights = named[name].clone(memory_format=torch.contiguous_format)
    chosen, rows = index.reshape(n, -1, index.shape[-1]), weights.view(n, -1, index.shape[-1])
    for copy, at, expert in gone:
        off = chosen[copy] == expert
        rows[copy].masked_fill_(off if at is None else off & at.to(off.device).reshape(-1, 1), 0)
    return named | {name: weights}


def _number(experts: nn.Module) -> int:
    """Experts are the first axis of their fused weights; a list of modules has one each."""
    fused = [p.shape[0] for p in experts.parameters(recurse=False) if p.dim() == 3]
    named = getattr(experts, "num_experts", None)
    return max(fused) if fused else named if isinstance(named, int) else len(list(experts.children()))
