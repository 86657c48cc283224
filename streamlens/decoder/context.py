"""What every block of one forward pass is told: where its tokens stand, and what they may see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from streamlens.decoder.cache import Cache
from streamlens.decoder.rope import Turns


@dataclass(frozen=True)
class Context:
    """One forward pass over the positions from `start` to before `end`; what stood before `start` is in the cache."""

    start: int
    end: int
    masks: Mapping[int | None, Tensor | None]  # by window: what is added to scores; None where nothing need be, or `causal` says all
    turns: Turns | None = None
    slopes: Float[Tensor, " head"] | None = None  # of ALiBi
    cache: Cache | None = None

    @property
    def causal(self) -> bool:
        """Whether a mask of None stands for "no later token" and not for "every token given"."""
        return self.start == 0 and self.end > 1


def added_to_scores(
    start: int, end: int, window: int | None, slopes: Float[Tensor, " head"] | None, like: Tensor
) -> Float[Tensor, "pos source"] | Float[Tensor, "1 head pos source"]:
    """Minus infinity where a query may not look, and ALiBi's -slope * distance; the sources are those that a cache with a window keeps."""
    query = torch.arange(start, end, device=like.device)[:, None]
    source = torch.arange(first_source(start, window), end, device=like.device)
    hidden = source > query if window is None else (source > query) | (source <= query - window)
    if slopes is None:
        added = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    else:
        added = (slopes.to(like.device)[None, :, None, None] * (source - query)).to(like.dtype)
    return added.masked_fill(hidden, float("-inf"))


def first_source(start: int, window: int | None) -> int:
    """The first position whose key a layer still has when `start` is the next to come."""
    return 0 if window is None else max(0, start - (window - 1))


def needs_no_mask(start: int, end: int, window: int | None) -> bool:
    """Whether plain causality (or, for one new token, everything that is kept) is all that a query may see."""
    return end - start == 1 or (start == 0 and (window is None or window >= end))
