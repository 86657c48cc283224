"""In which order blocks go: those that cost least now, those whose input and output are most alike, a run of alike ones, or any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from streamlens.measure.units import Variant, without_blocks
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import NONE


@dataclass(frozen=True)
class Step:
    """The blocks that are gone after one step; `layer` is the one that went last, or the first of a run of `span`."""

    removed: tuple[int, ...]
    layer: int
    span: int = 1
    sample: int = NONE

    def variant(self, anatomy: Anatomy) -> Variant:
        return without_blocks(anatomy, self.removed)


def in_order(layers: Sequence[int], steps: int, sample: int = NONE) -> list[Step]:
    """These blocks one after the other."""
    return [Step(tuple(sorted(layers[: n + 1])), int(layers[n]), sample=sample) for n in range(steps)]


def greedy(n_layers: int, steps: int, costs: Callable[[list[tuple[int, ...]]], Float64[np.ndarray, " choice"]]) -> list[Step]:
    """Each step removes the block whose removal costs least now; `costs` gives those of several sets of removed blocks."""
    order: list[int] = []
    for _ in range(steps):
        left = [i for i in range(n_layers) if i not in order]
        order.append(left[int(np.argmin(costs([(*order, i) for i in left])))])
    return in_order(order, steps)


def random_order(n_layers: int, steps: int, n_samples: int, seed: int) -> list[Step]:
    """Blocks in `n_samples` orders drawn at random."""
    rng = np.random.default_rng(seed)
    return [step for sample in range(n_samples) for step in in_order(rng.permutation(n_layers).tolist(), steps, sample)]


def alike_runs(distance: dict[tuple[int, int], float], n_layers: int, steps: int) -> list[Step]:
    """For each number of blocks the run whose ends are most alike (Gromov et al. 2024); `distance` by (layer, layer_to)."""
    out = []
    for n in range(1, steps + 1):
        start = min(range(n_layers - n + 1), key=lambda layer: distance[layer, layer + n])
        out.append(Step(tuple(range(start, start + n)), start, n))
    return out
