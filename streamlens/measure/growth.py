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
            looked_up = watched_attention(self.module, lambda *qkvp: watch.pattern(run.layer, qkvp[3])) if patterns else nullcontext()
            with looked_up, np.errstate(all="ignore"):  # what is not finite is for the call to refuse
                run.hidden(batch.ids, batch.mask)
        if patterns:
            sinks.demand_all(self.anatomy, {layer for (site, layer, *_) in watch.seen if site == PATTERN})
        if not watch.columns:
            raise InputError(f"sites={sorted(self.wanted)}: this model has none of them with such a measure")
        return Measured(*places, tuple(watch.columns), np.stack(watch.values, axis=-1))


class _Watch:
    """One pass: what each hook sees becomes columns."""

    def __init__(self, meter: Meter, batch: TokenBatch, flat: Tensor):
        self.meter, self.batch = meter, batch
        self.places = Places(flat.unique(), batch.ids.numel())
        index = self.places.index(flat).numpy()
        in_order = len(index) == batch.ids.numel() and bool((np.diff(index) == 1).all())
        self.index = slice(None) if in_order else index  # of each row in what is kept
        self.columns: list[Column] = []
        self.values: list[Float64[np.ndarray, " row"]] = []
        self.seen: Counter[tuple[str, int]] = Counter()
        self._z: dict[str, Tensor] = {}
        self._last: list[tuple[Tensor, dict[str, np.ndarray]]] = []  # what passed last is often a site or a write's stream again
        self._looked_up = False

    def plant(self, run: Run) -> None:
        meter, wanted = self.meter, self.meter.wanted
        aligned = {site for site in wanted if site in WRITES.values() and set(wanted[site]) & set(alignment.MEASURES)}
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
        wanted = self.meter.wanted[site]
        known = self._of(value, [name for name in wanted if name in vectors.MEASURES])
        if vectors.OF_A_PROMPT in wanted and vectors.OF_A_PROMPT not in known:
            known[vectors.OF_A_PROMPT] = self._massive(value)
        self._add(site, layer, sublayer, known)

    def _massive(self, value: Tensor) -> Float64[np.ndarray, " kept"]:
        x = value.expand(*self.batch.ids.shape, -1)
        largest = (self._of(value, ["max_abs"]) if self.places.all else vectors.measured(x.flatten(0, 1), ["max_abs"]))["max_abs"]
        counts = vectors.massive(x, self.batch.mask.sum(-1).numpy(), largest.reshape(self.batch.ids.shape))
        return vectors.array(self.places.keep(torch.from_numpy(counts).flatten()))

    def write(self, written: Written) -> None:
        wanted, heads = self.meter.wanted.get(written.site, ()), self.meter.wanted.get(HEAD, ())
        stream = self._rows(written.stream) if heads or set(wanted) & set(alignment.MEASURES) else None
        if stream is None:
            return
        length = self._of(written.stream, ["l2"])["l2"]
        if set(wanted) & set(alignment.MEASURES):
            known = self._of(written.value, ["l2", *(name for name in wanted if name in vectors.MEASURES)], beside=stream)
            self._add(written.site, written.layer, written.write.sublayer, known | alignment.measured(known["l2"], length, known["inner"]))
        for write in written.add.writes if written.add.norm else (written.write,):
            if heads and write.n_heads:
                self._heads(written, write, stream, length)

    def _heads(self, written: Written, write: Write, stream: Tensor, stream_length: Float64[np.ndarray, " kept"]) -> None:
        z = self._rows(self._z.pop(write.leaf))
        form = self.meter.anatomy.norms[written.add.norm] if written.add.norm else None
        factor = written.add.factors[written.add.writes.index(write)]
        scale = factor if form is None else factor * self._scale(written.raw, form)[:, None]
        length = self.meter.heads.length(z, write, form, abs(scale))
        found = {"l2": length, "rms": length / stream.shape[-1] ** 0.5}
        if set(self.meter.wanted[HEAD]) & set(alignment.MEASURES):
            direction = stream if form is None else form.pull_back(stream, self._rows(written.raw))
            inner = self.meter.heads.inner(z, write, direction) * factor
            found |= alignment.measured(length, stream_length[:, None], inner)
        self._add(HEAD, written.layer, write.sublayer, found)

    def norm(self, layer: int, path: str, x: Tensor) -> None:
        if layer < 0 or (layer, path) in self.meter.branch_norms:
            return
        form = self.meter.anatomy.norms[path]
        scale = self._scale(x, form)
        gain = scale if form.gain is None else scale * float(form.gain.square().mean().sqrt())
        self._add(NORM, layer, self.seen[NORM, layer], {"scale": scale, "gain": gain})

    def _scale(self, x: Tensor, form: NormForm) -> Float64[np.ndarray, " kept"]:
        """As :meth:`NormForm.scale`, from what is known where the norm reads what was measured as a site."""
        spread = "std" if form.centred else "rms"
        return 1 / np.sqrt(np.square(self._of(x, [spread])[spread]) + form.eps)

    def pattern(self, layer: int, weights: Float[Tensor, "batch head pos source"], returned: bool = False) -> None:
        if returned and self._looked_up:  # the same pattern again
            return
        self._looked_up |= not returned
        value = sinks.to_first(weights, self.batch.ids.shape)
        self._add(PATTERN, layer, self.seen[PATTERN, layer], {sinks.MEASURE: vectors.array(self._rows(value))})

    # -- rows and columns ----------------------------------------------------------------------------------------
    def _rows(self, value: Tensor) -> Float[Tensor, "kept width"]:
        """The vectors at the positions that are kept, in float32 at least; an embedding may be broadcast over the batch."""
        if value.dim() == 3 and value.shape[0] != len(self.batch.ids):
            value = value.expand(len(self.batch.ids), -1, -1)
        kept = self.places.keep(value.reshape(-1, value.shape[-1]))
        return kept.to(torch.promote_types(kept.dtype, torch.float32))

    def _of(self, tensor: Tensor, names: Collection[str], beside: Tensor | None = None) -> dict[str, Float64[np.ndarray, " kept"]]:
        """These measures of a tensor, and what else is known of it."""
        known = self._known(tensor)
        missing = [name for name in names if name not in known]
        if missing or beside is not None:
            known |= vectors.measured(self._rows(tensor), missing, beside)
        return known

    def _known(self, tensor: Tensor) -> dict[str, np.ndarray]:
        """What has been measured of this very tensor."""
        for seen, found in self._last:
            if seen is tensor:
                return found
        found: dict[str, np.ndarray] = {}
        if not self.meter.anatomy.clones:  # else it may still change in place
            self._last = [(tensor, found), *self._last[:2]]
        return found

    def _add(self, site: str, layer: int, sublayer: int, found: dict[str, np.ndarray]) -> None:
        """The columns that are wanted of one site, from `[kept]`, or from `[kept, head]` by head."""
        wanted = {name: found[name][self.index] for name in self.meter.wanted[site]}
        if not wanted:
            return
        self.seen[site, layer] += 1
        heads = range(next(iter(wanted.values())).shape[-1]) if site in (HEAD, PATTERN) else (NONE,)
        self.columns += [Column(site, layer, sublayer, head, name) for head in heads for name in wanted]
        self.values += [value if head == NONE else value[:, head] for head in heads for value in wanted.values()]
