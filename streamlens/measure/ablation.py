"""Ablation by replay: what breaks when a block, a sublayer, a head or an expert is taken away or replaced.

Every variant of a sweep starts from the clean stream at its first changed layer; variants of one layer share passes; the
unembedding runs at the rows that a metric reads, on the clean side once for many variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from streamlens.measure.metrics import Metric
from streamlens.measure.places import with_top
from streamlens.measure.readings import Readings, Rows, measure
from streamlens.measure.replacements import Draw, Replacement, Zero
from streamlens.measure.units import EVERYWHERE, SEVERAL, Site, Variant
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.changes import Change
from streamlens.stream.hooked import hooked
from streamlens.stream.kept import Keep
from streamlens.stream.replay import Replay
from streamlens.stream.unembed import Unembed
from streamlens.stream.values import Key

KEPT_ELEMENTS = 2**24
"""Elements of the unembedding's input that are kept at once, over the variants: 64 MiB in float32."""

Tick = Callable[[float], object]
"""Receives forward-pass equivalents of a batch as they are done."""


@dataclass(frozen=True)
class Removal:
    """Metrics of one batch under every variant."""

    prompt: np.ndarray  # [row] rows of the metrics without a target
    position: np.ndarray
    at_position: dict[str, tuple[np.ndarray, np.ndarray]]  # metric: clean [row], changed [variant, row]; nan where it has no inputs
    readouts: Readouts  # [target] rows of the metrics with a target
    at_target: dict[str, tuple[np.ndarray, np.ndarray]]  # metric: clean [target], changed [variant, target]
    overflowed: int = 0  # rows, clean and changed, whose stream is not finite: their metrics mean nothing
    corrupted: Readings | None = None  # the same of the paired prompts' own run, as a single variant
    made_at: dict[int, int] | None = None  # by prompt, where a change is made: a position, or SEVERAL


@dataclass(frozen=True)
class Plan:
    """What a sweep does to every batch."""

    changes: tuple[Variant, ...]
    wanted: tuple[Metric, ...]
    replacement: Replacement = field(default_factory=Zero)
    at: tuple[np.ndarray, ...] | None = None  # [prompt] the positions of the change; None everywhere
    max_tokens: int = 1
    n_layers: int = 1
    keep: Keep | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        """Where the changes put values, each once."""
        return tuple(dict.fromkeys(key for change in self.changes for key in change.keys))

    def cost(self, change: Variant) -> float:
        """Forward passes that one variant takes."""
        whole = all(site.part is None and site.expert < 0 for site in change.sites) and len(change.sites) == change.span
        gone = change.span if whole and self.at is None and change.at == EVERYWHERE and change.sublayer < 0 else 0
        return (self.n_layers - change.layer - gone) / self.n_layers


def sweep_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    plan: Plan,
    places: tuple[np.ndarray, np.ndarray],
    readouts: Readouts,
    tick: Tick = lambda passes: None,
) -> Removal:
    """Metrics at `places` (prompt, position) and `readouts`, whose prompts are all in `batch`, under each change of the plan."""
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    changes = plan.changes
    with Replay(module, anatomy, keep=plan.keep) as replay:
        clean = replay.record(batch.ids, batch.mask, attention=any(site.part for c in changes for site in c.sites))
        tick(1.0)
        readouts = with_top(readouts, batch, clean, unembed)
        rows = Rows(batch, places, readouts)
        table = Readings.empty(len(changes), len(rows.place), len(rows.target), plan.wanted)
        clean_rows = rows.of(clean)
        replay.read_at(torch.from_numpy(rows.flat).to(clean.device), clean)
        bad, corrupted = overflowed([clean_rows]), None
        for draw in plan.replacement.draws(batch, plan.keys):
            if draw.hidden is not None:
                tick(1.0)
                corrupted = of_corrupted(unembed, rows, clean_rows, draw.hidden, plan)
            for hidden in _replayed(replay, batch, plan, draw, rows, tick):
                bad += overflowed(hidden.values())
                measure(unembed, rows, clean_rows, hidden, table, plan.wanted)
    return Removal(*places, table.at_position, readouts, table.at_target, bad, corrupted, made_at(batch, plan.at))


def of_corrupted(unembed: Unembed, rows: Rows, clean: Tensor, corrupted: Tensor, plan: Plan) -> Readings:
    """The metrics of the paired prompts' own run, whose unembedding inputs are `corrupted` `[batch, pos, d_model]`."""
    table = Readings.empty(1, len(rows.place), len(rows.target), plan.wanted)
    measure(unembed, rows, clean, {0: rows.of(corrupted)}, table, plan.wanted)
    return table


