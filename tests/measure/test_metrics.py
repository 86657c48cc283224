"""Metrics by hand, on a vocabulary of three tokens."""

from math import exp, log

import pytest
import torch

from streamlens.errors import InputError
from streamlens.measure.metrics import METRICS, Clean, clean_position_metrics, js, kl, loss, position_metrics, target_metrics, target_rank

CLEAN = torch.tensor([[log(2.0), log(1.0), log(1.0)], [0.0, 1.0, 2.0]], dtype=torch.float64)  # row 0: probabilities 1/2, 1/4, 1/4
CHANGED = torch.tensor([[log(1.0), log(1.0), log(2.0)], [3.0, 1.0, 2.0]], dtype=torch.float64)  # row 0: 1/4, 1/4, 1/2


def test_loss_is_minus_log_p_of_the_next_token():
    following = torch.tensor([2, -1])
    value = loss(CLEAN, CLEAN.logsumexp(-1), following)
    assert value[0].item() == pytest.approx(log(4))
    assert value[1].isnan()


def test_kl_is_from_clean_to_changed():
    value = kl(Clean(CLEAN), Clean(CHANGED))
    assert value[0].item() == pytest.approx(0.5 * log(2) + 0.25 * log(1) + 0.25 * log(0.5))
    p, q = [exp(x) / (1 + exp(1) + exp(2)) for x in (0, 1, 2)], [exp(x) / (exp(3) + exp(1) + exp(2)) for x in (3, 1, 2)]
    assert value[1].item() == pytest.approx(sum(a * log(a / b) for a, b in zip(p, q, strict=True)))


def test_kl_does_not_see_a_shift_of_all_logits():
    shifted = CLEAN + 7.0
    assert kl(Clean(CLEAN), Clean(shifted)).abs().max() < 1e-12


def test_kl_of_nearly_equal_distributions_keeps_its_digits():
    """In float32, where the difference of two cross-entropies would leave noise alone."""
    logits, step = torch.tensor([[20.0, 10.0, 0.0]]), torch.tensor([[0.0, 1e-3, -1e-3]])
    wide = (logits.double().softmax(-1) * (logits.double().log_softmax(-1) - (logits + step).double().log_softmax(-1))).sum()
    value = kl(Clean(logits), Clean(logits + step))
    assert abs(value.item() - wide.item()) < 1e-6


def test_rank_counts_strictly_greater_logits():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0], [0.0, 0.0, 0.0]])
    assert target_rank(logits, torch.tensor([0, 1, 2])).tolist() == [2, 0, 0]


def test_js_by_hand_and_for_nearly_equal_distributions():
    value, p, q = js(Clean(CLEAN), Clean(CHANGED)), (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    halves = [sum(a * log(a / m) for a, m in zip(side, middle, strict=True)) for side in (p, q)]
    assert value[0].item() == pytest.approx(sum(halves) / 2)
    near = torch.tensor([[20.0, 10.0, 0.0]]), torch.tensor([[20.0, 10.01, 0.0]])
    wide = js(*(Clean(x.double()) for x in near)).item()
    assert js(*map(Clean, near)).item() == pytest.approx(wide, abs=1e-9)
    far = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]])
    assert js(*map(Clean, far)).item() == pytest.approx(log(2))


def test_all_position_metrics_of_a_changed_run():
    found = position_metrics(Clean(CLEAN), Clean(CHANGED), torch.tensor([0, 1]), METRICS)
    assert set(found) == {"loss", "kl", "js", "top1_agree", "l2"}
    assert found["loss"][0].item() == pytest.approx(log(4))
    assert found["top1_agree"].tolist() == [0, 0]
    assert found["l2"][0].item() == pytest.approx((2 * 0.25**2) ** 0.5)
    clean = clean_position_metrics(Clean(CLEAN), torch.tensor([0, 1]), METRICS)
    assert clean["loss"][0].item() == pytest.approx(log(2))
    assert [clean[name].tolist() for name in ("kl", "js", "l2")] == [[0, 0]] * 3
    assert clean["top1_agree"].tolist() == [1, 1]


def test_a_metric_of_ones_own_gets_both_runs_and_gives_one_value_a_row():
    def margin(clean, changed):
        return changed.max(-1).values - clean.max(-1).values

    found = position_metrics(Clean(CLEAN), Clean(CHANGED), torch.tensor([0, 1]), (margin,))
    assert found["margin"].tolist() == pytest.approx([0.0, 1.0])
    assert clean_position_metrics(Clean(CLEAN), torch.tensor([0, 1]), (margin,))["margin"].tolist() == [0, 0]

    def mean(clean, changed):
        return changed.mean()

    with pytest.raises(InputError, match=r"mean must give a tensor of one value a row, \[2\]; got \[\]"):
        position_metrics(Clean(CLEAN), Clean(CHANGED), torch.tensor([0, 1]), (mean,))


def test_only_what_is_wanted_is_made():
    assert set(position_metrics(Clean(CLEAN), Clean(CHANGED), torch.tensor([0, 1]), ("kl", "target_rank"))) == {"kl"}
    rows = torch.tensor([0])
    assert set(target_metrics(Clean(CLEAN), rows, rows, rows + 1, ("kl", "target_rank"))) == {"target_rank"}


def test_target_metrics_read_their_own_rows():
    rows, target, versus = torch.tensor([1, 1, 0, 1]), torch.tensor([2, 0, 0, 0]), torch.tensor([0, -1, 2, -2])
    found = target_metrics(Clean(CHANGED), rows, target, versus, METRICS)
    assert found["target_logit"].tolist() == [2.0, 3.0, 0.0, 3.0]
    assert found["target_rank"].tolist() == [1, 0, 1, 0]
    assert found["target_logprob"][2].item() == pytest.approx(-log(4))
    assert found["logit_diff"][0].item() == -1.0
    assert found["logit_diff"][1].isnan()
    assert found["logit_diff"][2].item() == pytest.approx(-log(2))
    assert found["logit_diff"][3].item() == pytest.approx(3.0 - 2.0)


@pytest.mark.parametrize("vocab", [3, 256, 257, 700, 1024])
def test_the_top_token_is_the_first_with_the_largest_logit(vocab):
    logits = torch.randint(0, 4, (40, vocab), generator=torch.Generator().manual_seed(0)).float()
    logits[0, -1] = logits[1, 0] = 9.0
    logits[2] = -torch.inf
    assert Clean(logits).top.tolist() == logits.argmax(-1).tolist()
