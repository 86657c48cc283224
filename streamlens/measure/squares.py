"""Where the stream's length comes from: ||x_L||^2 as the squared lengths of its parts and twice their inner products.

The parts are what enters the first block and every block's write (or every sublayer's), so the terms sum to ||x_L||^2. A norm on
the stream itself would rescale all earlier parts by what later ones are: no such sum says who grew it, and it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.measure.places import flat_index
from streamlens.models.anatomy import Anatomy, Layer
from streamlens.prompts import TokenBatch
from streamlens.stream.run import Run
from streamlens.stream.sites import Written, watch_sites

UNITS = ("block", "sublayer")


@dataclass(frozen=True)
class Addend:
    """One addend of the final stream: "embed" (what enters the first block), "block", or a sublayer by its kind."""

    component: str
    layer: int = -1
    sublayer: int = -1


@dataclass(frozen=True)
class Squares:
    """Terms of one batch; term (i, j) with j before i is twice an inner product, (i, i) a squared length."""

    prompt: Int64[np.ndarray, " row"]
    position: Int64[np.ndarray, " row"]
    term: Float64[np.ndarray, "row term"]
    total: Float64[np.ndarray, " row"]  # ||x_L||^2, of the model's own final stream
    error: Float64[np.ndarray, " row"]  # |sum of terms - total| / sum of |terms|


def addends_of(anatomy: Anatomy, unit: str) -> tuple[Addend, ...]:
    """The addends, in execution order. Raises :class:`UnsupportedModelError` for a model with norms on the stream itself."""
    for index, layer in enumerate(anatomy.layers):
        if layer.stream_norms:
            raise UnsupportedModelError(
                f"the squared norm of the stream is no sum over its writes: {layer.stream_norms[0]} (layer {index}) norms the stream itself"
            )
    if unit == "block":
        return (Addend("embed"), *(Addend("block", index) for index in range(anatomy.n_layers)))
    adds = [(i, add) for i, layer in enumerate(anatomy.layers) for add in layer.adds]
    return (Addend("embed"), *(Addend(w.kind, i, w.sublayer) for i, add in adds for w in add.writes[: len(add.outputs)]))


def pairs(n_parts: int) -> tuple[Int64[np.ndarray, " term"], Int64[np.ndarray, " term"]]:
    """(later, earlier) part of each term, a part with itself included."""
    return np.tril_indices(n_parts)


@torch.no_grad()
def squares_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    places: tuple[Int64[np.ndarray, " row"], Int64[np.ndarray, " row"]],
    addends: Sequence[Addend],
) -> Squares:
    """The terms at `places` (prompt, position), whose prompts are all in `batch`."""
    at = torch.from_numpy(flat_index(batch, *places))
    index = {(p.component, p.layer, p.sublayer): i for i, p in enumerate(addends)}
    whole = ("block", 0, -1) in index
    last, kept = _scales(anatomy.layers), {}

    def rows(value: Tensor) -> Tensor:
        flat = value.reshape(-1, value.shape[-1])[at.to(value.device)]
        return flat.to(torch.promote_types(flat.dtype, torch.float32))

    def stream(site: str, layer: int, _: int, value: Tensor) -> None:
        if site == "final" or layer == 0:
            kept[site] = rows(value)

    def write(written: Written) -> None:
        place = ("block", written.layer, -1) if whole else (written.write.kind, written.layer, written.write.sublayer)
        value = rows(written.value) * last[written.layer, id(written.add)]
        kept[index[place]] = kept[index[place]] + value if index[place] in kept else value

    with Run.of(module, anatomy) as run:
        watch_sites(run, anatomy, ("resid_pre", "final"), stream, write)
        run.hidden(batch.ids, batch.mask)
    kept[0] = kept["resid_pre"] * prod(s.scale for layer in anatomy.layers for s in layer.segments)
    vectors = torch.stack([kept.get(i, torch.zeros_like(kept[0])) for i in range(len(addends))], dim=1)
    later, earlier = pairs(len(addends))
    gram = torch.bmm(vectors, vectors.mT).double().cpu().numpy()
    term = gram[:, later, earlier] * np.where(later == earlier, 1.0, 2.0)
    total = kept["final"].double().square().sum(-1).cpu().numpy()
    return Squares(*places, term, total, np.abs(term.sum(-1) - total) / np.abs(term).sum(-1))


def _scales(layers: Sequence[Layer]) -> dict[tuple[int, int], float]:
    """By what each addition is multiplied until the end: multipliers of the stream itself, in its own segment and in all later ones."""
    factor, found = 1.0, {}
    for index in reversed(range(len(layers))):
        for segment in reversed(layers[index].segments):
            factor *= segment.scale
            found |= {(index, id(add)): factor for add in segment.adds}
    return found
