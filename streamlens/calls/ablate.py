"""What breaks without a part of the model: `sl.ablate`."""

from __future__ import annotations

import os

import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of
from streamlens.calls.reading import bar, demand_inputs
from streamlens.calls.running import run
from streamlens.calls.sweep import prepare
from streamlens.checks import demand_finite, demand_replayed
from streamlens.models.loaded import Model


def ablate(
    model: Model,
    prompts: object,
    unit: str = "block",
    method: str = "remove",
    *,
    layers: object = None,
    heads: object = None,
    span: object = 1,
    at: object = None,
    reference: object = None,
    n_samples: int = 1,
    seed: int = 0,
    min_count: int = 2,
    target: object = None,
    versus: object = None,
    positions: object = None,
    metrics: object = None,
    keep: object = None,
    resume: str | os.PathLike | None = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """What breaks without this part? One row a metric, prompt, position and change: `clean`, `ablated`, `delta` = ablated - clean.

    `unit`: "block", "attn", "mlp" or "mixer" (what each adds to the stream, after its branch norm, multiplier and biases; a norm on the
    stream itself still acts, but for a block), "head" (its z, before the output projection and the branch norm, whose biases stay),
    "expert" (its routed output). Everything after is recomputed. `layers`, `heads` (indices, or (layer, head) pairs): which, each
    alone, all by default; {name: which} changes each named set `together` (a circuit). `span`: so many neighbouring blocks at once, a
    list of such numbers, or "all" for every (start, length).

    `method`: "remove" or "zero"; "mean" over all tokens but the first of the `reference` prompts, "positional_mean" by position (at least
    `min_count` tokens each), "resample" from `n_samples` others of them, drawn with `seed`; `reference` is prompts or {name: prompts} and
    has no default. "resample" with reference="paired" takes each prompt's own `corrupted` column of equal length: activation patching,
    with `recovered` = (ablated - corrupted) / (clean - corrupted). "gradient" is a first-order estimate of zero (or paired) ablation.
    `at`: the positions where the change is made, as for `positions`, a slice such as slice(1, None), or "each" for one at a time.

    `positions`: where metrics are read, "all" by default with `target` "next", "last" where a target is given.
    `metrics`: loss (-log p of the prompt's own next token, nats), kl (clean || ablated, nats), top1_agree, target_logit and logit_diff
    (logits) and target_rank (tokens strictly above the target) by default; js (nats), l2 (of probabilities), target_logprob (nats), and
    functions of (clean logits, ablated logits), `[row, vocab]` each, that give `[row]`.

    `keep`: an :class:`streamlens.Keep`: how the clean streams are kept. `resume`: a folder that keeps what is finished; the same call on
    the same model and prompts goes on from there. `check="full"` compares one replay a batch with a plainly hooked pass.

    Raises :class:`InputError`, :class:`NumericError` where a value is not finite, :class:`UnsupportedModelError` for all but whole blocks
    of a model of several vectors a token.

    Sources: Men et al. 2024 (blocks), Wang et al. 2022 (means), Chan et al. 2022 (resampling), Zhang and Nanda 2024 (patching), Nanda 2023.
    """
    arguments = arguments_of(locals(), whole_blocks=True)
    sweep, parts = prepare(model, prompts, arguments), []
    with bar(sweep.passes, progress, f"{method} {unit}") as tick:
        for batch, part, plan in run(sweep, tick, resume):
            parts.append(part)
            demand_finite(model, f"the stream, clean or with one {unit} changed,", part.overflowed, check)
            if check == "full" and method != "gradient":
                demand_replayed(model, batch, plan)
    demand_inputs(sweep.reading.wanted, parts)
    labels = frames.Labels(model.tokenizer, sweep.reading.prompts)
    return frames.stamp(frames.ablation(parts, labels, sweep.columns), model, arguments)
