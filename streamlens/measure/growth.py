"""How the residual stream grows: norms at every site of every layer, taken while the model runs and nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from streamlens.errors import InputError
from streamlens.measure.places import flat_index
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import TokenBatch
from streamlens.stream.run import Run
from streamlens.stream.sites import watch_sites

MEASURES: dict[str, Callable[[Float[Tensor, "row d_model"]], Float[Tensor, " row"]]] = {
    "l2": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "rms": lambda x: torch.linalg.vector_norm(x, dim=-1) / x.shape[-1] ** 0.5,
}
"""In the stream's own units: l2 is the length of the vector, rms its length over sqrt(d_model)."""


@dataclass(frozen=True)
class Sites:
    """Measures of one batch at each site."""

    prompt: Int64[np.ndarray, " row"]
    position: Int64[np.ndarray, " row"]
    sites: tuple[tuple[str, int, int], ...]  # (site, layer, sublayer)
    measures: tuple[str, ...]
    value: Float64[np.ndarray, "row site measure"]


@torch.no_grad()
def measure_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    places: tuple[Int64[np.ndarray, " row"], Int64[np.ndarray, " row"]],
    sites: Collection[str],
    measures: tuple[str, ...],
) -> Sites:
    """Norms at `places` (prompt, position); padding is never read, and `final` is the stream before the final norm."""
    flat = torch.from_numpy(flat_index(batch, *places))
    seen: list[tuple[str, int, int]] = []
    values: list[Float[Tensor, "measure row"]] = []

    def see(site: str, layer: int, sublayer: int, value: Tensor) -> None:
        wide = torch.promote_types(value.dtype, torch.float32)
        rows = value.reshape(-1, value.shape[-1])[flat.to(value.device)].to(wide)
        seen.append((site, layer, sublayer))
        values.append(torch.stack([MEASURES[name](rows) for name in measures]).double().cpu())

    with Run.of(module, anatomy) as run:
        watch_sites(run, anatomy, sites, see)
        run.hidden(batch.ids, batch.mask)
    if not seen:
        raise InputError(f"sites={sorted(sites)}: this model has none of them")
    return Sites(*places, tuple(seen), measures, torch.stack(values).permute(2, 0, 1).numpy())
