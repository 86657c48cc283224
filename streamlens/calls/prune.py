"""What is lost as blocks go, one after the other: `sl.prune`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, demand_one_stream, parsed_for
from streamlens.calls.reading import Reading, bar, demand_inputs, reading
from streamlens.checks import demand_finite
from streamlens.errors import InputError, choice, whole
from streamlens.measure import pruning
from streamlens.measure import similarity as alike
from streamlens.measure.ablation import Plan, Removal, Tick, sweep_batch
from streamlens.measure.places import places_in
from streamlens.measure.pruning import Step
from streamlens.models.loaded import Model
from streamlens.prompts.plain import is_index

ORDERS = ("greedy", "shortgpt", "angular", "random")
COSTS = ("loss", "kl", "js")


def prune(
    model: Model,
    prompts: object,
    order: object = "greedy",
    *,
    steps: int | None = None,
    cost: str = "loss",
    n_samples: int = 1,
    seed: int = 0,
    target: object = None,
    versus: object = None,
    positions: object = None,
    metrics: object = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """What is lost as blocks go? The rows of :func:`ablate`, with `n_removed` blocks gone, `layer` the one that went last.

    `order`, one or several: "greedy" (each step removes the block whose removal raises `cost` least now: loss, kl or js, over the
    positions that are read), "shortgpt" (least block influence first, over all tokens but the first), "angular" (for each number the run
    of blocks, from `layer` on and `span` long, whose ends are least apart at the last token), "random" (`n_samples` orders drawn with
    `seed`), or {name: list of layers}. `method` names it. `steps`: how many blocks go, all but one by default. Targets, positions and
    metrics as for :func:`ablate`. Raises :class:`InputError`, :class:`NumericError` where a value is not finite, and
    :class:`UnsupportedModelError` for "shortgpt" and "angular" of a model of several vectors a token.

    Sources: Men et al. 2024 (ShortGPT), Gromov et al. 2024 (angular).
    """
    arguments = arguments_of(locals(), whole_blocks=True)
    orders = orders_to_prune(model, arguments)
    read = reading(model, parsed_for(model, prompts), target, versus, positions, metrics, max_tokens)
    found: list[tuple[str, Step]] = []
    with bar(size_of(orders, model.n_layers, n_samples, seed)[1], progress, "prune") as tick:
        for name, (layers, n) in orders.items():
            found += [(name, step) for step in _steps(model, read, name, layers, n, cost, n_samples, seed, max_tokens, tick)]
        parts = _sweep(model, read, [step for _, step in found], read.wanted, max_tokens, tick)
    demand_finite(model, "the stream of a pruned model", sum(p.overflowed for p in parts), check)
    demand_inputs(read.wanted, parts)
    columns = {"unit": ["block"] * len(found), "method": [name for name, _ in found]}
    columns |= {name: [getattr(step, name) for _, step in found] for name in ("layer", "span")}
    columns["n_removed"] = [len(step.removed) for _, step in found]
    if orders.get("random", ([], 0))[0] is None:
        columns |= {"sample": [step.sample for _, step in found], "seed": [seed if step.sample >= 0 else -1 for _, step in found]}
    return frames.stamp(frames.ablation(parts, frames.Labels(model.tokenizer, read.prompts), columns), model, arguments)


def orders_to_prune(model: Model, given: Mapping[str, object]) -> dict[str, tuple[list[int] | None, int]]:
    """Of each order by name its layers, None where they are still to be found, and how many blocks go; checked with all that it needs."""
    choice("cost", given["cost"], COSTS)
    whole("n_samples", given["n_samples"], 1)
    whole("seed", given["seed"], 0)
    steps, last = given["steps"], model.n_layers - 1
    if steps is not None and not (is_index(steps) and 1 <= steps <= last):
        raise InputError(f"steps must be a number of blocks from 1 to {last}; got {steps!r}")
    out = {}
    for name, layers in _named(model, given["order"]).items():
        n = (last if layers is None else min(len(layers), last)) if steps is None else steps
        if layers is None and name in ("shortgpt", "angular"):
            demand_one_stream(model)
        if layers is not None and len(layers) < n:
            raise InputError(f"order {name!r} must name steps={n} blocks or more; got {len(layers)}")
        out[name] = layers, n
    return out


def size_of(orders: Mapping[str, tuple[list[int] | None, int]], n_layers: int, n_samples: int, seed: int) -> tuple[int, float]:
    """How many sets of blocks are measured, and the forward passes that all of it takes: at most, where the order is to be found."""
    variants, passes = 0, 1.0
    for name, (layers, steps) in orders.items():
        if layers is not None or name == "random":
            known = pruning.random_order(n_layers, steps, n_samples, seed) if layers is None else pruning.in_order(layers, steps)
            variants += len(known)
            passes += sum(n_layers - min(step.removed) - len(step.removed) for step in known) / n_layers
            continue
        left = [n_layers - s for s in range(steps + 1)]
        variants += steps
        passes += sum(left[1:]) / n_layers
        if name == "greedy":  # of the first step it is known that a block's removal starts at that block
            passes += steps + (n_layers - 1) / 2 + sum(n * (n - 1) for n in left[1:-1]) / n_layers
        else:
            passes += 1
    return variants, passes


def _named(model: Model, order: object) -> dict[str, list[int] | None]:
    """Orders by name; None for one that is still to be found."""
    if isinstance(order, Mapping):
        for name, layers in order.items():
            legal = isinstance(layers, (list, tuple, range)) and len(set(layers)) == len(layers) > 0
            if not legal or not all(is_index(i) and 0 <= i < model.n_layers for i in layers):
                raise InputError(f"order {name!r} must be a list of different layers from 0 to {model.n_layers - 1}; got {layers!r}")
        out: dict[str, list[int] | None] = {str(name): list(layers) for name, layers in order.items()}
    else:
        out = dict.fromkeys(order if isinstance(order, (list, tuple)) else [order])
        for name in out:
            choice("order", name, ORDERS)
    if not out:
        raise InputError("order must name at least one; got none")
    return out


def _steps(
    model: Model,
    read: Reading,
    name: str,
    layers: list[int] | None,
    steps: int,
    cost: str,
    n_samples: int,
    seed: int,
    max_tokens: int,
    tick: Tick,
) -> list[Step]:
    n = model.n_layers
    if layers is not None:
        return pruning.in_order(layers, steps)
    if name == "random":
        return pruning.random_order(n, steps, n_samples, seed)
    if name == "greedy":
        return pruning.greedy(n, steps, lambda sets: _costs(model, read, sets, cost, max_tokens, tick))
    if name == "shortgpt":
        influence = _distances(model, read, "block_influence", tick)
        return pruning.in_order(sorted(range(n), key=lambda layer: influence[layer, layer + 1]), steps)
    return pruning.alike_runs(_distances(model, read, "angular_distance", tick), n, steps)


def _costs(model: Model, read: Reading, sets: list[tuple[int, ...]], cost: str, max_tokens: int, tick: Tick) -> np.ndarray:
    """Mean over prompts of the mean over positions."""
    parts = _sweep(model, read, [Step(removed, removed[-1]) for removed in sets], (cost,), max_tokens, tick)
    values = np.concatenate([p.at_position[cost][1] for p in parts], axis=1)
    prompt = np.concatenate([p.prompt for p in parts])
    there = ~np.isnan(values[0])
    if not there.any():
        raise InputError(f"cost={cost!r} has no inputs at the positions that are read")
    return np.mean([values[:, there & (prompt == i)].mean(1) for i in np.unique(prompt[there])], axis=0)


def _sweep(model: Model, read: Reading, steps: list[Step], wanted: tuple, max_tokens: int, tick: Tick) -> list[Removal]:
    plan = Plan(tuple(s.variant(model.anatomy) for s in steps), wanted, max_tokens=max_tokens, n_layers=model.n_layers)
    return [sweep_batch(model.module, model.anatomy, batch, plan, *read.of(batch), read.shared(batch, tick)) for batch in read.batches]


def _distances(model: Model, read: Reading, measure: str, tick: Tick) -> dict[tuple[int, int], float]:
    """Means over prompts, by (layer, layer_to): of last tokens for angles, else of all but first ones."""
    last = measure == "angular_distance"
    where = [np.array([n - 1]) if last or n == 1 else np.arange(1, n) for n in read.prompts.lengths]
    parts = []
    for batch in read.batches:
        parts.append(alike.measure_batch(model.module, model.anatomy, batch, places_in(batch, where), (measure,)))
        read.shared(batch, tick)(1.0)
    values, prompt = np.concatenate([p.value for p in parts]), np.concatenate([p.prompt for p in parts])
    means = np.mean([values[prompt == i].mean(0) for i in np.unique(prompt)], axis=0)
    return {(layer, layer_to): float(mean) for (_, layer, layer_to), mean in zip(parts[0].pairs, means, strict=True)}
