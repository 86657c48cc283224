"""How the residual stream grows: measures at every site of every layer, taken while the model runs and nothing kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from streamlens.errors import InputError
from streamlens.measure import alignment, sinks, vectors
from streamlens.measure.places import flat_index
from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.attention import watched_attention
from streamlens.models.norms import NormForm
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


class Column(NamedTuple):
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
        self.of_vectors = {site: [m for m in wanted if m in vectors.MEASURES] for site, wanted in self.wanted.items()}
        self.aligned = frozenset(site for site, wanted in self.wanted.items() if set(wanted) & set(alignment.MEASURES))
        self.heads = alignment.Heads(module)
        branch = {(i, add.norm) for i, layer in enumerate(anatomy.layers) for add in layer.adds if add.norm}
        self.branch_norms = frozenset(branch)
        self.leaves = {(layer, w.leaf): w for layer, w in anatomy.writes() if w.n_heads}

    @torch.no_grad()
    @np.errstate(all="ignore")  # what is not finite is for the call to refuse
    def batch(self, batch: TokenBatch, places: tuple[Int64[np.ndarray, " row"], Int64[np.ndarray, " row"]]) -> Measured:
        """Measures at `places` (prompt, position); padding is never read, and `final` is the stream before the final norm."""
        with Run.of(self.module, self.anatomy) as run:
            watch = _Watch(self, batch, torch.from_numpy(flat_index(batch, *places)))
            watch.plant(run)
            patterns = self.wanted.get(PATTERN)
            looked_up = watched_attention(self.module, lambda *qkvp: watch.pattern(run.layer, qkvp[3])) if patterns else nullcontext()
            with looked_up:
                run.hidden(batch.ids, batch.mask)
        if patterns:
            sinks.demand_all(self.anatomy, {layer for site, layer in watch.counts if site == PATTERN})
        columns, values = watch.columns()
        if not columns:
            raise InputError(f"sites={sorted(self.wanted)}: this model has none of them with such a measure")
        return Measured(*places, tuple(columns), np.stack(values, axis=-1))


class _Seen(NamedTuple):
    """What was found at one site: measures of each row, or `[kept, head]` by head."""

    site: str
    layer: int
    sublayer: int
    found: Mapping[str, np.ndarray]
    beside: tuple[vectors.Found, Float64[np.ndarray, " kept"]] | None = None  # of a write: its stream, and their inner product


class _Watch:
    """One pass: what each hook sees becomes columns, after the pass where that can wait."""

    def __init__(self, meter: Meter, batch: TokenBatch, flat: Tensor):
        self.meter, self.batch = meter, batch
        self.places = Places(flat.unique(), batch.ids.numel())
        index = self.places.index(flat).numpy()
        in_order = len(index) == batch.ids.numel() and bool((np.diff(index) == 1).all())
        self.index = slice(None) if in_order else index  # of each row in what is kept
        self.lengths = batch.mask.sum(-1).numpy()
        self.reader = vectors.Reader()
        self.seen: list[_Seen] = []
        self.counts: Counter[tuple[str, int]] = Counter()  # of what was seen, by site and layer
        self._z: dict[str, Tensor] = {}
        self._latest: tuple[Tensor, vectors.Found] | None = None  # the stream that passed last, which is often asked for again
        self._looked_up = False

    def plant(self, run: Run) -> None:
        meter, wanted = self.meter, self.meter.wanted
        aligned = meter.aligned - {HEAD}
        if wanted.get(HEAD):
            for path in dict.fromkeys(path for _, path in meter.leaves):
                run.on_output(path, lambda layer, _, x, path=path: self._z.__setitem__(path, x))
        watch_sites(run, meter.anatomy, wanted.keys() - aligned, self.stream, self.write if aligned or wanted.get(HEAD) else None)
        if wanted.get(NORM):
            for path in meter.anatomy.norms:
                run.on_output(path, lambda layer, _, x, path=path: self.norm(layer, path, x))
        if wanted.get(PATTERN):
            sinks.watch_returned(run, meter.anatomy, lambda layer, weights: self.pattern(layer, weights, returned=True))

    # -- what is seen --------------------------------------------------------------------------------------------
    def stream(self, site: str, layer: int, sublayer: int, value: Tensor) -> None:
        measures = self.meter.of_vectors[site]
        found = self._read(value, measures) if site in WRITES.values() else self._of(value, measures)
        if vectors.OF_A_PROMPT in self.meter.wanted[site] and vectors.OF_A_PROMPT not in found:
            found[vectors.OF_A_PROMPT] = self._massive(value)
        self._see(site, layer, sublayer, found)

    def _massive(self, value: Tensor) -> Float64[np.ndarray, " kept"]:
        x = value.expand(*self.batch.ids.shape, -1).to(torch.promote_types(value.dtype, torch.float32))
        if self.places.all:
            found = self._of(value, ["max_abs"])
        else:  # the whole prompt decides, with what is not kept
            found = vectors.Found(x.shape[-1])
            self.reader.read(found, x.flatten(0, 1), ["max_abs"])
        counts = vectors.massive(x, self.lengths, found["max_abs"].reshape(self.batch.ids.shape)).ravel().astype(float)
        return counts if self.places.all else counts[self.places.flat.numpy()]

    def write(self, written: Written) -> None:
        aligned, heads = written.site in self.meter.aligned, self.meter.wanted.get(HEAD)
        if not aligned and not heads:
            return
        rows, stream = self._rows(written.stream), self._of(written.stream, ["l2"])
        if aligned:
            found = vectors.Found(rows.shape[-1])
            inner = self.reader.read(found, self._rows(written.value), ["l2", *self.meter.of_vectors[written.site]], rows)
            self._see(written.site, written.layer, written.write.sublayer, found, (stream, inner))
        for write in written.add.writes if written.add.norm else (written.write,):
            if heads and write.n_heads:
                self._heads(written, write, rows, stream)

    def _heads(self, written: Written, write: Write, rows: Float[Tensor, "kept d_model"], stream: vectors.Found) -> None:
        z = self._rows(self._z.pop(write.leaf))
        form = self.meter.anatomy.norms[written.add.norm] if written.add.norm else None
        factor = written.add.factors[written.add.writes.index(write)]
        scale = factor if form is None else factor * self._scale(written.raw, form)[:, None]
        length = self.meter.heads.length(z, write, form, abs(scale))
        found = {"l2": length, "rms": length / rows.shape[-1] ** 0.5}
        if HEAD in self.meter.aligned:
            direction = rows if form is None else form.pull_back(rows, self._rows(written.raw))
            inner = self.meter.heads.inner(z, write, direction) * factor
            found |= alignment.measured(length, stream["l2"][:, None], inner)
        self._see(HEAD, written.layer, write.sublayer, found)

    def norm(self, layer: int, path: str, x: Tensor) -> None:
        if layer < 0 or (layer, path) in self.meter.branch_norms:
            return
        form = self.meter.anatomy.norms[path]
        scale = self._scale(x, form)
        gain = scale if form.gain is None else scale * float(form.gain.square().mean().sqrt())
        self._see(NORM, layer, self.counts[NORM, layer], {"scale": scale, "gain": gain})

    def _scale(self, x: Tensor, form: NormForm) -> Float64[np.ndarray, " kept"]:
        """As :meth:`NormForm.scale`, from what is known where the norm reads what was measured as a site."""
        spread = "std" if form.centred else "rms"
        return 1 / np.sqrt(np.square(self._of(x, [spread])[spread]) + form.eps)

    def pattern(self, layer: int, weights: Float[Tensor, "batch head pos source"], returned: bool = False) -> None:
        if returned and self._looked_up:  # the same pattern again
            return
        self._looked_up |= not returned
        value = sinks.to_first(weights, self.batch.ids.shape)
        self._see(PATTERN, layer, self.counts[PATTERN, layer], {sinks.MEASURE: vectors.array(self._rows(value))})

    # -- rows and columns ----------------------------------------------------------------------------------------
    def _rows(self, value: Tensor) -> Float[Tensor, "kept width"]:
        """The vectors at the positions that are kept, in float32 at least; an embedding may be broadcast over the batch."""
        if value.dim() == 3 and value.shape[0] != len(self.batch.ids):
            value = value.expand(len(self.batch.ids), -1, -1)
        kept = self.places.keep(value.reshape(-1, value.shape[-1]))
        return kept.to(torch.promote_types(kept.dtype, torch.float32))

    def _of(self, stream: Tensor, measures: Collection[str]) -> vectors.Found:
        """These measures of a stream, and what else is known of this very tensor."""
        found = self._latest[1] if self._latest and self._latest[0] is stream else vectors.Found(stream.shape[-1])
        if not self.meter.anatomy.clones:  # else it may still change in place
            self._latest = stream, found
        return self._read(stream, measures, found)

    def _read(self, tensor: Tensor, measures: Collection[str], found: vectors.Found | None = None) -> vectors.Found:
        """These measures of a tensor, in addition to what was `found` of it."""
        found = vectors.Found(tensor.shape[-1]) if found is None else found
        if found.unread(measures):
            self.reader.read(found, self._rows(tensor), measures)
        return found

    def _see(
        self,
        site: str,
        layer: int,
        sublayer: int,
        found: Mapping[str, np.ndarray],
        beside: tuple[vectors.Found, Float64[np.ndarray, " kept"]] | None = None,
    ) -> None:
        if self.meter.wanted[site]:
            self.counts[site, layer] += 1
            self.seen.append(_Seen(site, layer, sublayer, found, beside))

    def columns(self) -> tuple[list[Column], list[Float64[np.ndarray, " row"]]]:
        """The columns that are wanted of all that was seen, and their values."""
        columns: list[Column] = []
        values: list[Float64[np.ndarray, " row"]] = []
        for site, layer, sublayer, found, beside in self.seen:
            aligned = {} if beside is None else alignment.measured(found["l2"], beside[0]["l2"], beside[1])
            wanted = {name: (aligned[name] if name in aligned else found[name])[self.index] for name in self.meter.wanted[site]}
            if site in (HEAD, PATTERN):
                heads = range(next(iter(wanted.values())).shape[-1])
                columns += [Column(site, layer, sublayer, head, name) for head in heads for name in wanted]
                values += [value[:, head] for head in heads for value in wanted.values()]
            else:
                columns += [Column(site, layer, sublayer, NONE, name) for name in wanted]
                values += wanted.values()
        return columns, values
