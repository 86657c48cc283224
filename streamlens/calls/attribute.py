"""Who wrote this logit: `sl.attribute`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, batched, parsed_for, watched
from streamlens.checks import check_printed, check_sums
from streamlens.errors import InputError, choice
from streamlens.measure import attribution as dla
from streamlens.measure.experts import ByExpert
from streamlens.measure.neurons import ByNeuron
from streamlens.measure.sources import BySource, ByToken
from streamlens.measure.splits import KEPT, Split
from streamlens.models.loaded import Model
from streamlens.prompts import NONE, Prompts, Readouts, readouts
from streamlens.prompts.plain import is_index
from streamlens.stream.unembed import SCALES


def attribute(
    model: Model,
    prompts: object,
    target: object = None,
    versus: object = None,
    positions: object = None,
    *,
    by: str | None = None,
    top_k: int | None = 10,
    scale: str = "logit",
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """Who wrote this logit? One row a component, whose `contribution`s sum to the model's own `logit`.

    `prompts`, here and in every call: a text, a list of texts, token ids (a tensor, an array, lists), chat messages, or a DataFrame with
    `prompt` and, as wanted, `target`, `versus`, `position`; its other columns come along into the result.

    `target` is a token (text or id), "next", "top" (default) or "top5" and the like; `versus` a token to subtract, or "mean" over the
    vocabulary. Either is one for all prompts or a list with one a prompt; several a prompt are a list for a single prompt, a list of
    lists for several, and pair up where both are several. A token that is both named and among the likeliest has its rows once, and
    one of several likeliest that is its own `versus` has none.

    `positions` is "last" (default), "all" or indices over a prompt's own tokens. Contributions are in logits, exact on the
    untouched weights with the final norm's scale frozen; a head keeps its share of the value bias. See the design of the
    table in :data:`streamlens.schema.ATTRIBUTION`.

    `by` puts finer rows in the place of some, under the same sum rule. "neuron": of each MLP and at each readout the `top_k`
    neurons with the largest shares (None: all of them), the rest as one row, and the output bias; mixtures of experts keep their row.
    "expert": of each mixture the experts that the token was routed to, and the shared ones. "source": of each head the positions that
    it reads, with the attention weight beside each. "token": the same summed over all heads, so that one row (component "head",
    layer -1) says what an input token wrote through all heads directly; all other rows stay. "source" at all positions of a long
    prompt is a table of heads times the square of its length.

    `scale="logprob"` linearises the softmax (and a cap) at the clean run, in nats: a row is what its component's write does to the log
    of the target's probability to first order, its direction W_U[target] less the mean of W_U under p. Rows do not sum to the
    log-probability but to `logit`: here the log-probability (a column of its own) plus the entropy of p, by how much the target is
    likelier than a token drawn from the model on average. `versus` must be None: of a difference, the softmax cancels.

    `check`: True raises :class:`AdditivityError` where the sum misses the logit by more than the dtype's limit, "warn" warns,
    False does neither, "full" also compares every logit with what the model prints (a hook of yours on the unembedding is seen
    only there). Raises :class:`InputError` for bad input and :class:`UnsupportedModelError` where the model has nothing that `by` splits.

    Method: Elhage et al. 2021 (direct logit attribution), McGrath et al. 2023, eq. 7-10 (frozen norms).
    """
    arguments = arguments_of(locals())
    choice("scale", scale, SCALES)
    split = _split(model, by, top_k)
    parsed = parsed_for(model, prompts)
    wanted = readouts(parsed, model.tokenizer, target=target, versus=versus, positions=positions)
    if scale == "logprob" and (wanted.versus != NONE).any():
        raise InputError("versus must be None with scale='logprob': a difference of log-probabilities is the difference of logits")
    shares = []
    for batch in watched(batched(model, parsed, _tokens(max_tokens, split, wanted, parsed)), progress, "attribute"):
        chosen = wanted.take(np.isin(wanted.prompt, batch.index))
        if len(chosen):
            shares.append(dla.attribute_batch(model.module, model.anatomy, batch, chosen, split, scale))
            check_sums(model, parsed, shares[-1], check)
            if check == "full":
                check_printed(model, parsed, batch, shares[-1])
    df = frames.attribution(shares, shares[0].components, frames.Labels(model.tokenizer, parsed), split and split.column)
    return frames.stamp(df, model, arguments, additivity_error=max(float(s.error.max()) for s in shares))


def _split(model: Model, by: str | None, top_k: int | None) -> Split | None:
    """What takes some rows apart. Raises :class:`InputError` for an unknown `by` or a `top_k` that is no number of rows."""
    choice("by", by, (None, *_SPLITS))
    if top_k is not None and not (is_index(top_k) and top_k > 0):
        raise InputError(f"top_k must be a whole number above 0, or None for all; got {top_k!r}")
    return None if by is None else _SPLITS[by](model.module, model.anatomy, None if top_k is None else int(top_k))


def _tokens(max_tokens: int, split: Split | None, wanted: Readouts, parsed: Prompts) -> int:
    """Tokens a batch: no more than asked for, and no more than the split may keep of them (one prompt at least)."""
    if split is None or not split.kept:
        return max_tokens
    read = min(1.0, len(wanted) / sum(parsed.lengths))
    return min(max_tokens, max(1, int(KEPT / (split.kept * read))))


_SPLITS: dict[str, Callable[..., Split]] = {"neuron": ByNeuron, "expert": ByExpert, "source": BySource, "token": ByToken}
