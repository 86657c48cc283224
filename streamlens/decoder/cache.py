"""Keys and values of the tokens so far: keys are turned once, when they are written.

Dynamic NTK is the exception: its angles change as the text grows, so its keys are kept unturned.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
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
        self.layers = [LayerCache(window) for window in windows]
        self.length = 0  # tokens that have passed
