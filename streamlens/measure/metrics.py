"""What a change does to the predictions: clean and changed logits in, one value a row out.

Losses and divergences in nats, logits in logits, as the model prints them. Sums over the vocabulary run in float32, in
float64 for a float64 model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from streamlens.prompts import MEAN, NONE

POSITION_METRICS = ("loss", "kl", "top1_agree")
TARGET_METRICS = ("target_logit", "logit_diff", "target_rank")
METRICS = POSITION_METRICS + TARGET_METRICS


@dataclass(frozen=True)
class Clean:
    """The untouched model's logits at some rows, with what is the same for every change."""

    logits: Float[Tensor, "row vocab"]

    @cached_property
    def log_normalizer(self) -> Float[Tensor, " row"]:
        return self.logits.logsumexp(-1)

    @cached_property
    def probabilities(self) -> Float[Tensor, "row vocab"]:
        return (self.logits - self.log_normalizer[:, None]).exp_()

    @cached_property
    def top(self) -> Int[Tensor, " row"]:
        return self.logits.argmax(-1)


def loss(
    logits: Float[Tensor, "row vocab"], log_normalizer: Float[Tensor, " row"], following: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """-log p of the prompt's own next token; nan where there is none (`following` -1)."""
    value = log_normalizer - logits.gather(-1, following.clamp_min(0)[:, None])[:, 0]
    return torch.where(following < 0, torch.nan, value)


def kl(clean: Clean, logits: Float[Tensor, "row vocab"], log_normalizer: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    """KL(clean || changed) over the vocabulary."""
    # As a mean of differences: the difference of two means would lose what the two distributions share.
    shift = torch.linalg.vecdot(clean.probabilities, clean.logits - logits)
    return shift + (log_normalizer - clean.log_normalizer)


def target_rank(logits: Float[Tensor, "row vocab"], target: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
    """How many tokens have a strictly greater logit than the target: 0 is best."""
    return (logits > logits.gather(-1, target[:, None])).sum(-1).to(logits.dtype)


def position_metrics(clean: Clean, logits: Tensor, following: Tensor, wanted: tuple[str, ...]) -> dict[str, Float[Tensor, " row"]]:
    """The metrics that need no target, of one changed run."""
    normalizer = logits.logsumexp(-1) if {"loss", "kl"} & set(wanted) else None
    makers: dict[str, Callable[[], Tensor]] = {
        "loss": lambda: loss(logits, normalizer, following),
        "kl": lambda: kl(clean, logits, normalizer),
        "top1_agree": lambda: (logits.argmax(-1) == clean.top).to(logits.dtype),
    }
    return {name: makers[name]() for name in wanted if name in makers}


def clean_position_metrics(clean: Clean, following: Tensor, wanted: tuple[str, ...]) -> dict[str, Float[Tensor, " row"]]:
    """The same of the clean run itself: kl 0 and top1_agree 1 by definition."""
    makers: dict[str, Callable[[], Tensor]] = {
        "loss": lambda: loss(clean.logits, clean.log_normalizer, following),
        "kl": lambda: torch.zeros_like(clean.log_normalizer),
        "top1_agree": lambda: torch.ones_like(clean.log_normalizer),
    }
    return {name: makers[name]() for name in wanted if name in makers}


def target_metrics(
    logits: Float[Tensor, "row vocab"],
    rows: Int[Tensor, " target"],
    target: Int[Tensor, " target"],
    versus: Int[Tensor, " target"],
    wanted: tuple[str, ...],
) -> dict[str, Float[Tensor, " target"]]:
    """The metrics of targets read at `rows`, of one run; logit_diff is nan where there is no versus (-1), against the mean logit at -2."""

    def difference() -> Tensor:
        minus = logits[rows, versus.clamp_min(0)]
        if bool((versus == MEAN).any()):
            minus = torch.where(versus == MEAN, logits.mean(-1)[rows], minus)
        return torch.where(versus == NONE, torch.nan, logits[rows, target] - minus)

    makers: dict[str, Callable[[], Tensor]] = {
        "target_logit": lambda: logits[rows, target],
        "logit_diff": difference,
        "target_rank": lambda: target_rank(logits[rows], target),
    }
    return {name: makers[name]() for name in wanted if name in makers}
