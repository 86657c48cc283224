"""The proof at load of a model that only whole blocks can be changed in: replays, one by one and in one pass, are plainly hooked ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models import limits
from streamlens.models.anatomy import Anatomy
from streamlens.models.bypass import bypass_that_holds
from streamlens.prompts import TokenBatch
from streamlens.stream import changes
from streamlens.stream.changes import Change
from streamlens.stream.hooked import hooked
from streamlens.stream.replay import Replay
from streamlens.stream.run import borrowed
from streamlens.stream.unembed import Unembed

Variants = Sequence[Sequence[Change]]


@torch.no_grad()
def prove_blocks(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, hidden: Float[Tensor, "row width"], logits: Float[Tensor, "row vocab"]
) -> tuple[bool, float, float]:
    """(whether finished blocks can be bypassed, how far replays are from hooked passes, and our logits from the printed ones).

    `hidden` is the unembedding's input at the batch's own tokens, `logits` what the model prints there. Raises
    :class:`UnsupportedModelError`.
    """
    name, room = type(module).__name__, limits.room(hidden.dtype)
    printed = _gap(Unembed(module.get_submodule(anatomy.unembed), anatomy.logits).logits(hidden), logits)
    if not printed <= room:
        raise UnsupportedModelError(
            f"{name} cannot be read exactly: logits from the unembedding's rows miss the printed ones by {printed:.2g} of the largest"
        )
    with borrowed(module):
        variants = _variants(anatomy, batch)
        truth = [hidden if _changes_nothing(v) else _hooked(module, anatomy, batch, v) for v in variants]
        bypass, error = bypass_that_holds(name, anatomy, room, lambda tried: _worst(module, tried, batch, variants, truth))
    return bypass, error, printed


def _variants(anatomy: Anatomy, batch: TokenBatch) -> Variants:
    """Nothing changed from every block on; an early, a middle and the last block removed, everywhere and at later tokens; each half."""
    n, nowhere = anatomy.n_layers, torch.zeros_like(batch.mask)
    late = (torch.arange(batch.ids.shape[1]) > 1).expand_as(batch.mask)
    removed = sorted({0, n // 2, n - 1})
    return [
        *([changes.block(anatomy, layer, at=nowhere)] for layer in range(n)),
        *([changes.block(anatomy, layer, at=at)] for layer in removed for at in (None, late)),
        *([changes.block(anatomy, layer) for layer in span] for span in (range(n // 2 + 1), range(n // 2, n))),
    ]


def _changes_nothing(variant: Sequence[Change]) -> bool:
    return all(change.at is not None and not bool(change.at.any()) for change in variant)


def _hooked(module: nn.Module, anatomy: Anatomy, batch: TokenBatch, made: Sequence[Change]) -> Float[Tensor, "row width"]:
    with hooked(module, anatomy, made) as run:
        return _own(run.hidden(batch.ids, batch.mask), batch)


def _worst(module: nn.Module, anatomy: Anatomy, batch: TokenBatch, variants: Variants, truth: Sequence[Tensor]) -> float:
    """The largest gap: the variants one by one from the last to the first, then those that start at one block in one pass."""
    pairs = list(zip(variants, truth, strict=True))
    found: list[tuple[Tensor, Tensor]] = []
    with Replay(module, anatomy) as replay:
        found.append((truth[0], _own(replay.record(batch.ids, batch.mask), batch)))
        for variant, true in reversed(pairs):
            found.append((true, _own(replay.changed(*variant), batch)))

        def start(pair: tuple[Sequence[Change], Tensor]) -> int:
            return replay.first(pair[0])

        for _, group in groupby(sorted(pairs, key=start), key=start):
            made, true = zip(*group, strict=True)
            found += zip(true, (_own(hidden, batch) for hidden in replay.each(made)), strict=True)
    gaps = [_gap(hidden, true) for true, hidden in found]
    return max(gap if gap == gap else float("inf") for gap in gaps)


def _own(hidden: Float[Tensor, "batch pos width"], batch: TokenBatch) -> Float[Tensor, "row width"]:
    return hidden[batch.mask.to(hidden.device)]


def _gap(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).abs().max() / truth.double().abs().max())
