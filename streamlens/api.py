"""The public calls: prompts in, a tidy table out. Each one parses, batches, measures and hands arrays to `frames`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import torch

from streamlens import frames
from streamlens.arguments import batched, chosen_layers, chosen_metrics, opened, parsed_for, several, watched
from streamlens.checks import CHECKS, check_printed, check_sums, demand_finite, demand_replayed
from streamlens.errors import InputError, choice
from streamlens.measure import ablation as removal
from streamlens.measure import attribution as dla
from streamlens.measure import growth
from streamlens.measure.metrics import TARGET_METRICS
from streamlens.measure.places import places_in
from streamlens.models.card import config_facts
from streamlens.models.loaded import Model, load
from streamlens.models.placement import placement_facts
from streamlens.models.verify import probe_ids
from streamlens.prompts import NO_READOUTS, readouts
from streamlens.prompts import positions as positions_of
from streamlens.prompts.plain import plain
from streamlens.stream.record import record_batch, resolve
from streamlens.stream.sites import SITES

__all__ = ["Model", "ablate", "attribute", "card", "load", "norms", "record"]

MAX_TOKENS = 2048
"""Tokens a batch, padding included, where a call does not say otherwise."""


def attribute(
    model: Model,
    prompts: object,
    target: object = None,
    versus: object = None,
    positions: object = None,
    *,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """Who wrote this logit? One row a component, whose `contribution`s sum to the model's own `logit`.

    `target` is a token (text or id), one a prompt, "next" or "top" (default); `versus` a token to subtract, or "mean".
    `positions` is "last" (default), "all" or indices over a prompt's own tokens. Contributions are in logits, exact on the
    untouched weights with the final norm's scale frozen; a head keeps its share of the value bias. See the design of the
    table in :data:`streamlens.schema.ATTRIBUTION`.

    `check`: True raises :class:`AdditivityError` where the sum misses the logit by more than the dtype's limit, "warn" warns,
    False does neither, "full" also compares every logit with what the model prints (a hook of yours on the unembedding is seen
    only there). Raises :class:`InputError` for bad input.

    Method: Elhage et al. 2021 (direct logit attribution), McGrath et al. 2023, eq. 7-10 (frozen norms).
    """
    opened(model)
    arguments = {"target": target, "versus": versus, "positions": positions, "max_tokens": max_tokens, "check": check}
    choice("check", check, CHECKS)
    parsed = parsed_for(model, prompts)
    wanted = readouts(parsed, model.tokenizer, target=target, versus=versus, positions=positions)
    shares = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "attribute"):
        chosen = wanted.take(np.isin(wanted.prompt, batch.index))
        if len(chosen):
            shares.append(dla.attribute_batch(model.module, model.anatomy, batch, chosen))
            check_sums(model, parsed, shares[-1], check)
            if check == "full":
                check_printed(model, parsed, batch, shares[-1])
    df = frames.attribution(shares, dla.components(model.anatomy), frames.Labels(model.tokenizer, parsed))
    return frames.stamp(df, model, arguments, additivity_error=max(float(s.error.max()) for s in shares))


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


def norms(
    model: Model,
    prompts: object,
    positions: object = None,
    *,
    measures: object = ("l2", "rms"),
    sites: object = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """How does the stream grow? One row a measure at one site of one layer at one position, in the stream's own units.

    `measures`: "l2" and "rms". `sites`, all that the model has by default: embed, resid_pre, attn_out, mixer_out, resid_mid, mlp_out,
    other_out, resid_post and final (the stream just before the final norm; layer n_layers). `positions` "all" by default; padding is
    never among them. Raises :class:`InputError`, and :class:`NumericError` where a value is not finite.
    """
    opened(model)
    arguments = {k: v for k, v in locals().items() if k not in ("model", "prompts", "progress")}
    choice("check", check, CHECKS)
    measures, sites = several("measures", measures, growth.MEASURES), several("sites", sites, SITES)
    parsed = parsed_for(model, prompts)
    where = positions_of(parsed, "all" if positions is None and parsed.positions is None else positions)
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "norms"):
        parts.append(growth.measure_batch(model.module, model.anatomy, batch, places_in(batch, where), sites, measures))
        demand_finite(model, "a norm", int((~np.isfinite(parts[-1].value)).sum()), check)
    return frames.stamp(frames.norms(parts, frames.Labels(model.tokenizer, parsed)), model, arguments)


def record(
    model: Model,
    prompts: object,
    sites: object,
    positions: object = None,
    *,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> dict[str, torch.Tensor]:
    """Raw tensors, for what no call answers: a dict from TransformerLens' name to a tensor `[prompt, pos, ...]` on the CPU.

    `sites`: resid_pre, attn_out, resid_mid, mlp_out, resid_post, embed, pos_embed; z `[.., head, d_head]`; q, k (as they enter
    the scores, rotated), v `[.., head, d_head]`, pattern `[.., head, source]`; post, the MLP's activation `[.., d_mlp]`; or full
    names ("blocks.3.attn.hook_z"). Only these are kept. `positions`, "all" by default, chooses along `pos` (for a pattern, the
    queries). Shorter prompts are padded with zeros on the right; "mask" `[prompt, pos]` is True at what is real, and
    "positions" `[prompt, pos]` holds the positions, -1 at padding. Raises :class:`InputError`.
    """
    opened(model)
    choice("check", check, CHECKS)
    chosen = resolve(model.anatomy, plain(sites) if isinstance(plain(sites), list) else [sites])
    parsed = parsed_for(model, prompts)
    where = positions_of(parsed, "all" if positions is None and parsed.positions is None else positions)
    pieces: list[dict[str, torch.Tensor]] = [{} for _ in where]
    for batch in watched(batched(model, parsed, max_tokens), progress, "record"):
        for name, value in record_batch(model.module, model.anatomy, batch, chosen).items():
            demand_finite(model, name, int((~torch.isfinite(value[batch.mask])).sum()), check)
            for row, prompt in enumerate(batch.index):
                tensor = value[row, torch.from_numpy(where[prompt])]
                is_pattern = chosen[name] == "pattern"
                pieces[prompt][name] = tensor[..., : parsed.lengths[prompt]] if is_pattern else tensor
    out = {name: _padded([p[name] for p in pieces]) for name in sorted(chosen, key=_by_layer)}
    at = _padded([torch.from_numpy(w) + 1 for w in where]) - 1
    return out | {"positions": at, "mask": at >= 0}


def _padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of unequal shape as one, zeros behind the shorter ones along every axis."""
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    out = tensors[0].new_zeros(len(tensors), *shape)
    for row, tensor in zip(out, tensors, strict=True):
        row[tuple(slice(n) for n in tensor.shape)] = tensor
    return out


def _by_layer(name: str) -> tuple[int, str]:
    parts = name.split(".")
    return (int(parts[1]) if parts[0] == "blocks" else -1, name)


def card(model: Model) -> pd.DataFrame:
    """The architecture as one row, one column a fact: sizes, positions, norms, experts, multipliers, parameters and costs.

    Counts are checked against the real parameters; norm placement, multipliers and the logit softcap are what the proof at
    load saw, not what the config or the family's name says. 0 stands for an absent number, "none" for an absent kind, nan
    for an absent softcap (and for a multiplier that is not one number).
    """
    opened(model)
    facts = config_facts(model.module, Counter(layer.path for layer in model.anatomy.layers))
    facts["n_layers"] = model.n_layers
    facts |= placement_facts(model.module, model.anatomy, probe_ids(model.module))
    return frames.stamp(frames.card(model.name, facts), model, {})
