"""The logit lens: what the unembedding reads from the stream at every site, with the final norm's statistics taken there or kept.

nostalgebraist 2020 for the method. Streams are kept at the rows that are read; logits never outlive their chunk of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor, nn

from streamlens.errors import InputError
from streamlens.measure.places import at, flat_index, ordinals, with_top
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.run import Run
from streamlens.stream.sites import watch_sites
from streamlens.stream.tail import Tail
from streamlens.stream.unembed import Unembed, largest

SITES = ("embed", "resid_pre", "resid_mid", "resid_post", "final")
NORMS = ("recomputed", "frozen")

SCRATCH_ELEMENTS = 2**20
"""Elements of what is made of the logits on the way to a sum: few enough to stay in a cache."""


@dataclass(frozen=True)
class Tokens:
    """Tokens as the unembedding ranks them; the last axes are what each was looked for at."""

    id: Int64[np.ndarray, "*token"]
    rank: Int64[np.ndarray, "*token"]  # tokens with a strictly greater logit
    logit: Float64[np.ndarray, "*token"]
    probability: Float64[np.ndarray, "*token"]


@dataclass(frozen=True)
class Lens:
    """One batch at each site, under each norm."""

    prompt: Int64[np.ndarray, " row"]
    position: Int64[np.ndarray, " row"]
    sites: tuple[tuple[str, int], ...]  # (site, layer)
    norms: tuple[str, ...]
    top: Tokens  # [site, norm, row, k]
    readouts: Readouts  # [target]
    target: Tokens  # [site, norm, target]


@torch.no_grad()
def lens_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    places: tuple[Int64[np.ndarray, " row"], Int64[np.ndarray, " row"]],
    readouts: Readouts,
    sites: Collection[str],
    norms: tuple[str, ...],
    top_k: int,
) -> Lens:
    """The lens at `places` (prompt, position), where every readout stands at one of them.

    Raises :class:`InputError` for a site that the model has not, or whose vectors are no streams.
    """
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    flat = flat_index(batch, *places)
    hidden, streams = _streams(module, anatomy, batch, flat, sites)
    readouts = with_top(readouts, batch, hidden, unembed)
    reader = _Reader(unembed, flat, flat_index(batch, readouts.prompt, readouts.position), readouts.target, top_k)
    found = []
    with Tail(module, anatomy) as tail:
        tail.fit(streams["final", anatomy.n_layers], at(hidden, flat))
        wanted = {place: stream for place, stream in streams.items() if place[0] in sites}
        for stream in wanted.values():
            found += [reader.read(tail(stream, frozen=norm == "frozen")) for norm in norms]
    top, target = ([_stacked(parts, (len(wanted), len(norms))) for parts in zip(*side, strict=True)] for side in zip(*found, strict=True))
    ids = np.broadcast_to(readouts.target, target[0].shape)
    return Lens(*places, tuple(wanted), norms, Tokens(*top), readouts, Tokens(ids, *target))


@torch.no_grad()
def printed_error(module: nn.Module, anatomy: Anatomy, batch: TokenBatch, found: Lens) -> float:
    """|logit at `final` - what the model prints| at worst, over the largest printed logit; `final` must be among the sites."""
    with Run.of(module, anatomy) as run:
        _, logits = run.logits(batch.ids, batch.mask)
    worst, site = 0.0, found.sites.index(("final", anatomy.n_layers))
    for place, tokens in (((found.prompt, found.position), found.top), ((found.readouts.prompt, found.readouts.position), found.target)):
        printed = at(logits, flat_index(batch, *place)).double().cpu().numpy()
        for ids, value in zip(tokens.id[site], tokens.logit[site], strict=True):  # under each norm
            gap = np.take_along_axis(printed, ids.reshape(len(printed), -1), axis=1).reshape(ids.shape) - value
            worst = max(worst, float(np.abs(gap).max(initial=0.0) / np.abs(printed).max(initial=1e-30)))
    return worst


def _streams(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, flat: np.ndarray, sites: Collection[str]
) -> tuple[Float[Tensor, "batch pos width"], dict[tuple[str, int], Float[Tensor, "row d_model"]]]:
    """The unembedding's input, and the stream at every site and at the end, at the rows `flat`."""
    kept: dict[tuple[str, int], Tensor] = {}
    with Run.of(module, anatomy) as run:
        watch_sites(run, anatomy, {*sites, "final"}, lambda site, layer, _, value: kept.__setitem__((site, layer), at(value, flat).clone()))
        hidden = run.hidden(batch.ids, batch.mask)
    for site in sites:
        widths = {stream.shape[-1] for (name, _), stream in kept.items() if name == site}
        if widths != {anatomy.d_model}:
            what = f"vectors of {widths.pop()} coordinates there, not the stream's {anatomy.d_model}" if widths else "none"
            raise InputError(f"sites: {site!r} cannot be read by the lens; this model has {what}")
    return hidden, kept


