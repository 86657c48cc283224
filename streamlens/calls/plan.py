"""What a sweep will take, before anything runs: `sl.plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from streamlens.arguments import opened, parsed_for
from streamlens.calls.ablate import ablate
from streamlens.calls.prune import orders_to_prune, prune, size_of
from streamlens.calls.reading import Reading, reading
from streamlens.calls.rearrange import orders_of, rearrange
from streamlens.calls.sweep import prepare
from streamlens.errors import InputError
from streamlens.measure.ablation import KEPT_ELEMENTS
from streamlens.measure.metrics import POSITION_METRICS, Metric
from streamlens.measure.readings import TOGETHER
from streamlens.measure.rearrange import cost
from streamlens.models.loaded import Model
from streamlens.prompts import NONE
from streamlens.stream.unembed import CHUNK_ELEMENTS, CHUNK_ROWS

_NUMBER = 8
"""Bytes of a kept number, before Parquet packs it."""


def plan(call: Callable, model: Model, prompts: object, **arguments: object) -> pd.DataFrame:
    """What would this sweep take? One row: `rows` of the table, `forward_passes` over all prompts, `memory` and `disk` in bytes.

    `call` is `sl.ablate`, `sl.rearrange` or `sl.prune`, with the arguments that it would get; they are checked as it checks them and
    nothing runs. Progress bars count in the same forward passes (a gradient's backward passes count as one each; a pruning whose order
    is still to be found may take fewer). `memory` estimates
    what the largest batch needs beside the weights: kept streams, one pass, and logits; `disk` what `resume` would keep, at most.
    A target "top2" or more that repeats another makes fewer rows. Raises :class:`InputError`.
    """
    opened(model, whole_blocks=True)
    planner = {ablate: _ablation, rearrange: _rearrangement, prune: _pruning}.get(call)
    if planner is None:
        raise InputError(f"call must be sl.ablate, sl.rearrange or sl.prune; got {getattr(call, '__name__', call)!r}")
    try:
        bound = inspect.signature(call).bind(model, prompts, **arguments)
    except TypeError as error:
        raise InputError(f"arguments do not fit sl.{call.__name__}: {error}") from error
    bound.apply_defaults()
    given = bound.arguments
    n_variants, rows, passes, read, resume = planner(model, prompts, given)
    numbers = (n_variants + 1) * rows / max(n_variants, 1)
    return pd.DataFrame(
        {
            "call": [call.__name__],
            "variants": [n_variants],
            "rows": [int(rows)],
            "forward_passes": [float(passes)],
            "memory": [_memory(model, read, n_variants)],
            "disk": [int(numbers * _NUMBER) if resume is not None else 0],
        }
    )


def _ablation(model: Model, prompts: object, given: Mapping[str, object]) -> tuple[int, int, float, Reading, object]:
    sweep = prepare(model, prompts, given)
    made = np.array([[c.at < n for c in sweep.plan.changes] for n in sweep.reading.prompts.lengths]).sum(1)
    return len(sweep.plan.changes), int((made * _read(sweep.reading)).sum()), sweep.passes, sweep.reading, given["resume"]


def _rearrangement(model: Model, prompts: object, given: Mapping[str, object]) -> tuple[int, int, float, Reading, object]:
    orders, read = orders_of(model, given["order"]), _reading(model, prompts, given)
    passes = 1 + sum(cost(order, model.n_layers) for order in orders.values())
    return len(orders), len(orders) * int(_read(read).sum()), passes, read, None


def _pruning(model: Model, prompts: object, given: Mapping[str, object]) -> tuple[int, int, float, Reading, object]:
    orders, read = orders_to_prune(model, given), _reading(model, prompts, given)
    variants, passes = size_of(orders, model.n_layers, given["n_samples"], given["seed"])
    return variants, variants * int(_read(read).sum()), passes, read, None


def _reading(model: Model, prompts: object, given: Mapping[str, object]) -> Reading:
    names = ("target", "versus", "positions", "metrics", "max_tokens")
    return reading(model, parsed_for(model, prompts), *(given[name] for name in names))


def _read(read: Reading) -> np.ndarray:
    """Rows of each prompt under one change."""
    total = np.zeros(len(read.prompts), dtype=np.int64)
    for metric in read.wanted:
        total += _rows(read, metric)
    return total


def _rows(read: Reading, metric: Metric) -> np.ndarray:
    if metric == "loss":
        return np.array([(w < n - 1).sum() for w, n in zip(read.where, read.prompts.lengths, strict=True)])
    if callable(metric) or metric in POSITION_METRICS:
        return np.array([len(w) for w in read.where])
    prompt = read.rows.prompt if metric != "logit_diff" else read.rows.prompt[read.rows.versus != NONE]
    return np.bincount(prompt, minlength=len(read.prompts))


def _memory(model: Model, read: Reading, n_variants: int) -> int:
    """Bytes of kept streams, unembedding inputs, one pass's activations and logits."""
    anatomy, item = model.anatomy, model.dtype.itemsize
    tokens = max(b.ids.numel() for b in read.batches)
    kept = anatomy.n_layers * tokens * anatomy.d_model * anatomy.n_streams
    rows = max(sum(len(read.where[i]) for i in b.index) for b in read.batches)
    hidden = min(n_variants * rows * anatomy.d_model, KEPT_ELEMENTS)
    down = [model.module.get_submodule(w.down).weight.numel() // anatomy.d_model for _, w in anatomy.writes() if w.kind == "mlp" and w.down]
    wide = 6 * anatomy.d_model + 3 * max(down, default=4 * anatomy.d_model)
    chunk = min(max(CHUNK_ELEMENTS, CHUNK_ROWS * anatomy.n_vocab), n_variants * rows * anatomy.n_vocab)
    logits = chunk + 3 * chunk // min(n_variants, TOGETHER)  # changed ones, and for fewer rows clean ones, probabilities and room
    return int((kept + hidden + tokens * wide) * item + logits * max(item, 4))
