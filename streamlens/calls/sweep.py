"""A sweep, read from a call's arguments: what `ablate` does and `plan` foretells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamlens.arguments import batched, chosen_layers, chosen_metrics, demand_one_stream, parsed_for
from streamlens.calls.reading import Reading, reading
from streamlens.calls.replacing import METHODS, Reference, reference_of
from streamlens.calls.sets import sets_of
from streamlens.errors import InputError, choice, whole
from streamlens.measure import units
from streamlens.measure.ablation import Plan, sampled
from streamlens.measure.gradient import METRICS as SLOPED
from streamlens.measure.metrics import DEFAULT, name_of
from streamlens.measure.units import Variant
from streamlens.models.loaded import Model
from streamlens.prompts import NONE, Prompts
from streamlens.prompts import positions as positions_of
from streamlens.prompts.plain import is_index, plain
from streamlens.stream.experts import experts_of
from streamlens.stream.kept import Keep

EACH = "each"


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
        return 1.0 + sum(map(self.plan.cost, self.plan.changes)) + donors + self._for_means

    @property
    def _for_means(self) -> float:
        """A pass over the reference, in passes over the prompts, which may be many fewer."""
        if self.method not in ("mean", "positional_mean"):
            return 0.0
        reference = batched(self.model, self.reference.prompts, self.plan.max_tokens)
        return sum(b.ids.numel() for b in reference) / self.reading.n_tokens


def prepare(model: Model, prompts: object, given: Mapping[str, object]) -> Sweep:
    """Read and check the arguments of :func:`streamlens.ablate`. Nothing runs."""
    unit, method = given["unit"], given["method"]
    choice("unit", unit, units.UNITS)
    choice("method", method, METHODS)
    if unit != "block" or method not in ("remove", "zero"):
        demand_one_stream(model)
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
    spans = _spans(given["span"], unit, model.n_layers)
    experts = experts_of(model.module, model.anatomy) if unit == "expert" else None
    changes: list[Variant] = []
    for name, layers, heads in sets_of(given["layers"], given["heads"], given["span"]):
        chosen = chosen_layers(model, layers)
        found = units.variants(model.anatomy, unit, chosen, spans, _heads(model, heads, unit, chosen), experts)
        if not found:
            what = "such a span" if unit == "block" else "one"
            raise InputError(f"unit={unit!r}: none of the chosen layers of {model.name} has {what}")
        changes += [units.together(name, found)] if name else found
    return tuple(changes)


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


def _heads(model: Model, heads: object, unit: str, layers: Collection[int]) -> Collection[int | tuple[int, int]] | None:
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
            there = f", 0 to {max(w.n_heads for _, w in model.anatomy.writes()) - 1}," if legal else ", which has none,"
            raise InputError(f"heads must be heads of {model.name}{there} or a list of (layer, head) pairs; got {head!r}")
        if isinstance(head, tuple) and head[0] not in layers:
            raise InputError(f"heads must lie in the chosen layers; got {head}")
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
    places = [replace(c, layer=NONE, sublayer=NONE, span=1) if c.name else c for c in changes]  # a set has no place of its own
    names = ["layer", "sublayer", "span", "head", *["expert"] * (unit == "expert"), *["at"] * placed]
    columns |= {name: [getattr(c, name) for c in places] for name in names}
    if changes[0].name:
        columns["together"] = [c.name for c in changes]
    if reference.name:
        columns["reference"] = [reference.name] * n
    if seed is not None:
        columns |= {"sample": [c.sample for c in changes], "seed": [seed] * n}
    if reference.paired:
        columns["recovered"] = [NONE] * n
    return columns
