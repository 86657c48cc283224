"""What stands at the places that a change replaces, in a running model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from jaxtyping import Float
from torch import Tensor

from streamlens.models.anatomy import Anatomy
from streamlens.stream.run import Run, stream_of, tensor_name

Key = tuple[int, str, bool]
"""(layer, module path, whether at its input). A block's own path stands for what the block adds to its input."""

See = Callable[[Key, Float[Tensor, "batch pos width"]], None]
"""Receives the model's own tensor, to be read and not kept unless copied."""


def watch_values(run: Run, anatomy: Anatomy, keys: Collection[Key], see: See) -> None:
    """Call `see` with the value at each of the keys while `run` runs."""
    wanted, entered = frozenset(keys), {}

    def emit(layer: int, path: str, at_input: bool, value: Tensor) -> None:
        if (layer, path, at_input) in wanted:
            see((layer, path, at_input), value.reshape(*run.shape, value.shape[-1]))

    def enter(layer: int, named: dict[str, Any]) -> None:
        entered["stream"] = stream_of((), named).clone()  # a block may add to its input in place

    def leave(layer: int, path: str, out: Tensor) -> None:
        emit(layer, path, False, out - entered.pop("stream"))

    def enter_module(layer: int, path: str, named: dict[str, Any]) -> None:
        emit(layer, path, True, named[tensor_name(named)])

    for path, at_input in dict.fromkeys((path, at_input) for _, path, at_input in keys):
        if path in anatomy.block_paths:
            run.on_input(path, enter)
            run.on_output(path, lambda layer, out, _, path=path: leave(layer, path, out))
        elif at_input:
            run.on_input(path, lambda layer, named, path=path: enter_module(layer, path, named))
        else:
            run.on_output(path, lambda layer, out, _, path=path: emit(layer, path, False, out))
