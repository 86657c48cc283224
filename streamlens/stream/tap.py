"""What looks inside a sublayer while the readout runs, so that its row can be split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
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

    def keep(self, x: Float[Tensor, "*token width"]) -> Float[Tensor, "kept width"]:
        """What is kept of a tensor with a vector at each position."""
        x = x.detach().reshape(-1, x.shape[-1])
        return x if self.all else x[self.flat.to(x.device)]

    def rows(self, kept: Float[Tensor, kept * width], at: Int[Tensor, " row"]) -> Float[Tensor, row * width]:
        """The kept vectors at the positions `at`."""
        return kept[at if self.all else torch.searchsorted(self.flat.to(at.device), at)]

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
