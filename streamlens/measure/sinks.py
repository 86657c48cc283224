"""Attention to position 0, by head and query: what attention sinks are counted from."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from streamlens.errors import InputError
from streamlens.models.anatomy import Anatomy
from streamlens.models.attention import returned_pattern
from streamlens.stream.run import Run

MEASURE = "to_first"


def to_first(weights: Float[Tensor, "batch head pos source"], shape: tuple[int, int]) -> Float[Tensor, "batch pos head"]:
    """The weight that each head gives to the prompt's first token from each position.

    Raises :class:`InputError` for a pattern that has not a row for every position.
    """
    if (weights.shape[0], weights.shape[2]) != tuple(shape):
        raise InputError(f"sites: the attention pattern of this model is {list(weights.shape)}, and has no row for each of {list(shape)}")
    return weights[..., 0].transpose(1, 2)


def watch_returned(run: Run, anatomy: Anatomy, see: Callable[[int, Tensor], None]) -> None:
    """Patterns of attentions that return their weights, instead of looking their function up."""
    for path, n_heads in {w.reader: w.n_heads for _, w in anatomy.writes() if w.kind == "attn" and w.n_heads}.items():

        def returned(layer: int, output: object, n_heads: int = n_heads) -> None:
            pattern = returned_pattern(output, n_heads)
            if pattern is not None:
                see(layer, pattern)

        run.on_whole_output(path, returned)


def demand_all(anatomy: Anatomy, seen: set[int]) -> None:
    """Raise :class:`InputError` where the attention of a layer has shown no pattern."""
    missing = sorted({layer for layer, w in anatomy.writes() if w.kind == "attn"} - seen)
    if missing:
        raise InputError(f"sites: layer {missing[0]} shows no pattern: its attention neither looks its function up nor returns its weights")
