"""What a change does to the predictions: clean and changed logits in, one value a row out.

Losses and divergences in nats, logits in logits, as the model prints them. Sums over the vocabulary run in float32, in
float64 for a float64 model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log

import torch
from jaxtyping import Float, Int
from torch import Tensor

from streamlens.errors import InputError
from streamlens.prompts import MEAN, NONE

POSITION_METRICS = ("loss", "kl", "js", "top1_agree", "l2")
TARGET_METRICS = ("target_logit", "target_logprob", "logit_diff", "target_rank")
METRICS = POSITION_METRICS + TARGET_METRICS
DEFAULT = ("loss", "kl", "top1_agree", "target_logit", "logit_diff", "target_rank")

_BLOCK = 256  # neighbouring logits of which one maximum is taken

Metric = str | Callable[[Tensor, Tensor], Tensor]
"""A name of :data:`METRICS`, or a function of (clean logits, changed logits), `[row, vocab]` each, that gives `[row]`."""


@dataclass(frozen=True)
class Logits:
    """One run's logits at some rows, with what several metrics share; `scratch` is room for as many numbers, used again and again."""

    logits: Float[Tensor, "row vocab"]
    scratch: Tensor | None = None

    @property
    def room(self) -> Float[Tensor, "row vocab"]:
        """Room for one number a logit, until the next time."""
        return torch.empty_like(self.logits) if self.scratch is None else self.scratch[: len(self.logits)]

    @cached_property
    def _largest(self) -> tuple[Tensor, Tensor]:
        return _top(self.logits)

    @cached_property
    def log_normalizer(self) -> Float[Tensor, " row"]:
        if self.logits.requires_grad:  # what is written into room has no slope
            return self.logits.logsumexp(-1)
        # One pass finds the maximum for this and for the top token.
        largest = self._largest[0]
        return torch.sub(self.logits, largest[:, None], out=self.room).exp_().sum(-1).log() + largest

    @cached_property
    def probabilities(self) -> Float[Tensor, "row vocab"]:
        return (self.logits - self.log_normalizer[:, None]).exp_()

    @cached_property
    def top(self) -> Int[Tensor, " row"]:
        return self._largest[1]


Clean = Logits
"""The untouched model's logits, which are the same for every change."""


def name_of(metric: Metric) -> str:
    return metric if isinstance(metric, str) else metric.__name__


