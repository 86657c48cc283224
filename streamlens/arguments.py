"""What a call was given, read once: models, prompts, layers, metrics. Bad input gets one line that names the parameter."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from tqdm import tqdm

from streamlens.errors import InputError, UnsupportedModelError, choice
from streamlens.measure.metrics import DEFAULT, METRICS, Metric
from streamlens.models.loaded import Model
from streamlens.prompts import Prompts, TokenBatch, batches, parse
from streamlens.prompts import positions as positions_of
from streamlens.prompts.plain import is_index, plain

CHECKS = (True, False, "warn", "full")
"""Raise where a check fails, do not check, warn, or check also what costs another forward pass."""

MAX_TOKENS = 2048
"""Tokens a batch, padding included, where a call does not say otherwise."""


def chosen_metrics(metrics: object) -> tuple[Metric, ...]:
    """Metrics by name or as functions, each once; the usual ones for None."""
    given = DEFAULT if metrics is None else tuple(metrics) if isinstance(metrics, (list, tuple, set, frozenset)) else (metrics,)
    if not given:
        raise InputError(f"metrics must name at least one of {', '.join(METRICS)}; got none")
    names: dict[str, Metric] = {}
    for one in given:
        if not callable(one):
            choice("metrics", one, METRICS)
        name = getattr(one, "__name__", one)
        if not isinstance(name, str) or names.setdefault(name, one) != one or (callable(one) and name in METRICS):
            raise InputError(f"metrics as functions must each have a name of their own; got {name!r}")
    return tuple(names.values())


def chosen_layers(model: Model, layers: object) -> tuple[int, ...]:
    """Layers by index, all of them for None, each once and in order."""
    if layers is None:
        return tuple(range(model.n_layers))
    given = plain(layers)
    given = given if isinstance(given, list) else [given]
    for layer in given:
        if not is_index(layer) or not 0 <= layer < model.n_layers:
            raise InputError(f"layers must be indices from 0 to {model.n_layers - 1}; got {layer!r}")
    if not given:
        raise InputError("layers must name at least one layer; got none")
    return tuple(sorted({int(layer) for layer in given}))


def several(parameter: str, value: object, legal: Collection[str]) -> tuple[str, ...]:
    """One or several of the legal words, all of them for None, each once."""
    given = tuple(legal) if value is None else tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    for one in given:
        choice(parameter, one, legal)
    if not given:
        raise InputError(f"{parameter} must name at least one of {', '.join(legal)}; got none")
    return tuple(dict.fromkeys(given))


def arguments_of(given: Mapping[str, object], whole_blocks: bool = False) -> dict[str, object]:
    """A call's arguments, from its `locals()`, as they stand in a table's attributes: without what changes no number.

    Those that every call has are checked: raises :class:`InputError` for a model that is not from :func:`load` and for another `check`,
    and what :func:`opened` raises.
    """
    opened(given["model"], whole_blocks)
    choice("check", given["check"], CHECKS)
    return {name: value for name, value in given.items() if name not in ("model", "prompts", "progress", "resume")}


def opened(model: object, whole_blocks: bool = False) -> None:
    """Raise :class:`InputError` for what did not come from :func:`load`: a module whose stream nobody has proven.

    Raises :class:`UnsupportedModelError` for a model of several vectors a token, unless the call needs `whole_blocks` only.
    """
    if not isinstance(model, Model):
        raise InputError(f"model must come from sl.load(...); got {type(model).__name__}")
    if not whole_blocks:
        demand_one_stream(model)


def demand_one_stream(model: Model) -> None:
    """Refuse what reads or changes single writes of a stream in which they have no place of their own."""
    if model.anatomy.n_streams > 1:
        raise UnsupportedModelError(
            f"{model.name} keeps {model.anatomy.n_streams} vectors a token and mixes them by coefficients that the data make, so what a "
            "sublayer writes has no place of its own: only whole blocks can be changed (sl.ablate with unit='block' and method='remove', "
            "sl.prune in greedy, random or your own order, sl.rearrange)"
        )


def parsed_for(model: Model, prompts: object) -> Prompts:
    """The prompts, within what this model can read."""
    return parse(prompts, model.tokenizer, max_length=model.max_length, vocab_size=model.anatomy.n_vocab)


def positions_or_all(parsed: Prompts, positions: object) -> list[np.ndarray]:
    """Where to read, each prompt's positions: as the call or the prompts say, everywhere where neither does."""
    return positions_of(parsed, "all" if positions is None and parsed.positions is None else positions)


def batched(model: Model, prompts: Prompts, max_tokens: int) -> list[TokenBatch]:
    """The prompts in batches of at most `max_tokens`, of one length each where the model's positions depend on the longest."""
    return batches(prompts, max_tokens, equal_length=model.equal_lengths)


def watched(items: list, progress: bool, title: str, unit: str = "batch") -> Iterable:
    """The items, with a progress bar on stderr where it is wanted."""
    return tqdm(items, desc=title, unit=unit, disable=not progress, mininterval=bar_interval())


def bar_interval() -> float:
    """Seconds between drawings of a progress bar: few where somebody watches, many in a log, which keeps every drawing."""
    return 0.1 if sys.stderr.isatty() or "ipykernel" in sys.modules else 30.0
