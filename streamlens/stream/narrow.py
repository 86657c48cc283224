"""A map of single positions, run at some of them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

ALIKE = 1e-5
"""What the read rows of an unchanged pass may be off by, of the largest value, when a map runs at them alone: products of fewer rows."""


def at_rows(original: Callable[..., Any], rows: Int[Tensor, " row"], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What the module makes of these rows of its only input `[.., width]`, its leading axes flattened; zero elsewhere.

    None where it takes or gives more than one tensor.
    """
    given = (*args, *kwargs.values())
    if len(given) != 1 or not isinstance(given[0], Tensor):
        return None
    x = given[0]
    few = x.flatten(0, -2)[rows].view(*[1] * (x.dim() - 2), len(rows), x.shape[-1])
    made = original(*[few] * len(args), **dict.fromkeys(kwargs, few))
    if not isinstance(made, Tensor):
        return None
    out = made.new_zeros(x[..., 0].numel(), made.shape[-1])
    out[rows] = made.flatten(0, -2)
    return out.view(*x.shape[:-1], -1)
