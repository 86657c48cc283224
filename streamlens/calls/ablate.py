"""What breaks without a layer: `sl.ablate`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, batched, chosen_layers, chosen_metrics, opened, parsed_for, watched
from streamlens.checks import CHECKS, demand_finite, demand_replayed
from streamlens.errors import InputError, choice
from streamlens.measure import ablation as removal
from streamlens.measure.metrics import TARGET_METRICS
from streamlens.measure.places import places_in
from streamlens.models.loaded import Model
from streamlens.prompts import NO_READOUTS, readouts
from streamlens.prompts import positions as positions_of


def ablate(
    model: Model,
    prompts: object,
    unit: str = "block",
    method: str = "remove",
    *,
    layers: object = None,
    target: object = None,
    versus: object = None,
    positions: object = None,
    metrics: object = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """What breaks without this layer? One row a metric, prompt, position and removed layer: `clean`, `ablated`, `delta` = ablated - clean.

    `unit` "block" hands on a block's input as its output; "attn" and "mlp" set to zero what the sublayer adds (after its
    branch norm, multiplier and biases); a norm on the stream itself still acts, but for a block. Everything after is recomputed.
    `layers`: which, all by default.
    `positions`: where metrics are read, "all" by default with `target` "next", "last" where a target is given.

    `metrics`, all that have their inputs by default: loss (-log p of the prompt's own next token, nats), kl (clean || ablated, nats),
    top1_agree; target_logit and logit_diff (logits), target_rank (tokens strictly above the target). `check="full"` compares one
    replay a batch with a plainly hooked pass. Raises :class:`InputError`, and :class:`NumericError` where a value is not finite.

    Sources: Veit et al. 2016 and Men et al. 2024 (block removal); the README says more on `remove`.
    """
    opened(model)
    arguments = {k: v for k, v in locals().items() if k not in ("model", "prompts", "progress")}
    choice("unit", unit, removal.UNITS)
    choice("method", method, ("remove",))
    choice("check", check, CHECKS)
    wanted = chosen_metrics(metrics)
    parsed = parsed_for(model, prompts)
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
    changes = removal.variants(model.anatomy, unit, chosen_layers(model, layers))
    if not changes:
        raise InputError(f"unit={unit!r}: none of the chosen layers of {model.name} has one")
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, f"remove {unit}"):
        chosen = rows.take(np.isin(rows.prompt, batch.index))
        parts.append(removal.remove_batch(model.module, model.anatomy, batch, changes, places_in(batch, where), chosen, wanted))
        demand_finite(model, f"the stream, whole or without one {unit},", parts[-1].overflowed, check)
        if check == "full":
            demand_replayed(model, batch, changes)
    if all(np.isnan(clean).all() for p in parts for clean, _ in (*p.at_position.values(), *p.at_target.values())):
        raise InputError(
            f"metrics={list(wanted)} have no inputs at the positions that are read: loss needs a next token, logit_diff a versus"
        )
    df = frames.ablation(parts, changes, unit, method, frames.Labels(model.tokenizer, parsed))
    return frames.stamp(df, model, arguments)
