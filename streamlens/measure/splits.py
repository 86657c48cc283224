"""Finer rows: what stands in place of a sublayer's own row, under the same sum rule.

A split knows which writes it takes apart, the components that they become, and how their shares come out of one
backward pass: a :class:`~streamlens.stream.tap.Tap` has looked inside the sublayer while the model ran.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from streamlens.measure.components import Component
from streamlens.models.anatomy import Write
from streamlens.stream.readout import Key
from streamlens.stream.tap import Places, Tap

KEPT = 2**24
"""Numbers that a split keeps of one batch, 64 MiB in float32; a single prompt may need more."""


@dataclass(frozen=True)
class Part:
    """What one write becomes, at each row."""

    shares: Float[Tensor, "row component"]
    gap: Float[Tensor, " row"]  # by how much the parts miss the write's own share
    numbers: Int[Tensor, "row component"] | None = None  # which neuron or expert; -1 for neither
    sources: Float[Tensor, "row component source"] | None = None  # the parts of each of `shares`
    attention: Float[Tensor, "row component source"] | None = None


class Split:
    """Rows that stand in place of a write's own; `column` is what tells them apart."""

    column: str
    kept = 0  # numbers kept of each position that is read until the backward pass has used them

    def components(self, tap: Tap, layer: int, write: Write) -> tuple[Component, ...] | None:
        """What the write becomes, () where it adds to the heads before it; None where it stays whole."""
        raise NotImplementedError

    def tap(self, places: Places) -> Tap:
        """What has to look inside while the model runs."""
        raise NotImplementedError

    def part(
        self, tap: Tap, key: Key, g: Float[Tensor, "... width"], at: Int[Tensor, " row"], own: Float[Tensor, "row head"]
    ) -> Part | None:
        """What the write at `key` becomes at the places `at`; None where it stays whole.

        `g` is the direction in which the write's leaf is read, `own` the write's share as it was.
        """
        raise NotImplementedError


def rows_of(g: Tensor, at: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
    """The vectors at these positions of a batch, in the precision in which shares are summed."""
    return g.reshape(-1, g.shape[-1])[at].to(torch.promote_types(g.dtype, torch.float32))
