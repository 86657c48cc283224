"""What an ablation puts in the place of what it takes away, from a call's `method` and `reference`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamlens.arguments import batched, parsed_for
from streamlens.errors import InputError
from streamlens.measure.ablation import Tick
from streamlens.measure.replacements import Donors, Mean, Replacement, Zero, drawn
from streamlens.models.loaded import Model
from streamlens.prompts import Prompts
from streamlens.stream.values import Key

PAIRED = "paired"
METHODS = ("remove", "zero", "mean", "positional_mean", "resample", "gradient")
_WITH_REFERENCE = ("mean", "positional_mean", "resample")


@dataclass(frozen=True)
class Reference:
    """A named set of prompts that replacements come from; without prompts where a method needs none."""

    name: str = ""
    prompts: Prompts | None = None

    @property
    def paired(self) -> bool:
        return self.name == PAIRED


def reference_of(model: Model, parsed: Prompts, method: str, reference: object) -> Reference:
    """Read `reference=`: prompts, {name: prompts}, or "paired" for the prompts' own `corrupted` column."""
    if reference is None:
        if method in _WITH_REFERENCE:
            raise InputError(
                f"reference must be given for method={method!r}: prompts, {{name: prompts}}, "
                f"or, to resample, 'paired' for each prompt's own `corrupted`; got None"
            )
        return Reference()
    if isinstance(reference, str) and reference == PAIRED:
        if method not in ("resample", "gradient"):
            raise InputError(f"reference='paired' goes with method='resample' or 'gradient'; got method={method!r}")
        return Reference(PAIRED, _corrupted(model, parsed))
    if method not in _WITH_REFERENCE:
        raise InputError(f"reference goes with the methods {', '.join(_WITH_REFERENCE)}; got method={method!r}")
    name = None
    if isinstance(reference, Mapping) and len(reference) == 1 and "input_ids" not in reference:
        ((name, reference),) = reference.items()
    prompts = parsed_for(model, reference)
    return Reference(str(name) if name is not None else _fingerprint(prompts), prompts)


def _corrupted(model: Model, parsed: Prompts) -> Prompts:
    """The corrupted prompts, each as long as its clean one."""
    if parsed.corrupted is None or any(c is None for c in parsed.corrupted):
        raise InputError("reference='paired' needs prompts as a DataFrame with a `corrupted` text for every prompt; got none")
    pairs = parsed_for(model, list(parsed.corrupted))
    for i, (clean, other) in enumerate(zip(parsed.lengths, pairs.lengths, strict=True)):
        if clean != other:
            raise InputError(f"corrupted must have as many tokens as its prompt; got {other} for the {clean} of prompt {i}")
    return pairs


def _fingerprint(prompts: Prompts) -> str:
    """A name for prompts that have none: the same for the same tokens."""
    digest = hashlib.sha256(b"|".join(ids.tobytes() for ids in prompts.ids)).hexdigest()
    return f"{len(prompts)} prompt{'s' * (len(prompts) > 1)} ({digest[:8]})"


def replacement(
    model: Model,
    parsed: Prompts,
    method: str,
    reference: Reference,
    keys: Collection[Key],
    *,
    at: Sequence[np.ndarray] | None,
    n_samples: int,
    seed: int,
    min_count: int,
    max_tokens: int,
    tick: Tick,
) -> Replacement:
    """The replacement, the means over the reference taken; `tick` receives tokens of the reference as they are done."""
    if reference.paired:
        return Donors(model.module, model.anatomy, [[ids] for ids in reference.prompts.ids], paired=True)
    if method in ("remove", "zero", "gradient"):
        return Zero()
    if method == "resample":
        return Donors(model.module, model.anatomy, drawn(parsed.ids, reference.prompts.ids, n_samples, seed))
    mean = Mean(positional=method == "positional_mean")
    if mean.positional:
        _demand_counts(parsed, reference.prompts, at, min_count)
    elif int(reference.prompts.lengths.max()) < 2:
        raise InputError("reference must hold a prompt of two tokens or more: a mean leaves out first ones; got single tokens only")
    for batch in batched(model, reference.prompts, max_tokens):
        mean.add(model.module, model.anatomy, batch, keys)
        tick(batch.ids.numel())
    return mean


def _demand_counts(parsed: Prompts, reference: Prompts, at: Sequence[np.ndarray] | None, min_count: int) -> None:
    """Refuse positions of whose mean too little is known."""
    last = max(int(a.max()) for a in at) if at is not None else int(parsed.lengths.max()) - 1
    counts = (reference.lengths[:, None] > np.arange(last + 1)).sum(0)
    short = np.flatnonzero(counts < min_count)
    if len(short):
        raise InputError(
            f"reference must reach every changed position min_count={min_count} times; got {counts[short[0]]} at position {short[0]}"
        )
