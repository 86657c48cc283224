"""Queries, keys, values and patterns, read where a family hands them to its attention function.

Most families of transformers look their attention function up by name at every call; for the length of a pass the name is
ours, and our function calls the family's own eager one. The others return their weights beside their output.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxtyping import Float
from torch import Tensor, nn

NAME = "streamlens"

SeeAttention = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Receives q `[batch, head, pos, d_head]`, k and v `[batch, kv_head, source, d_head]`, pattern `[batch, head, pos, source]`."""

_under_way = threading.local()  # `seeing`: the callbacks of this thread's passes, the innermost last


@contextmanager
def watched_attention(module: nn.Module, see: SeeAttention) -> Iterator[None]:
    """Within, the model attends eagerly and `see` is called at every attention that looks its function up; afterwards all is as it was."""
    own = [part for part in module.modules() if hasattr(part, "see_attention")]
    with _own_watched(own, see) if own else _registered_watched(module, see):
        yield


@contextmanager
def _own_watched(parts: list[nn.Module], see: SeeAttention) -> Iterator[None]:
    """The native decoder calls whom it is told to."""
    before = [part.see_attention for part in parts]
    try:
        for part in parts:
            part.see_attention = see
        yield
    finally:
        for part, seeing in zip(parts, before, strict=True):
            part.see_attention = seeing


@contextmanager
def _registered_watched(module: nn.Module, see: SeeAttention) -> Iterator[None]:
    _register()
    configs = list({id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values())
    before = [(config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]
    looked_up = any(_eager(type(m)) for m in module.modules())
    seeing = _under_way.__dict__.setdefault("seeing", [])
    try:
        seeing.append(see)
        for config, _ in before:
            config._attn_implementation = NAME if looked_up else "eager"
        yield
    finally:
        seeing.remove(see)
        for config, implementation in before:
            config._attn_implementation = implementation


def returned_pattern(output: object, n_heads: int) -> Float[Tensor, "batch head pos source"] | None:
    """The attention weights that a family returns beside its output, where it does."""
    weights = (
        [o for o in output if isinstance(o, Tensor) and o.dim() == 4 and o.shape[1] == n_heads] if isinstance(output, (tuple, list)) else []
    )
    return weights[0] if weights else None


def _eager(kind: type[nn.Module]) -> Callable | None:
    return getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
    output, pattern = _eager(type(module))(module, query, key, value, *args, **kwargs)
    if seeing := getattr(_under_way, "seeing", None):
        seeing[-1](query, key, value, pattern)
    return output, pattern


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
