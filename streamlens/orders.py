"""Orders of blocks for :func:`streamlens.rearrange`: the ones of the literature.

An order is a list of block indices to run. A block that is left out is removed, one that stands twice runs twice, and an inner tuple
runs its blocks on the same input and takes the mean of their outputs.
"""

from __future__ import annotations

import random

from streamlens.errors import InputError, whole

Order = list[int | tuple[int, ...]]


def swap(n_layers: int, layer: int) -> Order:
    """Blocks `layer` and `layer` + 1 exchanged (Lad et al. 2024)."""
    _inside("layer", layer, n_layers - 1)
    return [*range(layer), layer + 1, layer, *range(layer + 2, n_layers)]


def without(n_layers: int, *layers: int) -> Order:
    """All but these blocks."""
    for layer in layers:
        _inside("layers", layer, n_layers)
    return [i for i in range(n_layers) if i not in layers]


def reverse(n_layers: int, first: int, last: int) -> Order:
    """Blocks `first` to `last`, inclusive, the other way round (Sun et al. 2024)."""
    middle = _middle(n_layers, first, last)
    return [*range(first), *reversed(middle), *range(last + 1, n_layers)]


def shuffle(n_layers: int, first: int, last: int, seed: int = 0) -> Order:
    """Blocks `first` to `last`, inclusive, in a random order (Veit et al. 2016, Sun et al. 2024)."""
    middle = _middle(n_layers, first, last)
    random.Random(seed).shuffle(middle)
    return [*range(first), *middle, *range(last + 1, n_layers)]


def repeat_middle(n_layers: int, first: int, last: int) -> Order:
    """The middle block in the place of each of `first` to `last`, inclusive (Sun et al. 2024)."""
    middle = _middle(n_layers, first, last)
    return [*range(first), *[n_layers // 2] * len(middle), *range(last + 1, n_layers)]


def parallel_middle(n_layers: int, first: int, last: int, times: int = 1) -> Order:
    """Blocks `first` to `last`, inclusive, on the same input, the mean of their outputs; `times` times over (Sun et al. 2024)."""
    whole("times", times, 1)
    middle = _middle(n_layers, first, last)
    return [*range(first), *[tuple(middle)] * times, *range(last + 1, n_layers)]


def random_deletions(n_layers: int, k: int, seed: int = 0) -> Order:
    """All but `k` blocks drawn at random (Veit et al. 2016)."""
    whole("k", k, 0)
    if k >= n_layers:
        raise InputError(f"k must leave a block of {n_layers}; got {k}")
    return without(n_layers, *random.Random(seed).sample(range(n_layers), k))


def _inside(parameter: str, value: int, stop: int) -> None:
    whole(parameter, value, 0)
    if value >= stop:
        raise InputError(f"{parameter} must be from 0 to {stop - 1}; got {value}")


def _middle(n_layers: int, first: int, last: int) -> list[int]:
    _inside("first", first, n_layers)
    _inside("last", last, n_layers)
    if first > last:
        raise InputError(f"first must not lie behind last; got {first} and {last}")
    return list(range(first, last + 1))
