"""Over a real model's vocabulary a float32 sum taken in one go, as torch's softmax takes it, is off by 3e-5: ours are not."""

import numpy as np
import pytest
import torch

from streamlens.measure.depth import _moved
from streamlens.measure.gradients import _loss
from streamlens.models.anatomy import LogitMap
from streamlens.prompts import TokenBatch
from streamlens.stream.unembed import Unembed, log_probabilities

TEXT = "The Eiffel Tower is in the city of Paris, and it was built in"


@pytest.fixture(scope="module")
def ids(smollm2):
    return torch.tensor([smollm2.tokenizer(TEXT)["input_ids"]])


@pytest.fixture(scope="module")
def hidden(smollm2, ids):
    """What the unembedding reads, `[1, pos, d_model]`."""
    with torch.no_grad():
        return smollm2.module.get_decoder()(input_ids=ids, use_cache=False)[0]


@pytest.fixture(scope="module")
def head(smollm2):
    return smollm2.module.lm_head


@torch.no_grad()
def exact(logits):
    """Log-probabilities of float32 logits, in float64."""
    return logits.double().log_softmax(-1)


def test_log_probabilities(head, hidden):
    with torch.no_grad():
        logits = head(hidden[0])
    truth = exact(logits)
    assert float((log_probabilities(logits) - truth).abs().max()) <= 4e-6
    assert float((log_probabilities(logits).exp().double().sum(-1) - 1).abs().max()) <= 4e-6


def test_how_far_predictions_move(head, hidden):
    changed = hidden[0].roll(1, 0)  # far enough for their errors not to cancel
    with torch.no_grad():
        (found,) = _moved(Unembed(head, LogitMap()), hidden[0], [changed])
        truth = (exact(head(changed)).exp() - exact(head(hidden[0])).exp()).norm(dim=-1)
    assert found.numpy() == pytest.approx(truth.numpy(), abs=1e-6)


def test_the_loss_and_its_gradient(head, hidden, ids):
    loss, found = _loss(Unembed(head, LogitMap()), hidden, TokenBatch(np.arange(1), ids, torch.ones_like(ids, dtype=torch.bool)))
    with torch.no_grad():
        log_p = exact(head(hidden[0, :-1]))
    n, following = len(log_p), ids[0, 1:]
    assert loss[0] == pytest.approx(-float(log_p[range(n), following].mean()), abs=2e-6)
    pull = log_p.exp()
    pull[range(n), following] -= 1
    truth = pull @ head.weight.detach().double() / n
    assert float((found[0, :-1] - truth).norm() / truth.norm()) <= 5e-6
