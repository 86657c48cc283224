"""Replays: run the rest of the model from a changed stream, without running again what comes before the change.

The model's own forward runs, so that masks, rotary tables and whatever else a family passes to its blocks are its own;
finished blocks are bypassed and hand on the stream that they gave in the clean pass. Where blocks also make keys and values
for later ones (`Anatomy.bypass` false), finished blocks are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from streamlens.models.anatomy import Add, Anatomy
from streamlens.stream.run import Planted, Run, first, with_first


class Replay(Planted):
    """A context manager over one batch: :meth:`record` the clean pass, then any number of changed ones."""

    def __init__(self, module: nn.Module, anatomy: Anatomy):
        super().__init__(module, anatomy)
        self._outputs: list[Any] = []  # what each block returned in the clean pass
        self._resume, self._removed = 0, frozenset[int]()
        self._zeroed: frozenset[tuple[int, str]] = frozenset()
        self._recording = False
        self._batch: tuple[Tensor, Tensor | None] = (torch.empty(0, dtype=torch.long), None)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._outputs.clear()

    def _plant(self) -> None:
        for path in self.anatomy.block_paths:
            self._run.replace(path, self._block)
        for path in dict.fromkeys(place for layer in self.anatomy.layers for add in layer.adds for place in places(add)):
            self._run.on_output(path, lambda layer, out, _, path=path: self._write(layer, path, out))

    @torch.no_grad()
    def record(self, ids: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None = None) -> Float[Tensor, "batch pos d_model"]:
        """The clean pass: the unembedding's input, with what each block returned kept."""
        self._batch = (ids, mask)
        self._outputs = []
        self._recording = True
        try:
            return self._run.hidden(ids, mask)
        finally:
            self._recording = False

    @torch.no_grad()
    def without_blocks(self, layers: set[int]) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input where these layers hand on their input (x_out = x_in), everything after recomputed."""
        return self._changed(resume=min(layers), removed=frozenset(layers))

    @torch.no_grad()
    def without_write(self, layer: int, add: Add) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input where `add` puts nothing into the stream; norms on the stream itself still act."""
        return self._changed(resume=layer, zeroed=frozenset((layer, path) for path in places(add)))

    def _changed(self, resume: int, removed: frozenset[int] = frozenset(), zeroed: frozenset = frozenset()) -> Tensor:
        self._resume, self._removed, self._zeroed = resume, removed, zeroed
        try:
            return self._run.hidden(*self._batch)
        finally:
            self._resume, self._removed, self._zeroed = 0, frozenset(), frozenset()

    def _block(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = self._run.layer
        if self._recording:
            output = original(*args, **kwargs)
            self._outputs.append(with_first(output, self._kept(first(output))))
            return output
        if layer in self._removed:
            # Where later blocks take keys and values from this one, they are still made.
            output = self._outputs[layer] if self.anatomy.bypass else original(*args, **kwargs)
            return with_first(output, stream_of(args, kwargs))
        if layer < self._resume and self.anatomy.bypass:
            output = self._outputs[layer]
            return with_first(output, self._kept(first(output)))
        return original(*args, **kwargs)

    def _write(self, layer: int, path: str, out: Tensor) -> Tensor | None:
        return torch.zeros_like(out) if (layer, path) in self._zeroed else None

    def _kept(self, stream: Tensor) -> Tensor:
        return stream.clone() if self.anatomy.clones else stream


def places(add: Add) -> tuple[str, ...]:
    """The modules whose output is what an addition puts into the stream, but for its factor."""
    return (add.norm,) if add.norm else tuple(w.output for w in add.writes)


def stream_of(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The stream among a block's arguments: its first floating-point tensor."""
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point())


@contextmanager
def hooked_removal(module: nn.Module, anatomy: Anatomy, removed: set[int] = frozenset(), zeroed: set[tuple[int, str]] = frozenset()):
    """The slow, obvious removal: every block is computed, and hooks put its input or zeros in its output's place. For proofs."""
    with Run.of(module, anatomy) as run:
        inputs: dict[int, Tensor] = {}
        for path in anatomy.block_paths:
            run.on_input(path, lambda layer, named: inputs.__setitem__(layer, stream_of((), named).clone()))
            run.on_output(path, lambda layer, out, _: inputs[layer] if layer in removed else None)
        for path in {path for _, path in zeroed}:
            run.on_output(path, lambda layer, out, _, path=path: torch.zeros_like(out) if (layer, path) in zeroed else None)
        yield run
