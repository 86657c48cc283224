"""Mixtures by expert: what each chosen expert writes with its routing weight, the shared experts, and a constant where there is one."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.measure.components import Component
from streamlens.measure.splits import Part, Split
from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.counts import is_expert
from streamlens.models.mixtures import mixture_of
from streamlens.stream.mixtures import MixtureTap
from streamlens.stream.readout import Key
from streamlens.stream.tap import Places


class ByExpert(Split):
    """The experts that a token was routed to, one row each; an MLP that is no mixture keeps its row.

    Raises :class:`UnsupportedModelError` for a model without a mixture, and for one whose experts cannot be called apart.
    """

    column = "expert"

    def __init__(self, module: nn.Module, anatomy: Anatomy, top_k: int | None):
        self.module, name = module, type(module).__name__
        mlps = [(layer, w) for layer, w in anatomy.writes() if w.kind == "mlp"]
        found = {(layer, w.leaf): mixture_of(module, w.reader) for layer, w in mlps}
        self.mixtures = {place: mixture for place, mixture in found.items() if mixture is not None}
        for layer, w in mlps:
            inner = module.get_submodule(w.reader)
            if found[layer, w.leaf] is None and any(is_expert(f"{w.reader}.{path}") for path, _ in inner.named_parameters()):
                raise UnsupportedModelError(f"{name} cannot be split by expert: {type(inner).__name__} does not call its experts by slot")
        if not self.mixtures:
            raise UnsupportedModelError(f"{name} cannot be split by expert: none of its MLPs is a mixture")

    def components(self, tap: MixtureTap, layer: int, write: Write) -> tuple[Component, ...] | None:
        mixture = self.mixtures.get((layer, write.leaf))
        if mixture is None:
            return None
        kinds = ["expert"] * tap.n_slots((layer, write.leaf)) + ["shared_expert"] * bool(mixture.shared)
        kinds += ["mlp_bias"] * (mixture.bias is not None)
        return tuple(Component(kind, layer, write.sublayer) for kind in kinds)

    def tap(self, places: Places) -> MixtureTap:
        return MixtureTap(self.module, self.mixtures, places)

    def part(
        self, tap: MixtureTap, key: Key, g: Float[Tensor, "... d_model"], at: Int[Tensor, " row"], own: Float[Tensor, "row head"]
    ) -> Part | None:
        place = (key[0], key[2])
        if key[1] != "write" or place not in self.mixtures:
            return None
        mixed = tap.shares(place, g, at)
        rest = [share[:, None] for share in (mixed.shared, mixed.bias) if share is not None]
        shares = torch.cat([mixed.experts, *rest], 1)
        numbers = nn.functional.pad(mixed.numbers, (0, len(rest)), value=-1)
        return Part(shares, (shares.sum(-1) - own[:, 0]).abs(), numbers)
