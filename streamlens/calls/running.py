"""A sweep as it runs, batch by batch; what is finished is kept where it may be resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby

from streamlens.calls.replacing import replacement
from streamlens.calls.shards import Shards, as_arrays, from_arrays, joined, opened_shards
from streamlens.calls.sweep import Sweep
from streamlens.errors import InputError
from streamlens.measure.ablation import Plan, Removal, Tick, made_at, sweep_batch
from streamlens.measure.gradient import estimate_batch
from streamlens.measure.metrics import name_of
from streamlens.measure.replacements import Deferred, Mean, Replacement
from streamlens.prompts import TokenBatch

SHARD = 32
"""Variants of one file of a sweep that can be resumed: each costs a clean pass more."""


def run(sweep: Sweep, tick: Tick, resume: str | os.PathLike | None = None) -> Iterator[tuple[TokenBatch, Removal, Plan]]:
    """Run a sweep, batch by batch, each with its plan; `tick` counts forward passes over all prompts.

    With a folder `resume`, what is finished is kept there and not computed again.
    """
    shards = None if resume is None else opened_shards(resume, sweep.model, _facts(sweep))
    plan = replace(sweep.plan, replacement=_source(sweep, tick, shards))
    for number, batch in enumerate(sweep.reading.batches):
        ticked = sweep.reading.shared(batch, tick)
        if shards is None:
            yield batch, _measured(sweep, batch, plan, ticked), plan
        else:
            yield batch, joined(list(_stretches(sweep, batch, number, plan, shards, ticked))), plan


def _measured(sweep: Sweep, batch: TokenBatch, plan: Plan, tick: Tick) -> Removal:
    measure = estimate_batch if sweep.method == "gradient" else sweep_batch
    return measure(sweep.model.module, sweep.model.anatomy, batch, plan, *sweep.reading.of(batch), tick)


def _stretches(sweep: Sweep, batch: TokenBatch, number: int, plan: Plan, shards: Shards, tick: Tick) -> Iterator[Removal]:
    """A batch's numbers by stretches of variants, each from its shard or computed and kept."""
    prompt, position = sweep.reading.of(batch)[0]
    like = Removal(prompt, position, {}, sweep.reading.rows, {}, made_at=made_at(batch, sweep.plan.at))
    for numbers in _stretched(sweep):
        name = f"batch{number:05d}-variants{numbers.start:06d}"
        kept = shards.get(name)
        if kept is None:
            removal = _measured(sweep, batch, replace(plan, changes=plan.changes[numbers.start : numbers.stop]), tick)
            shards.put(name, as_arrays(removal))
            yield removal
        else:
            tick(sum(plan.cost(plan.changes[i]) for i in numbers))
            yield from_arrays(kept, like)


def _stretched(sweep: Sweep) -> Iterator[range]:
    """Stretches of at most :data:`SHARD` variants, each of one sample; an estimate is made of all at once."""
    size = len(sweep.plan.changes) if sweep.method == "gradient" else SHARD
    for _, members in groupby(range(len(sweep.plan.changes)), key=lambda i: sweep.plan.changes[i].sample):
        numbers = list(members)
        yield from (range(at, min(at + size, numbers[-1] + 1)) for at in range(numbers[0], numbers[-1] + 1, size))


def _source(sweep: Sweep, tick: Tick, shards: Shards | None) -> Deferred:
    """The replacement, made when it is first needed; means over the reference are kept with the rest."""
    given = sweep.arguments
    keys = sweep.plan.keys
    options = {name: given[name] for name in ("n_samples", "seed", "min_count", "max_tokens")}

    @cache
    def make() -> Replacement:
        kept = shards.get("reference") if shards else None
        if kept is not None:
            return Mean.of(sweep.method == "positional_mean", keys, list(kept.values()))
        options["tick"] = lambda tokens: tick(tokens / sweep.reading.n_tokens)
        source = replacement(sweep.model, sweep.reading.prompts, sweep.method, sweep.reference, keys, at=sweep.plan.at, **options)
        if shards and isinstance(source, Mean):
            shards.put("reference", {str(i): array for i, array in enumerate(source.arrays(keys))})
        return source

    return Deferred(make)


def _facts(sweep: Sweep) -> dict[str, object]:
    """What a sweep's numbers depend on beside the model."""
    own = [name_of(metric) for metric in sweep.reading.wanted if callable(metric)]
    if own:
        raise InputError(f"resume cannot tell whether a function has changed: metrics must be names; got {own[0]}")
    read, reference = sweep.reading, sweep.reference.prompts
    arrays = {"rows": [getattr(read.rows, n).tolist() for n in ("prompt", "position", "target", "versus")]}
    arrays |= {"ids": [ids.tolist() for ids in read.prompts.ids], "where": [w.tolist() for w in read.where]}
    arrays["reference"] = None if reference is None else [ids.tolist() for ids in reference.ids]
    arrays["at"] = None if sweep.plan.at is None else [a.tolist() for a in sweep.plan.at]
    options = {name: sweep.arguments[name] for name in ("max_tokens", "n_samples", "seed", "min_count", "keep")}
    return {"method": sweep.method, "metrics": read.wanted, "changes": repr(sweep.plan.changes), **arrays, **options}