def of_positions(wanted: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """The metrics among these that need no target."""
    return tuple(m for m in wanted if not isinstance(m, str) or m in POSITION_METRICS)


def loss(
    logits: Float[Tensor, "row vocab"], log_normalizer: Float[Tensor, " row"], following: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """-log p of the prompt's own next token; nan where there is none (`following` -1)."""
    value = log_normalizer - logits.gather(-1, following.clamp_min(0)[:, None])[:, 0]
    return torch.where(following < 0, torch.nan, value)


def kl(clean: Clean, changed: Logits) -> Float[Tensor, " row"]:
    """KL(clean || changed) over the vocabulary."""
    # As a mean of differences: the difference of two means would lose what the two distributions share.
    normalizers = changed.log_normalizer - clean.log_normalizer
    shift = torch.sub(clean.logits, changed.logits, out=changed.room).mul_(clean.probabilities).sum(-1)
    return shift + normalizers


def js(clean: Clean, changed: Logits) -> Float[Tensor, " row"]:
    """The Jensen-Shannon divergence: the mean of KL(clean || m) and KL(changed || m), m their mean; at most log 2."""
    p, q = clean.probabilities, changed.probabilities
    gap = (changed.logits - changed.log_normalizer[:, None]) - (clean.logits - clean.log_normalizer[:, None])
    # log(p / m) = log 2 - log(1 + q / p), subtracted token by token: in the sums it would leave noise where p and q are near.
    above, below = (log(2.0) - torch.nn.functional.softplus(side) for side in (gap, -gap))
    return 0.5 * (torch.linalg.vecdot(p, above) + torch.linalg.vecdot(q, below)).clamp_min(0)


def target_rank(logits: Float[Tensor, "row vocab"], target: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
    """How many tokens have a strictly greater logit than the target: 0 is best."""
    return (logits > logits.gather(-1, target[:, None])).sum(-1).to(logits.dtype)


def position_metrics(clean: Clean, changed: Logits, following: Tensor, wanted: tuple[Metric, ...]) -> dict[str, Float[Tensor, " row"]]:
    """The metrics that need no target, of one changed run. Raises InputError for a function that does not give one value a row."""
    logits = changed.logits
    makers: dict[str, Callable[[], Tensor]] = {
        "loss": lambda: loss(logits, changed.log_normalizer, following),
        "kl": lambda: kl(clean, changed),
        "js": lambda: js(clean, changed),
        "top1_agree": lambda: (changed.top == clean.top).to(logits.dtype),
        "l2": lambda: torch.linalg.vector_norm(clean.probabilities - changed.probabilities, dim=-1),
    }
    return {name_of(m): makers[m]() if isinstance(m, str) else _own(m, clean.logits, logits) for m in of_positions(wanted)}


def clean_position_metrics(clean: Clean, following: Tensor, wanted: tuple[Metric, ...]) -> dict[str, Float[Tensor, " row"]]:
    """The same of the clean run itself: kl, js and l2 are 0 and top1_agree 1 by definition."""
    zeros = torch.zeros_like(clean.log_normalizer)
    makers: dict[str, Callable[[], Tensor]] = dict.fromkeys(("kl", "js", "l2"), lambda: zeros) | {
        "loss": lambda: loss(clean.logits, clean.log_normalizer, following),
        "top1_agree": lambda: torch.ones_like(zeros),
    }
    return {name_of(m): makers[m]() if isinstance(m, str) else _own(m, clean.logits, clean.logits) for m in of_positions(wanted)}


def target_metrics(
    run: Logits,
    rows: Int[Tensor, " target"],
    target: Int[Tensor, " target"],
    versus: Int[Tensor, " target"],
    wanted: tuple[Metric, ...],
) -> dict[str, Float[Tensor, " target"]]:
    """The metrics of targets read at `rows`, of one run; logit_diff is nan where there is no versus (-1), against the mean logit at -2."""
    logits = run.logits

    def difference() -> Tensor:
        minus = logits[rows, versus.clamp_min(0)]
        if bool((versus == MEAN).any()):
            minus = torch.where(versus == MEAN, logits.mean(-1)[rows], minus)
        return torch.where(versus == NONE, torch.nan, logits[rows, target] - minus)

    makers: dict[str, Callable[[], Tensor]] = {
        "target_logit": lambda: logits[rows, target],
        "target_logprob": lambda: logits[rows, target] - run.log_normalizer[rows],
        "logit_diff": difference,
        "target_rank": lambda: target_rank(logits[rows], target),
    }
    return {m: makers[m]() for m in wanted if m in makers}


def _top(logits: Float[Tensor, "row vocab"]) -> tuple[Float[Tensor, " row"], Int[Tensor, " row"]]:
    """The largest logit of each row, and the first token that has it."""
    # A maximum takes a third of the time without its place, which is then looked for in one block.
    width = min(_BLOCK, logits.shape[-1])
    blocks = logits[:, : logits.shape[-1] // width * width].unflatten(-1, (-1, width)).amax(-1)
    values, block = torch.cat([blocks, logits[:, -width:].amax(-1, keepdim=True)], dim=-1).max(-1)
    start = (block * width).clamp_max(logits.shape[-1] - width)
    inside = logits.gather(-1, start[:, None] + torch.arange(width, device=logits.device))
    return values, start + inside.argmax(-1)


def _own(metric: Callable[[Tensor, Tensor], Tensor], clean: Tensor, logits: Tensor) -> Tensor:
    """A user's own metric, checked: a mean over the rows would be taken for every row's value."""
    value = metric(clean, logits)
    if not isinstance(value, Tensor) or value.shape != clean.shape[:1]:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"metrics: {name_of(metric)} must give a tensor of one value a row, {list(clean.shape[:1])}; got {got}")
    return value.to(logits.dtype)
