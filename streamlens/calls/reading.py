"""What a sweep reads: metrics, positions, targets, batches; and what a bar counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tqdm import tqdm

from streamlens.arguments import bar_interval, batched, chosen_metrics
from streamlens.errors import InputError
from streamlens.measure.ablation import Removal, Tick
from streamlens.measure.metrics import TARGET_METRICS, Metric, name_of
from streamlens.measure.places import places_in
from streamlens.models.loaded import Model
from streamlens.prompts import NO_READOUTS, Prompts, Readouts, TokenBatch, readouts
from streamlens.prompts import positions as positions_of


@dataclass(frozen=True)
class Reading:
    """Which metrics are read where."""

    prompts: Prompts
    wanted: tuple[Metric, ...]
    where: list[np.ndarray]  # [prompt] positions
    rows: Readouts
    batches: list[TokenBatch]

    def of(self, batch: TokenBatch) -> tuple[tuple[np.ndarray, np.ndarray], Readouts]:
        """Places and readouts of one batch."""
        return places_in(batch, self.where), self.rows.take(np.isin(self.rows.prompt, batch.index))

    def shared(self, batch: TokenBatch, tick: Tick) -> Tick:
        """Passes over one batch as passes over all prompts."""
        share = batch.ids.numel() / self.n_tokens
        return lambda passes: tick(passes * share)

    @cached_property
    def n_tokens(self) -> int:
        """Tokens of a pass over all prompts, padding included."""
        return sum(b.ids.numel() for b in self.batches)


def reading(model: Model, parsed: Prompts, target: object, versus: object, positions: object, metrics: object, max_tokens: int) -> Reading:
    """Defaults: "all" positions with target "next"; "last" where a target is given."""
    wanted = chosen_metrics(metrics)
    given = target is not None or parsed.targets is not None
    if positions is None and parsed.positions is None:
        positions = "last" if given else "all"
    where = positions_of(parsed, positions)
    if not given:  # where only last tokens are read, there is no next one
        target = "top" if all(w.tolist() == [n - 1] for w, n in zip(where, parsed.lengths, strict=True)) else "next"
    if given or set(wanted) & set(TARGET_METRICS):
        rows = readouts(parsed, model.tokenizer, target=target, versus=versus, positions=positions)
    else:
        rows = NO_READOUTS
    return Reading(parsed, wanted, where, rows, batched(model, parsed, max_tokens))


def demand_inputs(wanted: Sequence[Metric], parts: Sequence[Removal]) -> None:
    """Refuse metrics of which nothing could be read."""
    if all(np.isnan(clean).all() for p in parts for clean, _ in (*p.at_position.values(), *p.at_target.values())):
        names = [name_of(m) for m in wanted]
        raise InputError(f"metrics={names} have no inputs at the positions that are read: loss needs a next token, logit_diff a versus")


@contextmanager
def bar(total: float, progress: bool, title: str) -> Iterator[Tick]:
    """A progress bar in forward passes over all prompts, on stderr where it is wanted."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total:.1f} forward passes [{elapsed}<{remaining}]"
    with tqdm(total=total, desc=title, disable=not progress, bar_format=form, mininterval=bar_interval()) as shown:
        yield lambda passes: shown.update(min(passes, total - shown.n))  # fractions may sum to a rounding more than the total