def _stacked(parts: tuple[np.ndarray, ...], lead: tuple[int, int]) -> np.ndarray:
    return np.stack(parts).reshape(*lead, *parts[0].shape)


class _Reader:
    """Logits of one stream at a time, a chunk of rows at once: the top of each row, and the named targets."""

    def __init__(self, unembed: Unembed, flat: np.ndarray, at_target: np.ndarray, target: np.ndarray, top_k: int):
        self.unembed, self.top_k = unembed, top_k
        order = np.argsort(flat)
        self.row, self.target = order[np.searchsorted(flat, at_target, sorter=order)], target
        # One compare serves one target a row.
        self.turn = ordinals(self.row)

    def read(self, hidden: Float[Tensor, "row width"]) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """(id, rank, logit, probability) `[row, k]` of the top, and (rank, logit, probability) `[target]`."""
        top, target = [], [np.empty(len(self.target), dtype=dtype) for dtype in (np.int64, np.float64, np.float64)]
        for chunk, logits in self.unembed.each_logits(hidden):
            values, ids = largest(logits, max(self.top_k, 1))
            log_normalizer = values[:, 0] + _over_vocab(logits, values[:, 0], lambda z, top, out: torch.sub(z, top, out=out).exp_()).log_()
            top.append(_top(values, ids, log_normalizer, self.top_k))
            for which, rows, tokens in self._turns(chunk, hidden.device):
                found = _targets(logits, rows, tokens, log_normalizer)
                for column, value in zip(target, found, strict=True):
                    column[which] = value.cpu().numpy()
        return tuple(np.concatenate(parts) for parts in zip(*top, strict=True)), tuple(target)

    def _turns(self, chunk: slice, device: torch.device) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        """(index into the targets, row of the chunk, token) of the chunk's targets, at most one a row at a time."""
        inside = np.flatnonzero((self.row >= chunk.start) & (self.row < chunk.stop))
        for turn in np.unique(self.turn[inside]):
            which = inside[self.turn[inside] == turn]
            which = which[np.argsort(self.row[which])]
            yield which, torch.from_numpy(self.row[which] - chunk.start).to(device), torch.from_numpy(self.target[which]).to(device)


def _top(
    values: Float[Tensor, "row k"], ids: Int[Tensor, "row k"], log_normalizer: Float[Tensor, " row"], top_k: int
) -> tuple[np.ndarray, ...]:
    # What is greater than one of the largest is among them.
    rank = (values[:, None, :] > values[:, :, None]).sum(-1)
    probability = (values - log_normalizer[:, None]).exp()
    return tuple(x[:, :top_k].cpu().numpy() for x in (ids, rank, values.double(), probability.double()))


def _targets(
    logits: Float[Tensor, "chunk vocab"],
    rows: Int[Tensor, " row"],
    tokens: Int[Tensor, " row"],
    log_normalizer: Float[Tensor, " chunk"],
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"], Float[Tensor, " row"]]:
    """(rank, logit, probability)."""
    value = logits[rows, tokens]
    # Counted in floats, exact up to 2^24 tokens: a sum of truth values takes six times as long.
    rank = _over_vocab(logits if len(rows) == len(logits) else logits[rows], value, lambda z, v, out: torch.gt(z, v, out=out))
    return rank.long(), value, (value - log_normalizer[rows]).exp()


def _over_vocab(
    logits: Float[Tensor, "row vocab"], against: Float[Tensor, " row"], make: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Float[Tensor, " row"]:
    """The sum over the vocabulary of what `make` makes of logits and a number a row, a few rows at a time in memory that is reused."""
    n = max(1, SCRATCH_ELEMENTS // logits.shape[-1])
    scratch = logits.new_empty(min(n, len(logits)), logits.shape[-1])
    groups = zip(logits.split(n), against[:, None].split(n), strict=True)
    return torch.cat([make(z, a, scratch[: len(z)]).sum(-1) for z, a in groups])
