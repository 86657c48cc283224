"""Heads by the position that they read: `A[t, s] <v_s, g>`, for each head or summed over all of them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.measure.components import Component
from streamlens.measure.splits import Part, Split
from streamlens.models.anatomy import Anatomy, Write
from streamlens.stream.readout import Key
from streamlens.stream.sources import SourceTap
from streamlens.stream.tap import Places


class BySource(Split):
    """Each head's share by source position, with the attention weight beside it.

    Raises :class:`UnsupportedModelError` for a model without attention heads, or with attention that has none.
    """

    column = "source"

    def __init__(self, module: nn.Module, anatomy: Anatomy, top_k: int | None):
        self.module = module
        attention = [w for _, w in anatomy.writes() if w.kind == "attn"]
        if not attention or not all(w.n_heads for w in attention):
            lacks = "has heads that cannot be told apart" if attention else "has no attention heads"
            raise UnsupportedModelError(f"{type(module).__name__} cannot be split by source: it {lacks}")

    def components(self, tap: SourceTap, layer: int, write: Write) -> tuple[Component, ...] | None:
        return None

    def tap(self, places: Places) -> SourceTap:
        return SourceTap(self.module, places)

    def part(
        self, tap: SourceTap, key: Key, g: Float[Tensor, "... width"], at: Int[Tensor, " row"], own: Float[Tensor, "row head"]
    ) -> Part | None:
        if key not in tap:
            return None
        shares, pattern = tap.shares(key, g, at)
        behind = torch.arange(shares.shape[-1], device=at.device) > (at % shares.shape[-1])[:, None]
        shares = shares.masked_fill_(behind[:, None], 0.0)
        return Part(own, (shares.sum(-1) - own).abs().amax(-1), None, shares, pattern)


class ByToken(BySource):
    """All heads together by source position: which input token wrote the logit through one attention directly."""

    def __init__(self, module: nn.Module, anatomy: Anatomy, top_k: int | None):
        super().__init__(module, anatomy, top_k)
        self.first = next((layer, w.leaf) for layer, w in anatomy.writes() if w.kind == "attn")

    def components(self, tap: SourceTap, layer: int, write: Write) -> tuple[Component, ...] | None:
        if write.kind != "attn":
            return None
        return (Component("head"),) if (layer, write.leaf) == self.first else ()

    def part(
        self, tap: SourceTap, key: Key, g: Float[Tensor, "... width"], at: Int[Tensor, " row"], own: Float[Tensor, "row head"]
    ) -> Part | None:
        part = super().part(tap, key, g, at, own)
        return None if part is None else Part(own.sum(1, keepdim=True), part.gap, None, part.sources.sum(1, keepdim=True))
