"""Which tokens does this component push? `sl.promotes`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, batched, parsed_for, watched
from streamlens.checks import demand_finite
from streamlens.errors import InputError
from streamlens.measure import promotes as pushing
from streamlens.measure.components import Component
from streamlens.measure.places import places_in
from streamlens.models.loaded import Model
from streamlens.prompts import positions as positions_of
from streamlens.prompts.plain import is_index, plain

_LEGAL = "('head', layer, head), (kind, layer) for attn, mlp, mixer or other, ('embed',) or ('pos_embed',), or a list of such"


def promotes(
    model: Model,
    prompts: object,
    component: object,
    positions: object = None,
    *,
    top_k: int = 10,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """Which tokens does this component push up, and which down? One row a token, `top_k` in either direction.

    `component`: ("head", layer, head), ("attn", layer), ("mlp", layer), ("mixer", layer), ("other", layer), ("embed",) or ("pos_embed",);
    the whole attention is its heads and its output bias. Where a block has several of a kind, its `sublayer` stands last. A list of
    these: each in turn, once. `positions` is "last" by default.

    `contribution` is in logits, before a softcap: the component's write through every norm behind it, frozen at this pass, and the
    unembedding, less the mean over the vocabulary; the same number as `sl.attribute(..., target=token, versus="mean")`. `k` is 0
    for the token that is moved most. Raises :class:`InputError`.

    Sources: Elhage et al. 2021 and Geva et al. 2022 (writes read in the vocabulary), McGrath et al. 2023 (frozen norm, centred logits).
    """
    arguments = arguments_of(locals())
    if not is_index(top_k) or not 1 <= top_k <= model.anatomy.n_vocab:
        raise InputError(f"top_k must be from 1 to the vocabulary's {model.anatomy.n_vocab}; got {top_k!r}")
    chosen = _chosen(model, component)
    parsed = parsed_for(model, prompts)
    where = positions_of(parsed, positions)
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "promotes"):
        parts.append(pushing.promote_batch(model.module, model.anatomy, batch, places_in(batch, where), chosen, int(top_k)))
        demand_finite(model, "a contribution", int((~np.isfinite(parts[-1].contribution)).sum()), check)
    df = frames.promotes(parts, [source.component for source in chosen], frames.Labels(model.tokenizer, parsed))
    return frames.stamp(df, model, arguments)


def _chosen(model: Model, component: object) -> list[pushing.Source]:
    given = plain(component)
    given = [given] if isinstance(given, list) and given and isinstance(given[0], str) else given
    if not isinstance(given, list) or not given or not all(isinstance(one, list) and one and isinstance(one[0], str) for one in given):
        raise InputError(f"component must be {_LEGAL}; got {component!r}")
    found = pushing.sources(model.anatomy)
    chosen = [_one(model, found, one) for one in given]
    return list({source.component: source for source in chosen}.values())


def _one(model: Model, found: dict[Component, pushing.Source], one: list) -> pushing.Source:
    """The component that (kind, layer, head, sublayer) names, as far as it is given."""
    kind, numbers = one[0], one[1:]
    names = ("layer", "head", "sublayer") if kind == "head" else ("layer", "sublayer")
    named = dict(zip(names, numbers, strict=False))
    needed = {"head": 2, "embed": 0, "pos_embed": 0}.get(kind, 1)
    if not needed <= len(numbers) <= len(names) or not all(map(is_index, numbers)):
        raise InputError(f"component must be {_LEGAL}; got {tuple(one)!r}")
    fits = [source for c, source in found.items() if c.kind == kind and all(getattr(c, name) == n for name, n in named.items())]
    if not fits:
        raise InputError(f"component: {model.name} has no {tuple(one)!r}; {_there(found, kind)}")
    if len(fits) > 1:
        raise InputError(f"component {tuple(one)!r} is one of {len(fits)} of its kind: name its sublayer last, 0 to {len(fits) - 1}")
    return fits[0]


def _there(found: dict[Component, pushing.Source], kind: str) -> str:
    """What could have been named instead: the numbers of this kind, or the kinds."""
    same = [c for c in found if c.kind == kind]
    if not same:
        return f"it has {', '.join(dict.fromkeys(c.kind for c in found))}"
    ranges = [(name, {getattr(c, name) for c in same}) for name in ("layer", "head", "sublayer")]
    texts = [f"{name} {min(n)} to {max(n)}" for name, n in ranges if min(n) >= 0 and (name != "sublayer" or max(n) > 0)]
    return f"{kind} has {', '.join(texts) or 'no layer'}"
