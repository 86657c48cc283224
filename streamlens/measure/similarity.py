"""How alike the streams at two depths are: what layer pruning goes by instead of measuring what breaks."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from streamlens.measure.places import at, flat_index
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import TokenBatch
from streamlens.stream.run import Run
from streamlens.stream.sites import watch_sites

MEASURES = ("block_influence", "angular_distance", "relative_magnitude")


@dataclass(frozen=True)
class Similar:
    """Measures of one batch; `pairs` holds (measure, layer, layer_to): the streams entering these two layers."""

    prompt: np.ndarray  # [row]
    position: np.ndarray
    pairs: tuple[tuple[str, int, int], ...]
    value: Float64[np.ndarray, "row pair"]


def measure_batch(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, places: tuple[np.ndarray, np.ndarray], measures: Collection[str]
) -> Similar:
    """Measures at `places` (prompt, position), whose prompts are all in `batch`."""
    flat, streams = flat_index(batch, *places), {}
    with torch.no_grad(), Run.of(module, anatomy) as run:
        watch_sites(run, anatomy, ("resid_pre", "final"), lambda site, layer, _, x: streams.__setitem__(layer, at(x, flat).double().cpu()))
        run.hidden(batch.ids, batch.mask)
    x = torch.stack([streams[layer] for layer in range(anatomy.n_layers + 1)])
    pairs, values = [], []
    for measure in measures:
        for span in range(1, anatomy.n_layers + 1 if measure == "angular_distance" else 2):
            pairs += [(measure, layer, layer + span) for layer in range(anatomy.n_layers + 1 - span)]
            values.append(_FORMULAS[measure](x[:-span], x[span:]))
    return Similar(*places, tuple(pairs), torch.cat(values).T.numpy())


def block_influence(x: Float[Tensor, "*row d_model"], y: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row"]:
    """1 - the cosine of the stream before and after (Men et al. 2024)."""
    return 1 - torch.linalg.vecdot(_unit(x), _unit(y))


def angular_distance(x: Float[Tensor, "*row d_model"], y: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row"]:
    """arccos of the cosine, over pi (Gromov et al. 2024); by the half angle's tangent, which keeps its digits where the two are near."""
    u, v = _unit(x), _unit(y)
    return 2 / math.pi * torch.atan2(torch.linalg.vector_norm(u - v, dim=-1), torch.linalg.vector_norm(u + v, dim=-1))


def relative_magnitude(x: Float[Tensor, "*row d_model"], y: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row"]:
    """What the block adds, over what the stream then is, by length (Samragh et al. 2023)."""
    return torch.linalg.vector_norm(y - x, dim=-1) / torch.linalg.vector_norm(y, dim=-1)


_FORMULAS = {"block_influence": block_influence, "angular_distance": angular_distance, "relative_magnitude": relative_magnitude}


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
