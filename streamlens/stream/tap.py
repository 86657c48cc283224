"""What looks inside a sublayer while the readout runs, so that its row can be split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from streamlens.models.anatomy import Anatomy
from streamlens.stream.run import Run


@dataclass(frozen=True)
class Places:
    """The positions of a batch that are read, as indices into its `[batch * pos]`: nothing is kept of the others."""

    flat: Int[Tensor, " place"]  # each once, ascending
    total: int

    @cached_property
    def all(self) -> bool:
        """Whether so many are read that a copy of them would be no smaller than the tensor itself."""
        return 2 * len(self.flat) >= self.total

    def keep(self, x: Shaped[Tensor, "token ..."]) -> Shaped[Tensor, "kept ..."]:
        """What is kept of a tensor with something at each position."""
        return x.detach() if self.all else x.detach()[self.flat.to(x.device)]

    def index(self, at: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """Where in what is kept the positions `at` stand."""
        return at if self.all else torch.searchsorted(self.flat.to(at.device), at)

    def by_prompt(self, n_pos: int, device: torch.device) -> Iterator[tuple[int, Int[Tensor, " row"]]]:
        """Each prompt of the batch that is read, and its positions."""
        for prompt in (self.flat // n_pos).unique().tolist():
            inside = (self.flat >= prompt * n_pos) & (self.flat < (prompt + 1) * n_pos)
            yield prompt, (self.flat[inside] % n_pos).to(device)


class Tap:
    """Plants hooks beside the readout's own and keeps what they see until the readout closes."""

    def __init__(self, places: Places):
        self.places = places

    def plant(self, run: Run, anatomy: Anatomy) -> None:
        """Plant the hooks; the run removes them."""

    def entered(self, key: tuple[int, str, str], value: Tensor) -> None:
        """`value` is about to become the leaf `key`; its graph reaches back to whatever the tap has made a leaf inside the sublayer."""

    def check(self) -> None:
        """Raise :class:`~streamlens.errors.UnsupportedModelError` where the forward pass did not show what it should have."""

    def close(self) -> None:
        """Let go of what was kept."""
