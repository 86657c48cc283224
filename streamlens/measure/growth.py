"""How the residual stream grows: measures at every site of every layer, taken while the model runs and nothing kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from streamlens.errors import InputError
from streamlens.measure import alignment, sinks, vectors
from streamlens.measure.places import flat_index
from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.attention import watched_attention
from streamlens.prompts import NONE, TokenBatch
from streamlens.stream.run import Run
from streamlens.stream.sites import SITES as STREAM_SITES
from streamlens.stream.sites import WRITES, Written, watch_sites
from streamlens.stream.tap import Places

HEAD, NORM, PATTERN = "head_out", "norm", "pattern"

SITES = (*STREAM_SITES, HEAD, NORM, PATTERN)
"""The stream's own; each head's write; the norms that read the stream; attention patterns."""

NORM_MEASURES = ("scale", "gain")
"""1/sigma, and 1/sigma times the root mean square of the gain: what the length of a write of no particular direction is multiplied by."""

MEASURES = (*vectors.MEASURES, vectors.OF_A_PROMPT, *alignment.MEASURES, *NORM_MEASURES, sinks.MEASURE)

AT = (
    dict.fromkeys(STREAM_SITES, vectors.MEASURES)
    | dict.fromkeys(("embed", "resid_pre", "resid_post", "final"), (*vectors.MEASURES, vectors.OF_A_PROMPT))
    | dict.fromkeys(WRITES.values(), vectors.MEASURES + alignment.MEASURES)
    | {HEAD: ("l2", "rms", *alignment.MEASURES), NORM: NORM_MEASURES, PATTERN: (sinks.MEASURE,)}
)
"""Which measures each site has."""


@dataclass(frozen=True)
class Column:
    """One measure at one site."""

    site: str
    layer: int
    sublayer: int
    head: int
    measure: str


@dataclass(frozen=True)
class Measured:
    """Every column at each row of one batch."""

    prompt: Int64[np.ndarray, " row"]
    position: Int64[np.ndarray, " row"]
    columns: tuple[Column, ...]
    value: Float64[np.ndarray, "row column"]


class Meter:
    """Measures batches of one model; what does not change from batch to batch is made once."""

    def __init__(self, module: torch.nn.Module, anatomy: Anatomy, sites: Collection[str], measures: Collection[str]):
        self.module, self.anatomy = module, anatomy
        self.wanted = {site: [m for m in measures if m in AT[site]] for site in sites}
        self.heads = alignment.Heads(module)
        branch = {(i, add.norm) for i, layer in enumerate(anatomy.layers) for add in layer.adds if add.norm}
        self.branch_norms = frozenset(branch)
        self.leaves = {(layer, w.leaf): w for layer, w in anatomy.writes() if w.n_heads}

    @torch.no_grad()
    def batch(self, batch: TokenBatch, places: tuple[Int64[np.ndarray, " row"], Int64[np.ndarray, " row"]]) -> Measured:
        """Measures at `places` (prompt, position); padding is never read, and `final` is the stream before the final norm."""
        with Run.of(self.module, self.anatomy) as run:
            watch = _Watch(self, batch, torch.from_numpy(flat_index(batch, *places)))
            watch.plant(run)
            patterns = self.wanted.get(PATTERN)
            with watched_attention(self.module, lambda *qkvp: watch.pattern(run.layer, qkvp[3])) if patterns else nullcontext():
                run.hidden(batch.ids, batch.mask)
        if patterns:
            sinks.demand_all(self.anatomy, {layer for (site, layer, *_) in watch.seen if site == PATTERN})
        if not watch.columns:
            raise InputError(f"sites={sorted(self.wanted)}: this model has none of them with such a measure")
        return Measured(*places, tuple(watch.columns), torch.cat(watch.values).T.contiguous().double().numpy())


class _Watch:
    """One pass: what each hook sees becomes columns."""

    def __init__(self, meter: Meter, batch: TokenBatch, flat: Tensor):
        self.meter, self.batch, self.flat = meter, batch, flat
        self.places = Places(flat.unique(), batch.ids.numel())
        self.columns: list[Column] = []
        self.values: list[Float[Tensor, "column row"]] = []
        self.seen: Counter[tuple[str, int]] = Counter()
        self._z: dict[str, Tensor] = {}
        self._last: list[tuple[Tensor, dict[str, Tensor]]] = []  # what passed last is often a site or a write's stream again
        self._looked_up = False

    def plant(self, run: Run) -> None:
        meter, wanted = self.meter, self.meter.wanted
        aligned = any(set(wanted[site]) & set(alignment.MEASURES) for site in wanted if site in WRITES.values())
        if wanted.get(HEAD):
            for path in dict.fromkeys(path for _, path in meter.leaves):
                run.on_output(path, lambda layer, _, x, path=path: self._z.__setitem__(path, x))
        watch_sites(run, meter.anatomy, wanted.keys(), self.stream, self.write if aligned or wanted.get(HEAD) else None)
        if wanted.get(NORM):
            for path in meter.anatomy.norms:
                run.on_output(path, lambda layer, _, x, path=path: self.norm(layer, path, x))
        if wanted.get(PATTERN):
            sinks.watch_returned(run, meter.anatomy, lambda layer, weights: self.pattern(layer, weights, returned=True))

    # -- what is seen --------------------------------------------------------------------------------------------
    def stream(self, site: str, layer: int, sublayer: int, value: Tensor) -> None:
        wanted, known = [m for m in self.meter.wanted[site] if m not in alignment.MEASURES], self._known(value)
        if missing := [name for name in wanted if name not in known]:
            known |= vectors.measured(self._rows(value), missing)
        if "massive" in missing:
            known["massive"] = self.places.keep(self._massive(value, known).flatten()).to(value)
        self._add(site, layer, sublayer, {name: known[name] for name in wanted})

    def _massive(self, value: Tensor, known: dict[str, Tensor]) -> Int64[Tensor, "batch pos"]:
        x = value.expand(*self.batch.ids.shape, -1).to(torch.promote_types(value.dtype, torch.float32))
        known_everywhere = self.places.all and "max_abs" in known
        largest = known["max_abs"].view(self.batch.ids.shape) if known_everywhere else torch.linalg.vector_norm(x, torch.inf, dim=-1)
        return vectors.massive(x, self.batch.mask.sum(-1).numpy(), largest)

    def write(self, written: Written) -> None:
        wanted, heads = self.meter.wanted.get(written.site, ()), self.meter.wanted.get(HEAD, ())
        if not set(wanted) & set(alignment.MEASURES) and not heads:
            return
        stream, length = self._rows(written.stream), self._length(written.stream)
        if set(wanted) & set(alignment.MEASURES):
            value = self._rows(written.value)
            inner = torch.linalg.vecdot(value, stream)
            found = alignment.measured(self._length(written.value), length, inner, wanted)
            self._add(written.site, written.layer, written.write.sublayer, found)
        for write in written.add.writes if written.add.norm else (written.write,):
            if heads and write.n_heads:
                self._heads(written, write, stream, length)

    def _heads(self, written: Written, write: Write, stream: Tensor, stream_length: Tensor) -> None:
        wanted, z = self.meter.wanted[HEAD], self._rows(self._z.pop(write.leaf))
        form = self.meter.anatomy.norms[written.add.norm] if written.add.norm else None
        raw = None if form is None else self._rows(written.raw)
        factor = written.add.factors[written.add.writes.index(write)]
        scale = factor if form is None else factor * form.scale(raw)
        length = self.meter.heads.length(z, write, form, abs(scale))
        found = {"l2": length, "rms": length / stream.shape[-1] ** 0.5}
        if set(wanted) & set(alignment.MEASURES):
            direction = stream if form is None else form.pull_back(stream, raw)
            inner = self.meter.heads.inner(z, write, direction) * factor
            found |= alignment.measured(length, stream_length[:, None].expand_as(length), inner, wanted)
        self._add(HEAD, written.layer, write.sublayer, {name: found[name] for name in wanted})

    def norm(self, layer: int, path: str, x: Tensor) -> None:
        if layer < 0 or (layer, path) in self.meter.branch_norms:
            return
        form = self.meter.anatomy.norms[path]
        # As NormForm.scale, from the length that is known where the norm reads what was measured as a site.
        scale = form.scale(self._rows(x))[:, 0] if form.centred else (self._length(x).square() / x.shape[-1] + form.eps).rsqrt()
        gain = scale if form.gain is None else scale * form.gain.square().mean().sqrt().to(scale)
        self._add(NORM, layer, self.seen[NORM, layer], {name: {"scale": scale, "gain": gain}[name] for name in self.meter.wanted[NORM]})

    def pattern(self, layer: int, weights: Float[Tensor, "batch head pos source"], returned: bool = False) -> None:
        if returned and self._looked_up:  # the same pattern again
            return
        self._looked_up |= not returned
        value = sinks.to_first(weights, self.batch.ids.shape)
        self._add(PATTERN, layer, self.seen[PATTERN, layer], {sinks.MEASURE: self._rows(value)})

    # -- rows and columns ----------------------------------------------------------------------------------------
    def _rows(self, value: Tensor) -> Float[Tensor, "kept width"]:
        """The vectors at the positions that are kept, in float32 at least; an embedding may be broadcast over the batch."""
        if value.dim() == 3 and value.shape[0] != len(self.batch.ids):
            value = value.expand(len(self.batch.ids), -1, -1)
        kept = self.places.keep(value.reshape(-1, value.shape[-1]))
        return kept.to(torch.promote_types(kept.dtype, torch.float32))

    def _known(self, tensor: Tensor) -> dict[str, Tensor]:
        """What has been measured of this very tensor."""
        for seen, found in self._last:
            if seen is tensor:
                return found
        found: dict[str, Tensor] = {}
        if not self.meter.anatomy.clones:  # else it may still change in place
            self._last = [(tensor, found), *self._last[:2]]
        return found

    def _length(self, tensor: Tensor) -> Float[Tensor, " kept"]:
        known = self._known(tensor)
        if "l2" not in known:
            known["l2"] = torch.linalg.vector_norm(self._rows(tensor), dim=-1)
        return known["l2"]

    def _add(self, site: str, layer: int, sublayer: int, found: dict[str, Tensor]) -> None:
        """Columns of one site, from `[kept]`, or from `[kept, head]` by head."""
        if not found:
            return
        self.seen[site, layer] += 1
        heads = range(next(iter(found.values())).shape[-1]) if site in (HEAD, PATTERN) else (NONE,)
        self.columns += [Column(site, layer, sublayer, head, name) for head in heads for name in found]
        by_measure = torch.stack([value.mT if value.dim() == 2 else value for value in found.values()], dim=-2)
        rows = by_measure.flatten(0, -2)  # by head, then by measure, as the columns
        self.values.append(rows[:, self.places.index(self.flat.to(rows.device))].cpu())
