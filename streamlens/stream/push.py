"""The frozen readout turned round: what a write has become where the stream ends, with every norm on its way frozen.

A readout's backward pass is linear in the direction that it pulls, and its derivative by that direction is the forward map: two
backward passes, whatever stands between a write and the end, and no difference of two large streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.models.anatomy import Anatomy
from streamlens.stream.readout import Key, Readout


class Push(Readout):
    """A readout that keeps what else can be pushed: the outputs of attention projections, where their biases enter."""

    def __init__(self, module: nn.Module, anatomy: Anatomy):
        super().__init__(module, anatomy)
        self.outputs: dict[Key, Tensor] = {}
        self.final: Tensor | None = None  # the stream behind the last block

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.outputs.clear()
        self.final = None

    def each(self, end: Tensor, key: Key, parts: Iterable[Tensor]) -> Iterator[Float[Tensor, "batch pos width"]]:
        """What each of `parts`, standing at `key` alone, adds to `end`, a tensor of this forward pass behind it."""
        at = self.leaves[key] if key in self.leaves else self.outputs[key]
        with torch.inference_mode(False), torch.enable_grad():
            direction = torch.zeros_like(end, requires_grad=True)
            (pulled,) = torch.autograd.grad(end, at, direction, create_graph=True)
            for part in parts:
                yield torch.autograd.grad(pulled, direction, part, retain_graph=True)[0]

    def _plant(self) -> None:
        super()._plant()
        self._run.on_output(self.anatomy.layers[-1].path, lambda layer, out, _: self._ended(layer, out))

    def _ended(self, layer: int, out: Tensor) -> None:
        if layer + 1 == self.anatomy.n_layers:
            self.final = out

    def _watch_bias(self, layer: int, path: str, out: Tensor) -> None:
        super()._watch_bias(layer, path, out)
        self.outputs[layer, "bias", path] = out
