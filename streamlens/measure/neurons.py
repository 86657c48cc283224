"""MLPs by neuron: `act * (W_out g)` of the largest, the sum of the others, and the down projection's bias."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.measure.components import Component
from streamlens.measure.splits import Part, Split, rows_of
from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.structure import has_bias, width_in
from streamlens.stream.neurons import NeuronTap
from streamlens.stream.readout import Key
from streamlens.stream.tap import Places


class ByNeuron(Split):
    """The `top_k` neurons of each MLP with the largest shares, all of them for None, one row for the rest and one for the bias.

    An MLP whose output is not that of one linear map (a mixture of experts) keeps its row. Raises
    :class:`UnsupportedModelError` where that holds for all of them.
    """

    column = "neuron"

    def __init__(self, module: nn.Module, anatomy: Anatomy, top_k: int | None):
        self.module, self.top_k = module, top_k
        self.down = {(layer, w.leaf): w.down for layer, w in anatomy.writes() if w.kind == "mlp" and w.down is not None}
        if not self.down:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no neurons that can be read: none of its MLPs ends in one linear map (experts: by='expert')"
            )
        self.kept = sum(width_in(module.get_submodule(path)) for path in self.down.values())

    def components(self, tap: NeuronTap, layer: int, write: Write) -> tuple[Component, ...] | None:
        if (layer, write.leaf) not in self.down:
            return None
        n, d_mlp = self._n(write), width_in(self.module.get_submodule(write.down))
        kinds = ["neuron"] * n + ["neuron_rest"] * (n < d_mlp)
        kinds += ["mlp_bias"] * has_bias(self.module.get_submodule(write.down))
        return tuple(Component(kind, layer, write.sublayer) for kind in kinds)

    def _n(self, write: Write) -> int:
        d_mlp = width_in(self.module.get_submodule(write.down))
        return d_mlp if self.top_k is None else min(self.top_k, d_mlp)

    def tap(self, places: Places) -> NeuronTap:
        return NeuronTap(self.module, self.down, places)

    def part(
        self, tap: NeuronTap, key: Key, g: Float[Tensor, "... d_model"], at: Int[Tensor, " row"], own: Float[Tensor, "row head"]
    ) -> Part | None:
        place = (key[0], key[2])
        if key[1] != "write" or place not in self.down:
            return None
        g = rows_of(g, at)
        each = tap.shares(place, g, at)
        shares, numbers = largest(each, self.top_k)
        bias = tap.bias_share(place, g)
        if bias is not None:
            shares, numbers = torch.cat([shares, bias[:, None]], 1), nn.functional.pad(numbers, (0, 1), value=-1)
        return Part(shares, (shares.sum(-1) - own[:, 0]).abs(), numbers)


def largest(each: Float[Tensor, "row neuron"], top_k: int | None) -> tuple[Float[Tensor, "row part"], Int[Tensor, "row part"]]:
    """The `top_k` largest of each row in falling order of size with their numbers, and behind them the sum of all others (number -1)."""
    n_rows, n = each.shape
    if top_k is None or top_k >= n:
        return each, torch.arange(n, device=each.device).expand(n_rows, n)
    numbers = each.abs().topk(top_k, dim=1).indices
    top = each.gather(1, numbers)
    rest = each.scatter(1, numbers, 0.0).sum(1, keepdim=True)
    return torch.cat([top, rest], 1), nn.functional.pad(numbers, (0, 1), value=-1)
