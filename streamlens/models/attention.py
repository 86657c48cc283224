"""Queries, keys, values and patterns, read where a family hands them to its attention function.

Most families of transformers look their attention function up by name at every call; for the length of a pass that name
leads to us, and we call the function that it led to. No config changes its meaning: some families ask theirs for the name.
The other families return their weights beside their output.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from streamlens.decoder.attention import Attention

SeeAttention = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Receives q `[batch, head, pos, d_head]`, k and v `[batch, kv_head, source, d_head]`, pattern `[batch, head, pos, source]`."""

Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""`attend(function, module, q, k, v, *args, **kwargs)` in the place of `function`, the one that the model has looked up.

Gives the output `[batch, pos, head, d_head]` and, where the function makes one, the pattern.
"""

_under_way = threading.local()  # `attending`: what attends in this thread's passes, the innermost last
_lock = threading.Lock()
_ours: dict[str, int] = {}  # names that lead to us, and for how many passes
_theirs: dict[str, Callable | None] = {}  # what they led to; None for eager, which every family has of its own


@contextmanager
def watched_attention(module: nn.Module, see: SeeAttention) -> Iterator[None]:
    """Within, the model attends eagerly and `see` is called at every attention that looks its function up; afterwards all is as it was."""

    def attend(function: Callable, part: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
        output, pattern = function(part, query, key, value, *args, **kwargs)
        see(query, key, value, pattern)
        return output, pattern

    before = [(config, config._attn_implementation) for config in _configs(module)]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        with replaced_attention(module, attend):
            yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


@contextmanager
def replaced_attention(module: nn.Module, attend: Attend) -> Iterator[None]:
    """Within, `attend` is called in the place of every attention function that the model looks up; afterwards all is as it was."""
    own = [part for part in module.modules() if isinstance(part, Attention)]  # the native decoder's, which ask nobody for a name
    before, names = [part.attend for part in own], {config._attn_implementation for config in _configs(module)} - {None}
    attending = _under_way.__dict__.setdefault("attending", [])
    _lead_to_us(names)
    try:
        attending.append(attend)
        for part in own:
            part.attend = attend
        yield
    finally:
        attending.remove(attend)
        for part, attended in zip(own, before, strict=True):
            part.attend = attended
        _lead_back(names)


def eager_attention(module: nn.Module) -> Callable | None:
    """The family's own eager attention function, which gives the pattern beside its output; None where it has none."""
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


def returned_pattern(output: object, n_heads: int) -> Float[Tensor, "batch head pos source"] | None:
    """The attention weights that a family returns beside its output, where it does."""
    weights = (
        [o for o in output if isinstance(o, Tensor) and o.dim() == 4 and o.shape[1] == n_heads] if isinstance(output, (tuple, list)) else []
    )
    return weights[0] if weights else None


def _configs(module: nn.Module) -> list:
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}.values()
    return [config for config in configs if hasattr(config, "_attn_implementation")]


def _attend(name: str, module: nn.Module, *args, **kwargs):
    function, attending = _theirs[name] or eager_attention(module), getattr(_under_way, "attending", None)
    return attending[-1](function, module, *args, **kwargs) if attending else function(module, *args, **kwargs)


def _lead_to_us(names: set[str]) -> None:
    if not names:  # and nothing to import
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _lock:
        for name in names:
            if not _ours.setdefault(name, 0):
                _theirs[name] = ALL_ATTENTION_FUNCTIONS.get(name)
                ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, name))
            _ours[name] += 1


def _lead_back(names: set[str]) -> None:
    if not names:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _lock:
        for name in names:
            _ours[name] -= 1
            if not _ours[name] and _theirs[name] is None:
                type(ALL_ATTENTION_FUNCTIONS)._global_mapping.pop(name)
            elif not _ours[name]:
                ALL_ATTENTION_FUNCTIONS.register(name, _theirs[name])
