"""Each block's program of additions and norms, followed in float64 beside a running model and held to its rounding.

A model rounds once an addition (and once a multiplier), so what it hands on may miss the exact sum by half a unit in the last
place of each partial sum and by no more. In 16 bits that is far sharper than a limit relative to the largest coordinate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamlens.models.anatomy import Anatomy, Segment
from streamlens.stream.run import Run, stream_of


@dataclass(frozen=True)
class Miss:
    """How far a layer's stream is from its input plus its writes."""

    layer: int
    relative: float  # largest gap, over the largest coordinate of the stream
    roundings: float  # largest gap, in units of what rounding allows at that coordinate


def watch_adds(run: Run, anatomy: Anatomy, see: Callable[[Miss], None]) -> None:
    """Call `see` at each norm on the stream and at each block's end while `run` runs."""
    follower = _Follower(anatomy, see)
    for path in anatomy.block_paths:
        run.on_input(path, lambda layer, named: follower.enter(layer, stream_of((), named)))
    for path in follower.paths:
        run.on_output(path, lambda layer, out, x, path=path: follower.passed(layer, path, out, x))
    for path in anatomy.block_paths:
        run.on_output(path, lambda layer, out, _: follower.leave(layer, out))


class _Follower:
    """The exact stream of the segment that runs, and the room that rounding has had in it."""

    def __init__(self, anatomy: Anatomy, see: Callable[[Miss], None]):
        self.anatomy, self.see = anatomy, see
        self.factors: dict[tuple[int, str], float] = {}
        self.norms: dict[tuple[int, str], int] = {}  # the segment that a norm on the stream ends
        for index, layer in enumerate(anatomy.layers):
            for number, segment in enumerate(layer.segments):
                for add in segment.adds:
                    self.factors |= {(index, path): add.factors[i] for i, path in enumerate(add.outputs)}
                if segment.norm:
                    self.norms[index, segment.norm] = number
        self.paths = tuple(dict.fromkeys(path for _, path in (*self.factors, *self.norms)))

    def enter(self, layer: int, stream: Tensor) -> None:
        # Half a unit in the last place; of a float64 model the sum made here rounds as much again.
        self.unit = torch.finfo(stream.dtype).eps / (1 if stream.dtype == torch.float64 else 2)
        # A product in 16 bits is made in float32, with a multiplier as good as exact; wider ones round the multiplier too.
        self.product = 1 if torch.finfo(stream.dtype).bits == 16 else 2
        self.tiny = torch.finfo(stream.dtype).smallest_normal * self.unit
        self._start(layer, 0, _exact(stream))

    def passed(self, layer: int, path: str, out: Tensor, x: Tensor | None) -> None:
        if (layer, path) in self.factors:
            self._add(_exact(out).reshape(self.stream.shape), self.factors[layer, path])
        elif (layer, path) in self.norms:
            if x is not None:
                self._compare(layer, x)
            self._start(layer, self.norms[layer, path] + 1, _exact(out))

    def leave(self, layer: int, out: Tensor) -> None:
        self._compare(layer, out)

    def _start(self, layer: int, number: int, stream: Tensor) -> None:
        segments = self.anatomy.layers[layer].segments
        self.segment = segments[number] if number < len(segments) else Segment(())
        self.entered, self.stream = stream, stream
        self.written = self.partial = torch.zeros_like(stream)
        self.n_adds = 0
        # A scale on the stream may be a multiplier of the input alone, whose product is rounded by itself.
        self.room = self._rounding(stream, self.product) if self.segment.scale != 1.0 else self._rounding(stream, 0)

    def _add(self, value: Tensor, factor: float) -> None:
        value = value if factor == 1.0 else value * factor
        if factor != 1.0 or self.segment.scale != 1.0:  # a product is rounded by itself
            self.room = self.room + self._rounding(value, self.product)
        self.stream, self.written = self.stream + value, self.written + value
        # Which of the partial sums the model makes is its own order: parallel writes are added to each other first, or the last one first.
        candidates = torch.stack([self.partial, self.stream, self.written, self.entered + value])
        self.partial, self.n_adds = candidates.abs().amax(0), self.n_adds + 1

    def _compare(self, layer: int, out: Tensor) -> None:
        out, scale = _exact(out).reshape(self.stream.shape), self.segment.scale
        sums = self._rounding(self.partial, max(self.n_adds - 1, 0)) + self._rounding(self.stream, min(self.n_adds, 1))
        expected, room = self.stream * scale, (self.room + sums) * abs(scale)
        if scale != 1.0:
            room = room + self._rounding(expected, self.product)
        gap = (out - expected).abs()
        self.see(Miss(layer, float(gap.max() / out.abs().max()), float((gap / (room + self.tiny)).max())))

    def _rounding(self, x: Tensor, times: int) -> Tensor:
        return x.abs() * (self.unit * times)


def _exact(x: Tensor) -> Tensor:
    """A copy in float64, since a block may add to its input in place."""
    return x.detach().to("cpu", copy=True).double()
