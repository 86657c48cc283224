"""What a component does directly, and what in all: `sl.effects`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, batched, chosen_layers, parsed_for, watched
from streamlens.calls.replacing import reference_of, replacement
from streamlens.checks import demand_finite, demand_near
from streamlens.errors import choice
from streamlens.measure import effects as measuring
from streamlens.models.loaded import Model
from streamlens.prompts import readouts

METHODS = ("zero", "mean")


def effects(
    model: Model,
    prompts: object,
    target: object = None,
    versus: object = None,
    positions: object = None,
    *,
    method: str = "zero",
    reference: object = None,
    layers: object = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """What does a component do directly, and what in all? One row a component: its direct, total and indirect effect on a logit.

    Each head, each attention as a whole ("attn": all of its heads at once), each MLP, mixer and other write of `layers` is replaced
    at every position, before its projection (heads) and its branch norm: by nothing ("zero"; an attention's output bias stays, an
    MLP's goes with it) or by its mean over all tokens but the first of the `reference` prompts ("mean"). Every column is
    clean - ablated in logits, positive where the component helps:

    - `direct`: through the frozen readout alone; under "zero" the `contribution` of `sl.attribute`.
    - `direct_recomputed`: what it has become in the last stream is taken away, and the final norm (and a cap) runs again.
    - `total`: everything behind it runs again. `indirect` = total - direct.
    - `repair_heads`, `repair_mlps`: the part of indirect that later heads and mixers, and later MLPs and other writes, make by writing
      less than in the clean run, read with the clean norms' scales; negative where they step in. `repair_norm` is the rest, what the
      norms' own scales (and a cap) make: indirect = repair_heads + repair_mlps + repair_norm.

    `target` ("top" by default: the clean run's likeliest, kept in the ablated runs), `versus` and `positions` ("last") as in
    `sl.attribute`. `check="full"` compares one total effect a batch with plainly hooked passes. Raises :class:`InputError`, and
    :class:`NumericError` where a value is not finite.

    Sources: McGrath et al. 2023 (direct and total effect), Rushing & Nanda 2024 (self-repair and its split).
    """
    arguments = arguments_of(locals())
    choice("method", method, METHODS)
    parsed = parsed_for(model, prompts)
    wanted = readouts(parsed, model.tokenizer, target=target, versus=versus, positions=positions)
    chosen = measuring.subjects(model.anatomy, chosen_layers(model, layers))
    source = replacement(
        model, parsed, method, reference_of(model, parsed, method, reference), tuple(dict.fromkeys(s.key for s in chosen)),
        at=None, n_samples=1, seed=0, min_count=1, max_tokens=max_tokens, tick=lambda passes: None,
    )  # fmt: skip
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "effects"):
        rows = wanted.take(np.isin(wanted.prompt, batch.index))
        if len(rows):
            parts.append(measuring.effects_batch(model.module, model.anatomy, batch, rows, chosen, source, max_tokens))
            demand_finite(model, "an effect", int((~np.isfinite(parts[-1].total)).sum()), check)
            if check == "full":
                error = measuring.hooked_error(model.module, model.anatomy, batch, parts[-1], chosen, source)
                demand_near(model, "a total effect", error)
    return frames.stamp(frames.effects(parts, method, frames.Labels(model.tokenizer, parsed)), model, arguments)
