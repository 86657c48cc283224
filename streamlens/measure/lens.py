"""The logit lens: what the unembedding reads from the stream at every site, with the final norm's statistics taken there or kept.

nostalgebraist 2020 for the method. Streams are kept at the rows that are read; logits never outlive their chunk of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor, nn

from streamlens.errors import InputError
from streamlens.measure.places import at, flat_index, ordinals
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import TOP, Readouts, TokenBatch
from streamlens.stream.run import Run
from streamlens.stream.sites import watch_sites
from streamlens.stream.tail import Tail
from streamlens.stream.unembed import Unembed, largest

SITES = ("embed", "resid_pre", "resid_mid", "resid_post", "final")
NORMS = ("recomputed", "frozen")

SCRATCH_ELEMENTS = 2**22
"""Elements of what is made of the logits on the way to a sum: few enough to stay in a cache, and many for one start of the threads."""


EXPONENT = 60.0
"""Up to which exponentials are summed as they are, and where a larger or smaller greatest one is moved to: float32 holds e^60 times
any vocabulary, and e^-87, below which its arithmetic is slow, counts for nothing beside it."""


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
    flat, end = flat_index(batch, *places), ("final", anatomy.n_layers)
    hidden, streams = _streams(module, anatomy, batch, flat, sites)
    wanted = tuple(place for place in streams if place[0] in sites)
    # The end is read first: its likeliest tokens are what "top" means at every other site.
    order = ([end] if end in wanted or (readouts.target <= TOP).any() else []) + [place for place in wanted if place != end]
    read = hidden.new_empty(len(order), len(norms), len(flat), hidden.shape[-1])
    with Tail(module, anatomy) as tail:
        tail.fit(streams[end], at(hidden, flat))
        for place, by_norm in zip(order, read, strict=True):
            stream = streams.pop(place)
            for norm, out in zip(norms, by_norm, strict=True):
                out.copy_(tail(stream, frozen=norm == "frozen"))
    by_flat = np.argsort(flat)
    row = by_flat[np.searchsorted(flat, flat_index(batch, readouts.prompt, readouts.position), sorter=by_flat)]
    top, target, ids = _read(unembed, read, row, readouts.target, top_k)
    readouts = replace(readouts, target=ids)
    site, distinct = [order.index(place) for place in wanted], readouts.distinct
    top, target, readouts = [x[site] for x in top], [x[site][..., distinct] for x in target], readouts.take(distinct)
    return Lens(*places, wanted, norms, Tokens(*top), readouts, Tokens(np.broadcast_to(readouts.target, target[0].shape), *target))


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
        watch_sites(run, anatomy, {*sites, "final"}, lambda site, layer, _, value: kept.__setitem__((site, layer), at(value, flat)))
        hidden = run.hidden(batch.ids, batch.mask)
    for site in sites:
        widths = {stream.shape[-1] for (name, _), stream in kept.items() if name == site}
        if widths != {anatomy.d_model}:
            what = f"vectors of {widths.pop()} coordinates there, not the stream's {anatomy.d_model}" if widths else "none"
            raise InputError(f"sites: {site!r} cannot be read by the lens; this model has {what}")
    return hidden, kept


def _read(
    unembed: Unembed,
    read: Float[Tensor, "site norm row width"],
    row: Int64[np.ndarray, " target"],
    target: Int64[np.ndarray, " target"],
    top_k: int,
) -> tuple[list[np.ndarray], list[np.ndarray], Int64[np.ndarray, " target"]]:
    """(id, rank, logit, probability) `[site, norm, row, k]` of the top, (rank, logit, probability) `[site, norm, target]`, and the targets.

    What is TOP or below it among them becomes the likeliest tokens of the first site.
    """
    shape, n_rows, n_targets, target = read.shape[:2], read.shape[2], len(row), target.copy()
    most = int(TOP - target.min(initial=TOP)) + 1
    # All sites are read as one: a product of many rows costs less than many products, and one row of each site hardly more than one row.
    at_row = (n_rows * np.arange(shape.numel())[:, None] + row).reshape(-1)
    turn = ordinals(at_row)  # one compare serves one target a row
    top, found = [], tuple(np.empty(len(at_row), dtype=dtype) for dtype in (np.int64, np.float64, np.float64))
    for chunk, logits in unembed.each_logits(read.flatten(0, 2)):
        values, ids = largest(logits, max(top_k, 1 if chunk.start >= n_rows else most))
        log_normalizer = _log_normalizer(logits, values[:, 0])
        top.append(_top(values, ids, log_normalizer, top_k))
        inside = np.flatnonzero((at_row >= chunk.start) & (at_row < chunk.stop))
        unknown = inside[inside < n_targets]
        unknown = unknown[target[unknown] <= TOP]
        target[unknown] = ids.cpu().numpy()[at_row[unknown] - chunk.start, TOP - target[unknown]]
        for now in np.unique(turn[inside]):
            which = inside[turn[inside] == now]  # ascending, as readouts are ordered by place
            tokens = target[which % n_targets]
            for column, value in zip(found, _targets(logits, at_row[which] - chunk.start, tokens, log_normalizer), strict=True):
                column[which] = value.cpu().numpy()
    tops = [np.concatenate(parts).reshape(*shape, n_rows, top_k) for parts in zip(*top, strict=True)]
    return tops, [column.reshape(*shape, n_targets) for column in found], target


def _top(
    values: Float[Tensor, "row k"], ids: Int[Tensor, "row k"], log_normalizer: Float[Tensor, " row"], top_k: int
) -> tuple[np.ndarray, ...]:
    # What is greater than one of the largest is among them.
    rank = (values[:, None, :] > values[:, :, None]).sum(-1)
    probability = (values - log_normalizer[:, None]).exp()
    return tuple(x[:, :top_k].cpu().numpy() for x in (ids, rank, values.double(), probability.double()))


def _targets(
    logits: Float[Tensor, "chunk vocab"],
    at_row: Int64[np.ndarray, " row"],
    target: Int64[np.ndarray, " row"],
    log_normalizer: Float[Tensor, " chunk"],
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"], Float[Tensor, " row"]]:
    """(rank, logit, probability) of one target in each of some rows, in order."""
    rows, tokens = torch.from_numpy(at_row).to(logits.device), torch.from_numpy(target).to(logits.device)
    value = logits[rows, tokens]
    ranks = []
    for some, scratch in _scratch(logits, len(rows)):
        first, last = at_row[some][[0, -1]]
        z = logits[first : last + 1] if last - first + 1 == len(scratch) else logits[rows[some]]
        # Counted in floats, exact up to 2^24 tokens: a sum of truth values takes six times as long.
        ranks.append(torch.gt(z, value[some, None], out=scratch).sum(-1))
    return torch.cat(ranks).long(), value, (value - log_normalizer[rows]).exp()


def _log_normalizer(logits: Float[Tensor, "row vocab"], top: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    """The logarithm of the sum of exponentials, given the largest logits; most models' need no shift, which is a pass less."""
    shift = top - EXPONENT if bool((top.abs() > EXPONENT).any()) else None
    sums = []
    for some, scratch in _scratch(logits, len(logits)):
        z = logits[some] if shift is None else torch.sub(logits[some], shift[some, None], out=scratch).clamp_(min=-87.0)
        sums.append(torch.exp(z, out=scratch).sum(-1))
    return torch.cat(sums).log_() + (0.0 if shift is None else shift)


def _scratch(logits: Float[Tensor, "row vocab"], n_rows: int) -> Iterator[tuple[slice, Float[Tensor, "part vocab"]]]:
    """A few rows at a time, and memory for what is made of them, the same each time."""
    n = max(1, SCRATCH_ELEMENTS // logits.shape[-1])
    memory = logits.new_empty(min(n, n_rows), logits.shape[-1])
    return ((slice(start, min(start + n, n_rows)), memory[: n_rows - start]) for start in range(0, n_rows, n))
