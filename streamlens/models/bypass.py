"""Whether a replay may step over finished blocks: it is tried, and held to plainly hooked passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from streamlens.errors import UnsupportedModelError
from streamlens.models.anatomy import Anatomy


def bypass_that_holds(name: str, anatomy: Anatomy, room: float, error_of: Callable[[Anatomy], float]) -> tuple[bool, float]:
    """(whether finished blocks can be bypassed, how far replays are from hooked passes then), bypassing where both ways hold.

    `error_of` gives the relative error of an anatomy's replays. Raises :class:`UnsupportedModelError` where neither is within `room`.
    """
    error = float("inf")
    for bypass in (True, False):
        try:
            error = error_of(replace(anatomy, bypass=bypass))
        except torch.OutOfMemoryError:
            raise
        except (KeyError, IndexError, AttributeError, TypeError, RuntimeError):
            continue  # a later block missed what a bypassed one makes; the other way is tried
        if error <= room:
            return bypass, error
    raise UnsupportedModelError(
        f"{name} cannot be read exactly: removing a block by replay misses the hooked forward pass by {error:.2g} of the largest value"
    )
