"""Losses against the same sums, token by token."""

import math

import pytest
import torch
import torch.nn.functional as F

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.data import Batch, Text, batch_of
from streamlens.decoder.loss import bits_per_byte, evaluate, scored_loss
from streamlens.decoder.model import Decoder
from streamlens.decoder.tasks import KeyValueRecall

TEXT = Text("In the beginning there was the word, and the word was tokenized.", length=12)


def decoder(n_vocab=256):
    return Decoder(DecoderConfig(n_vocab=n_vocab, d_model=16, n_layers=2, n_heads=2, max_length=64))


def test_only_scored_tokens_count():
    task = KeyValueRecall(n_pairs=3)
    batch, model = batch_of(task, 4, 0, 0), decoder(task.n_vocab)
    logits = model(batch.ids).logits
    each = [
        F.cross_entropy(logits[row, t - 1], batch.ids[row, t]) for row in range(4) for t in range(1, task.length) if batch.scored[row, t]
    ]
    assert len(each) == 12
    torch.testing.assert_close(scored_loss(logits, batch), torch.stack(each).mean())
    everything = scored_loss(logits, Batch(batch.ids))
    torch.testing.assert_close(everything, F.cross_entropy(logits[:, :-1].reshape(-1, task.n_vocab), batch.ids[:, 1:].reshape(-1)))


def test_evaluate_leaves_the_model_as_it_was():
    model = decoder().train()
    one = evaluate(model, TEXT, batch=4, n_batches=2)
    assert model.training
    assert one == evaluate(model, TEXT, batch=4, n_batches=2) != evaluate(model, TEXT, batch=4, n_batches=2, seed=2)
    assert one == pytest.approx(math.log(256), rel=0.05)  # an untrained model knows nothing
    assert all(w.grad is None for w in model.parameters())


@pytest.mark.parametrize("length", [12, 13])
def test_bits_of_each_byte_by_itself(length):
    """Every byte once, told from the row that it is in the second half of, or from the first row."""
    text, model = Text(TEXT.text, length=length), decoder().train()
    ids, half, total, count = text.ids.long(), length // 2, 0.0, 0
    for start in range(0, len(ids) - length + 1, half):
        logits = model(ids[None, start : start + length]).logits[0]
        for at in range(1 if start == 0 else length - half, length):
            total -= logits[at - 1].log_softmax(-1)[ids[start + at]].item() / math.log(2)
            count += 1
    assert count > len(ids) - 1 - half
    assert bits_per_byte(model, text, batch=2) == pytest.approx(total / count, rel=1e-5)
    assert model.training