def _replayed(replay: Replay, batch: TokenBatch, plan: Plan, draw: Draw, rows: Rows, tick: Tick) -> Iterator[dict[int, Tensor]]:
    """The unembedding's input at the rows that are read, by number of the variant, for as many variants as may be kept at once."""
    kept: dict[int, Tensor] = {}
    for numbers in _passes(replay, batch, plan, draw):
        if kept and (len(kept) + len(numbers)) * next(iter(kept.values())).numel() > KEPT_ELEMENTS:
            yield kept
            kept = {}
        variants = [plan.changes[i] for i in numbers]
        hidden = replay.each([made(v, batch, plan, draw) for v in variants])
        kept |= {number: rows.of(h) for number, h in zip(numbers, hidden, strict=True)}
        tick(sum(map(plan.cost, variants)))
    if kept:
        yield kept


def _passes(replay: Replay, batch: TokenBatch, plan: Plan, draw: Draw) -> Iterator[list[int]]:
    """Numbers of the draw's variants that share a pass of at most `max_tokens`: those of which the same layers run."""
    firsts: dict[int, list[int]] = {}
    for number, variant in enumerate(plan.changes):
        if variant.sample == draw.sample:
            firsts.setdefault(replay.first(made(variant, batch, plan, draw)), []).append(number)
    n = max(1, plan.max_tokens // batch.ids.numel()) if replay.enlarges else 1
    for numbers in firsts.values():
        yield from (numbers[at : at + n] for at in range(0, len(numbers), n))


def made(variant: Variant, batch: TokenBatch, plan: Plan, draw: Draw) -> tuple[Change, ...]:
    """The changes of one variant in one batch."""
    at = positions_mask(batch, plan.at) if variant.at == EVERYWHERE else _one(batch, variant.at)
    return tuple(_change(site, draw, at) for site in variant.sites)


def _change(site: Site, draw: Draw, at: Tensor | None) -> Change:
    return site.change(draw.values.get(site.key), at)


def positions_mask(batch: TokenBatch, at: Sequence[np.ndarray] | None) -> Tensor | None:
    """True at the positions of each prompt of the batch; None everywhere."""
    if at is None:
        return None
    mask = torch.zeros_like(batch.mask)
    for row, prompt in enumerate(batch.index):
        mask[row, torch.from_numpy(at[prompt])] = True
    return mask


def _one(batch: TokenBatch, position: int) -> Tensor:
    return torch.arange(batch.ids.shape[1]).expand_as(batch.ids) == position


def made_at(batch: TokenBatch, at: Sequence[np.ndarray] | None) -> dict[int, int] | None:
    if at is None:
        return None
    return {int(prompt): int(at[prompt][0]) if len(at[prompt]) == 1 else SEVERAL for prompt in batch.index}


def overflowed(hidden: Iterable[Tensor]) -> int:
    return sum(int((~torch.isfinite(h)).any(-1).sum()) for h in hidden)


# -- the slow, obvious way ---------------------------------------------------------------------------------------------
def sweep_by_hooks(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, plan: Plan, places: tuple[np.ndarray, np.ndarray], readouts: Readouts
) -> Removal:
    """:func:`sweep_batch` by a full forward pass a variant, hooks on what it computes: the reference of tests and benchmarks.

    The metrics are by the same code.
    """
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    rows = Rows(batch, places, readouts)
    table = Readings.empty(len(plan.changes), len(rows.place), len(rows.target), plan.wanted)
    with torch.no_grad(), hooked(module, anatomy) as run:
        clean = rows.of(run.hidden(batch.ids, batch.mask))
    hidden: dict[int, Tensor] = {}
    for draw in plan.replacement.draws(batch, plan.keys):
        for number, variant in enumerate(plan.changes):
            if variant.sample == draw.sample:
                with torch.no_grad(), hooked(module, anatomy, made(variant, batch, plan, draw)) as run:
                    hidden[number] = rows.of(run.hidden(batch.ids, batch.mask))
    measure(unembed, rows, clean, hidden, table, plan.wanted)
    return Removal(*places, table.at_position, readouts, table.at_target)


def replay_error(module: nn.Module, anatomy: Anatomy, batch: TokenBatch, plan: Plan, number: int) -> float:
    """How far one variant by replay is from a plainly hooked forward pass, over the largest value at the unembedding's input."""
    variant = plan.changes[number]
    draw = next(d for d in plan.replacement.draws(batch, variant.keys) if d.sample == variant.sample)
    changes = made(variant, batch, plan, draw)
    with torch.no_grad(), hooked(module, anatomy, changes) as run:
        truth = run.hidden(batch.ids, batch.mask)[batch.mask]
    with Replay(module, anatomy) as replay:
        replay.record(batch.ids, batch.mask, attention=True)
        hidden = replay.changed(*changes)[batch.mask]
    return float((hidden - truth).abs().max() / truth.abs().max())


def sampled(changes: Sequence[Variant], n_samples: int) -> tuple[Variant, ...]:
    """Every change once a sample, the samples one after the other."""
    return tuple(replace(v, sample=s) for s in range(n_samples) for v in changes)
