"""Changes by plain hooks, every block computed: the slow and obvious truth that replays are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamlens.models.anatomy import Anatomy
from streamlens.stream import changes
from streamlens.stream.changes import Change, put
from streamlens.stream.experts import without_experts
from streamlens.stream.run import Run, stream_of, tensor_name
from streamlens.stream.streams import by_token


@contextmanager
def hooked(module: nn.Module, anatomy: Anatomy, made: Sequence[Change] = ()) -> Iterator[Run]:
    """A run whose hooks make these changes."""
    with Run.of(module, anatomy) as run:
        entered: dict[int, Tensor] = {}
        for path in anatomy.block_paths:
            run.on_input(path, lambda layer, named: entered.__setitem__(layer, stream_of((), named).clone()))
        for change in made:
            if change.expert >= 0:
                gone = [(0, change.at, change.expert)]
                run.on_input(change.path, lambda layer, named, c=change, gone=gone: _if(c, layer, lambda: without_experts(named, gone, 1)))
            elif change.path == anatomy.layers[change.layer].path:
                run.on_output(
                    change.path, lambda layer, out, _, c=change: _if(c, layer, lambda: _block_changed(anatomy, out, c, entered[layer]))
                )
            elif change.part is not None:
                run.on_input(change.path, lambda layer, named, c=change: _if(c, layer, lambda: _input_changed(run, named, c)))
            else:
                run.on_output(change.path, lambda layer, out, _, c=change: _if(c, layer, lambda: _changed(run, out, c)))
        yield run


def _if(change: Change, layer: int, make: Callable[[], Any]) -> Any:
    return make() if layer == change.layer else None


def _input_changed(run: Run, named: dict[str, Any], change: Change) -> dict[str, Any]:
    name = tensor_name(named)
    return named | {name: _changed(run, named[name], change)}


def _changed(run: Run, old: Tensor, change: Change) -> Tensor:
    new = old.clone(memory_format=torch.contiguous_format)
    put(new.view(*run.shape, -1), change)
    return new


def _block_changed(anatomy: Anatomy, old: Tensor, change: Change, entered: Tensor) -> Tensor:
    new = old.clone()
    put(by_token(new, anatomy), change, base=by_token(entered, anatomy))
    return new


def hooked_removal(
    module: nn.Module, anatomy: Anatomy, removed: set[int] = frozenset(), zeroed: set[tuple[int, str]] = frozenset()
) -> AbstractContextManager[Run]:
    """:func:`hooked` with these blocks removed and the outputs of these modules at zero."""
    return hooked(module, anatomy, [changes.block(anatomy, layer) for layer in removed] + [Change(*place) for place in zeroed])
