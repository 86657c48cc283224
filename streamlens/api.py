"""The public calls: prompts in, a tidy table out. Each one parses, batches, measures and hands arrays to `frames`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import pandas as pd
from tqdm import tqdm

from streamlens import frames
from streamlens.errors import AdditivityError, InputError, choice
from streamlens.measure import attribution as dla
from streamlens.models.loaded import Model, load
from streamlens.prompts import MEAN, Prompts, batches, parse, readouts

__all__ = ["Model", "attribute", "load"]

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
    False does neither, "full" also compares every logit with what the model prints. Raises :class:`InputError` for bad input.

    Method: Elhage et al. 2021 (direct logit attribution), McGrath et al. 2023, eq. 7-10 (frozen norms).
    """
    arguments = {"target": target, "versus": versus, "positions": positions, "max_tokens": max_tokens, "check": check}
    choice("check", check, (True, False, "warn", "full"))
    parsed = parsed_for(model, prompts)
    wanted = readouts(parsed, model.tokenizer, target=target, versus=versus, positions=positions)
    if model.anatomy.logits.cap is not None and (wanted.versus == MEAN).any():
        raise InputError("versus='mean' needs logits without a softcap, which this model has; give a token, or None")
    shares = []
    for batch in watched(batches(parsed, max_tokens), progress, "attribute"):
        chosen = wanted.take(np.isin(wanted.prompt, batch.index))
        if len(chosen):
            shares.append(dla.attribute_batch(model.module, model.anatomy, batch, chosen))
            check_sums(model, parsed, shares[-1], check)
    df = frames.attribution(shares, dla.components(model.anatomy), frames.Labels(model.tokenizer, parsed))
    return frames.stamp(df, model, arguments, additivity_error=max(float(s.error.max()) for s in shares))


def parsed_for(model: Model, prompts: object) -> Prompts:
    """The prompts, within what this model can read."""
    return parse(prompts, model.tokenizer, max_length=model.max_length, vocab_size=model.anatomy.n_vocab)


def watched(items: list, progress: bool, title: str) -> Iterable:
    """The items, with a progress bar on stderr where it is wanted."""
    return tqdm(items, desc=title, unit="batch", disable=not progress)


def check_sums(model: Model, prompts: Prompts, shares: dla.Shares, check: bool | str) -> None:
    """The sum rule, at every row of a batch."""
    limit = dla.LIMITS[model.dtype]
    worst = int(np.nan_to_num(shares.error, nan=np.inf).argmax())
    error = float(shares.error[worst])
    if error <= limit or check is False:
        return
    prompt, position = int(shares.readouts.prompt[worst]), int(shares.readouts.position[worst])
    message = (
        f"{model.name}: contributions miss the logit by {error:.2g} of sum|parts| (limit {limit:.0e}) "
        f"at position {position} of prompt {prompt} ({prompts.texts[prompt][:60]!r})"
    )
    if check == "warn":
        warnings.warn(message, stacklevel=3)
    else:
        raise AdditivityError(message)
