"""What other orders of the blocks do: `sl.rearrange`."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, parsed_for
from streamlens.calls.reading import bar, demand_inputs, reading
from streamlens.checks import demand_finite
from streamlens.errors import InputError
from streamlens.measure.rearrange import cost, rearrange_batch
from streamlens.models.loaded import Model
from streamlens.prompts.plain import is_index
from streamlens.stream.rearranged import Order


def rearrange(
    model: Model,
    prompts: object,
    order: object,
    *,
    target: object = None,
    versus: object = None,
    positions: object = None,
    metrics: object = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """What if the blocks ran in another order? The rows of :func:`ablate`, with `blocks` naming the order and method "rearrange".

    `order` is a list of block indices to run: left out = removed, twice = repeated, an inner tuple = in parallel (the mean of their
    outputs); or {name: list} for several. :mod:`streamlens.orders` makes those of the literature. Each block keeps its own mask and
    positions. Targets, positions and metrics as for :func:`ablate`. Raises :class:`InputError`, :class:`UnsupportedModelError` for a
    family whose blocks do not simply follow one another, and :class:`NumericError` where a value is not finite.

    Sources: Veit et al. 2016, Lad et al. 2024, Sun et al. 2024 (Transformer Layers as Painters).
    """
    arguments = arguments_of(locals(), whole_blocks=True)
    orders = orders_of(model, order)
    read = reading(model, parsed_for(model, prompts), target, versus, positions, metrics, max_tokens)
    parts = []
    with bar(1 + sum(cost(o, model.n_layers) for o in orders.values()), progress, "rearrange") as tick:
        for batch in read.batches:
            of_batch = (*read.of(batch), read.wanted, read.shared(batch, tick))
            parts.append(rearrange_batch(model.module, model.anatomy, batch, list(orders.values()), *of_batch))
            demand_finite(model, "the stream, in its own or another order,", parts[-1].overflowed, check)
    demand_inputs(read.wanted, parts)
    n = len(orders)
    columns = {"unit": ["block"] * n, "method": ["rearrange"] * n, "layer": [-1] * n, "blocks": list(orders)}
    return frames.stamp(frames.ablation(parts, frames.Labels(model.tokenizer, read.prompts), columns), model, arguments)


def orders_of(model: Model, order: object) -> dict[str, Order]:
    """Orders by name, checked; one without a name is called what it is."""
    named = order if isinstance(order, Mapping) else {None: order}
    out: dict[str, Order] = {}
    for name, one in named.items():
        if not isinstance(one, (list, tuple, range)) or not len(one):
            raise InputError(f"order must be a list of block indices and tuples of them, or {{name: list}}; got {one!r}")
        items = [tuple(item) if isinstance(item, (list, tuple)) else item for item in one]
        for layer in (i for item in items for i in (item if isinstance(item, tuple) else (item,))):
            if not is_index(layer) or not 0 <= layer < model.n_layers:
                raise InputError(f"order must hold block indices from 0 to {model.n_layers - 1}; got {layer!r}")
        if () in items:
            raise InputError("order must name at least one block in an inner tuple; got none")
        out[_text(items) if name is None else str(name)] = items
    if not out:
        raise InputError("order must name at least one order; got none")
    return out


def _text(items: list) -> str:
    return " ".join("(" + " ".join(map(str, item)) + ")" if isinstance(item, tuple) else str(item) for item in items)
