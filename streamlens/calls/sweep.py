"""A sweep, read from a call's arguments and run batch by batch: what `ablate` does and `plan` foretells."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import numpy as np

from streamlens.arguments import chosen_layers, chosen_metrics, parsed_for
from streamlens.calls.reading import Reading, reading
from streamlens.calls.replacing import METHODS, Reference, reference_of, replacement
from streamlens.calls.shards import Shards, as_arrays, from_arrays, joined, opened_shards
from streamlens.errors import InputError, choice, whole
from streamlens.measure import units
from streamlens.measure.ablation import Plan, Removal, Tick, made_at, sampled, sweep_batch
from streamlens.measure.gradient import METRICS as SLOPED
from streamlens.measure.gradient import estimate_batch
from streamlens.measure.metrics import DEFAULT, name_of
from streamlens.measure.replacements import Deferred, Mean, Replacement
from streamlens.measure.units import Variant
from streamlens.models.loaded import Model
from streamlens.prompts import NONE, Prompts, TokenBatch
from streamlens.prompts import positions as positions_of
from streamlens.prompts.plain import is_index, plain
from streamlens.stream.experts import experts_of
from streamlens.stream.kept import Keep

EACH = "each"

SHARD = 32
"""Variants of one file of a sweep that can be resumed: each costs a clean pass more."""


@dataclass(frozen=True)
class Sweep:
    """A sweep that has been read and checked, and not yet run."""

    model: Model
    reading: Reading
    method: str
    reference: Reference
    plan: Plan  # its replacement still to be made
    columns: dict[str, Sequence]  # key columns of the table, one entry a variant
    arguments: Mapping[str, object]

    @property
    def passes(self) -> float:
        """Forward passes over all prompts: the clean one, the changed ones and those of the reference."""
        if self.method == "gradient":  # one backward pass for each position that is read of a prompt
            read, (_, counts) = self.reading, np.unique(self.reading.rows.prompt, return_counts=True)
            at_place = max(map(len, read.where)) * ("loss" in read.wanted)
            return 1.0 + self.reference.paired + at_place + int(counts.max(initial=0)) * len(set(read.wanted) - {"loss"})
        donors = len({c.sample for c in self.plan.changes}) if self.method == "resample" else 0
        return 1.0 + sum(map(self.plan.cost, self.plan.changes)) + donors + (self.method in ("mean", "positional_mean"))


def prepare(model: Model, prompts: object, given: Mapping[str, object]) -> Sweep:
    """Read and check the arguments of :func:`streamlens.ablate`. Nothing runs."""
    unit, method = given["unit"], given["method"]
    choice("unit", unit, units.UNITS)
    choice("method", method, METHODS)
    for name, least in (("n_samples", 1), ("seed", 0), ("min_count", 1)):
        whole(name, given[name], least)
    n_samples, seed = int(given["n_samples"]), int(given["seed"])
    if unit == "expert" and method not in ("remove", "zero"):
        raise InputError(f"method must be 'remove' or 'zero' for experts, which have no value where they are not chosen; got {method!r}")
    parsed = parsed_for(model, prompts)
    if method == "gradient":
        given = {**given, "metrics": _sloped(given["metrics"])}
    read = reading(model, parsed, *(given[k] for k in ("target", "versus", "positions", "metrics", "max_tokens")))
    reference = reference_of(model, parsed, method, given["reference"])
    changes = _changes(model, unit, given)
    drawn = method == "resample" and not reference.paired
    changes = sampled(changes, n_samples) if drawn else changes
    each = isinstance(given["at"], str) and given["at"] == EACH
    at = None if each or given["at"] is None else _positions(parsed, given["at"])
    if each:
        changes = units.at_each(changes, int(parsed.lengths.max()))
    plan = Plan(changes, read.wanted, at=at, max_tokens=given["max_tokens"], n_layers=model.n_layers, keep=_keep(given["keep"]))
    columns = _columns(changes, unit, method, reference, seed if drawn else None, given["at"] is not None)
    return Sweep(model, read, method, reference, plan, columns, given)


def run(sweep: Sweep, tick: Tick, resume: str | os.PathLike | None = None) -> Iterator[tuple[TokenBatch, Removal, Plan]]:
    """Run a sweep, batch by batch, each with its plan; `tick` counts forward passes over all prompts.

    With a folder `resume`, what is finished is kept there and not computed again.
    """
    shards = None if resume is None else opened_shards(resume, sweep.model, _facts(sweep))
    plan = replace(sweep.plan, replacement=_source(sweep, tick, shards))
    n_tokens = sum(b.ids.numel() for b in sweep.reading.batches)
    for number, batch in enumerate(sweep.reading.batches):
        share = batch.ids.numel() / n_tokens

        def ticked(passes: float, share: float = share) -> None:
            tick(passes * share)

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
    keys = tuple(dict.fromkeys(key for c in sweep.plan.changes for key in c.keys))
    options = {name: given[name] for name in ("n_samples", "seed", "min_count", "max_tokens")}

    @cache
    def make() -> Replacement:
        kept = shards.get("reference") if shards else None
        if kept is not None:
            return Mean.of(sweep.method == "positional_mean", keys, list(kept.values()))
        source = replacement(
            sweep.model, sweep.reading.prompts, sweep.method, sweep.reference, keys, at=sweep.plan.at, tick=tick, **options
        )
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


def _keep(keep: object) -> Keep | None:
    if keep is not None and not isinstance(keep, Keep):
        raise InputError(f"keep must be sl.Keep(...) or None; got {type(keep).__name__}")
    return keep


def _sloped(metrics: object) -> tuple[str, ...]:
    """Metrics of which a gradient says something; those of them that are usual for None."""
    chosen = tuple(name for name in SLOPED if name in DEFAULT) if metrics is None else chosen_metrics(metrics)
    flat = [name_of(metric) for metric in chosen if metric not in SLOPED]
    if flat:
        raise InputError(
            f"metrics must be among {', '.join(SLOPED)} for method='gradient': a gradient says nothing of others; got {flat[0]!r}"
        )
    return chosen


def _changes(model: Model, unit: str, given: Mapping[str, object]) -> tuple[Variant, ...]:
    layers = chosen_layers(model, given["layers"])
    spans = _spans(given["span"], unit, model.n_layers)
    heads = _heads(model, given["heads"], unit)
    experts = experts_of(model.module, model.anatomy) if unit == "expert" else None
    changes = units.variants(model.anatomy, unit, layers, spans, heads, experts)
    if not changes:
        what = "such a span" if unit == "block" else "one"
        raise InputError(f"unit={unit!r}: none of the chosen layers of {model.name} has {what}")
    return changes


def _spans(span: object, unit: str, n_layers: int) -> tuple[int, ...]:
    """Lengths of spans, ascending."""
    if isinstance(span, str) and span == "all":
        lengths: list = list(range(1, n_layers + 1))
    else:
        lengths = plain(span)
        lengths = lengths if isinstance(lengths, list) else [lengths]
    if not lengths or not all(is_index(n) and 1 <= n <= n_layers for n in lengths):
        raise InputError(f"span must be a number of blocks from 1 to {n_layers}, a list of them, or 'all'; got {span!r}")
    if unit != "block" and set(lengths) != {1}:
        raise InputError(f"span counts blocks: unit must be 'block' for spans; got {unit!r}")
    return tuple(sorted({int(n) for n in lengths}))


def _heads(model: Model, heads: object, unit: str) -> Collection[int | tuple[int, int]] | None:
    """Heads of every layer, or (layer, head)s."""
    if heads is None:
        return None
    if unit != "head":
        raise InputError(f"heads goes with unit='head'; got unit={unit!r}")
    given = plain(heads)
    given = given if isinstance(given, list) else [given]
    chosen = {tuple(h) if isinstance(h, (list, tuple)) and len(h) == 2 else h for h in given}
    legal = {(layer, h) for layer, w in model.anatomy.writes() for h in range(w.n_heads)}
    legal |= {h for _, h in legal}
    for head in chosen:
        if head not in legal or isinstance(head, bool):
            raise InputError(f"heads must be heads of {model.name} or (layer, head) pairs; got {head!r}")
    if not chosen:
        raise InputError("heads must name at least one head; got none")
    return chosen


def _positions(parsed: Prompts, at: object) -> tuple[np.ndarray, ...]:
    """Where a change is made, each prompt's positions."""
    if not isinstance(at, slice):
        return tuple(positions_of(parsed, at))
    found = tuple(np.arange(n)[at] for n in parsed.lengths)
    if not all(map(len, found)):
        raise InputError(
            f"at must leave a position of every prompt; got {at}, which leaves none of prompt {[len(f) for f in found].index(0)}"
        )
    return found


def _columns(
    changes: Sequence[Variant], unit: str, method: str, reference: Reference, seed: int | None, placed: bool
) -> dict[str, Sequence]:
    n = len(changes)
    columns: dict[str, Sequence] = {"unit": [unit] * n, "method": [method] * n}
    names = ["layer", "sublayer", "span", "head", *["expert"] * (unit == "expert"), *["at"] * placed]
    columns |= {name: [getattr(c, name) for c in changes] for name in names}
    if reference.name:
        columns["reference"] = [reference.name] * n
    if seed is not None:
        columns |= {"sample": [c.sample for c in changes], "seed": [seed] * n}
    if reference.paired:
        columns["recovered"] = [NONE] * n
    return columns
