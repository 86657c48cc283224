"""Keys and values of the tokens so far: keys are turned once, when they are written."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


class LayerCache:
    """One layer's; a layer with a window keeps no more than its window will see."""

    def __init__(self, window: int | None):
        self.window = window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(
        self, keys: Float[Tensor, "batch pos kv_head d_head"], values: Float[Tensor, "batch pos kv_head d_head"]
    ) -> tuple[Float[Tensor, "batch source kv_head d_head"], Float[Tensor, "batch source kv_head d_head"]]:
        """All keys and values that the new queries may see, the new ones last."""
        if self.keys is not None:
            keys, values = torch.cat((self.keys, keys), dim=1), torch.cat((self.values, values), dim=1)
        keep = keys.shape[1] if self.window is None else min(self.window - 1, keys.shape[1])
        start = keys.shape[1] - keep
        self.keys, self.values = keys[:, start:], values[:, start:]
        return keys, values


class Cache:
    """One a text (or a batch of texts of one length): given to every forward pass, which appends to it."""

    def __init__(self, windows: list[int | None]):
        self.windows = windows
        self.tokens: Int[Tensor, "batch pos"] | None = None  # of texts that may have to be run again
        self.clear()

    def clear(self) -> None:
        """Forget keys and values, but not the tokens."""
        self.layers = [LayerCache(window) for window in self.windows]
        self.length = 0  # tokens that have passed

    def growing(self, ids: Int[Tensor, "batch new"], length: int) -> Int[Tensor, "batch pos"]:
        """The tokens to run when `ids` come: these, or the whole text anew once it is longer than `length`.

        For dynamic NTK, which turns every token by other angles as the text outgrows the trained length.
        """
        self.tokens = ids if self.tokens is None else torch.cat((self.tokens, ids), dim=1)
        if self.length == 0 or self.tokens.shape[1] <= length:
            return ids
        self.clear()
        return self.tokens
