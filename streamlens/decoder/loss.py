"""How well a model predicts: the loss of a batch, of a task, and of a whole text in bits a byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.decoder.data import Batch, Data, Text, batch_of
from streamlens.errors import whole


def scored_loss(logits: Float[Tensor, "batch pos vocab"], batch: Batch) -> Float[Tensor, ""]:
    """The mean of -log p over the tokens that are scored, in nats."""
    logits, following = logits[:, :-1], batch.ids[:, 1:]
    if batch.scored is None:
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
    scored = batch.scored[:, 1:]
    return F.cross_entropy(logits[scored].float(), following[scored])


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, *, batch: int = 32, n_batches: int = 4, seed: int = 1) -> float:
    """The mean loss over batches of another seed than training's 0, in nats a scored token."""
    whole("n_batches", n_batches, 1)
    total, count = 0.0, 0
    with evaluating(model):
        for step in range(n_batches):
            drawn = batch_of(data, batch, seed, step).to(next(model.parameters()).device)
            n = drawn.ids[:, 1:].numel() if drawn.scored is None else int(drawn.scored[:, 1:].sum())
            total, count = total + n * scored_loss(model(drawn.ids).logits, drawn).item(), count + n
    return total / count


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Text, *, batch: int = 32) -> float:
    """-log2 p of each byte of a text but the first, with at least half of the text's `length` before it, from its second half-row on.

    Rows of `length` bytes start half a row apart; each counts its second half only, the first row all.
    """
    half, length, total = text.length // 2, text.length, 0.0
    starts = torch.arange(0, len(text.ids) - length + 1, half)
    with evaluating(model):
        for some in starts.split(batch):
            ids = text.ids[some[:, None] + torch.arange(length)].long().to(next(model.parameters()).device)
            surprise = -model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            first = surprise[some == 0].sum() - surprise[some == 0][:, length - half - 1 :].sum()
            total += (surprise[:, length - half - 1 :].sum() + first).item()
    return total / math.log(2) / (int(starts[-1]) + length - 1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; the mode from before afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
