"""Log-probabilities with the softmax linearised: gradients by automatic differentiation, and what the rows sum to."""

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError
from streamlens.models.anatomy import LogitMap
from streamlens.stream import unembed
from streamlens.stream.unembed import LogProbability
from tests.models import tiny
from tests.tolerances import ADDITIVITY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]


def printed(model, ids):
    with torch.no_grad():
        return model.module(torch.tensor([ids]), use_cache=False).logits[0].double()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_sum_to_the_log_probability_and_the_entropy(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target=["top2", 4], positions="all", scale="logprob", check="full")
    schema.validate(df, "attribution")
    groups = df.groupby(["prompt", "position", "target"])
    total, size = groups.contribution.sum(), groups.contribution.agg(lambda x: x.abs().sum())
    assert ((total - groups.logit.first()).abs() / size).max() <= ADDITIVITY[torch.float32]
    for (prompt, position, target), rows in groups:
        log_p = printed(model, PROMPTS[prompt])[position].log_softmax(-1)
        entropy = float(-(log_p.exp() * log_p).sum())
        assert rows.log_probability.iloc[0] == pytest.approx(float(log_p[target]), rel=1e-5, abs=1e-5)
        assert rows.logit.iloc[0] == pytest.approx(float(log_p[target]) + entropy, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # without and with a cap
def test_the_direction_is_the_gradient_of_the_log_probability(family, monkeypatch):
    monkeypatch.setattr(unembed, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(unembed, "CHUNK_ROWS", 2)
    model = tiny.proven(family)
    head = LogProbability(model.module.lm_head, model.anatomy.logits)
    hidden = torch.randn(5, model.anatomy.d_model, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.tensor([3, 7, 7, 0, 59])
    log_p = head.logits(hidden).log_softmax(-1)
    (truth,) = torch.autograd.grad(log_p[torch.arange(5), target].sum(), hidden)
    read = head.at(hidden.detach(), target).read
    assert float((read - truth).abs().max() / truth.abs().max()) <= 1e-5


def test_a_row_is_the_first_order_effect_of_its_write():
    """Scaling a head's z by 1 - h moves log p by h times its row, norms frozen: here by a lens of the frozen stream."""
    model = tiny.proven("llama")
    df = sl.attribute(model, PROMPTS[0], target=11, scale="logprob")
    logits = sl.attribute(model, PROMPTS[0], target=list(range(60)))
    z = logits.groupby("target").logit.first().to_numpy()
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    for key in (("head", 1, 2), ("mlp", 2, -1), ("embed", -1, -1)):
        one = logits[(logits.component == key[0]) & (logits.layer == key[1]) & (logits["head"] == key[2])]
        share = one.set_index("target").contribution
        expected = share[11] - (p * share.loc[range(60)].to_numpy()).sum()
        row = df[(df.component == key[0]) & (df.layer == key[1]) & (df["head"] == key[2])]
        assert row.contribution.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_bf16_keeps_the_rule_of_its_dtype():
    df = sl.attribute(tiny.proven("llama", torch.bfloat16), PROMPTS, target=11, positions="all", scale="logprob")
    groups = df.groupby(["prompt", "position"])
    error = (groups.contribution.sum() - groups.logit.first()).abs() / groups.contribution.agg(lambda x: x.abs().sum())
    assert error.max() <= ADDITIVITY[torch.bfloat16]


@pytest.mark.parametrize("versus", [4, "mean"])
def test_a_difference_of_log_probabilities_is_one_of_logits(versus):
    with pytest.raises(InputError, match="versus must be None with scale='logprob': a difference of log-probabilities is the difference"):
        sl.attribute(tiny.proven("llama"), PROMPTS, target=11, versus=versus, scale="logprob")


def test_an_unknown_scale_is_named():
    with pytest.raises(InputError, match="scale must be one of 'logit', 'logprob'; got 'prob'"):
        sl.attribute(tiny.proven("llama"), PROMPTS, scale="prob")


@pytest.mark.parametrize("confident", [0.0, 12.0, 18.0])
def test_a_large_vocabulary_of_logits_far_from_zero_is_read_as_in_float64(confident):
    """As in trained models: all logits have a level, and what is left of 1 beside a likely target is less than its rounding."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(16, 50_000, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
        head.weight[:, 0] = 20.0
        head.weight[7, 1] += confident + 10
    hidden = torch.randn(3, 16, generator=generator)
    hidden[:, :2] = 1.0
    target = torch.tensor([7, 7, 7])
    found = LogProbability(head, LogitMap()).at(hidden, target)
    weight = head.weight.detach().double()
    log_p = (hidden.double() @ weight.T).log_softmax(-1)
    p = log_p.exp()
    others = p.clone()
    others[:, 7] = 0
    truth = others.sum(-1, keepdim=True) * weight[7] - others @ weight
    assert float(((found.read - truth).abs().amax(-1) / truth.abs().amax(-1)).max()) <= 3e-5
    entropy = -(p * log_p).sum(-1)
    assert found.entropy.numpy() == pytest.approx(entropy.numpy(), abs=1e-5)
    assert (hidden.double() * found.read).sum(-1).numpy() == pytest.approx((log_p[:, 7] + entropy).numpy(), abs=2e-4)


def test_the_bias_of_a_large_vocabulary_is_summed_as_in_float64():
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(16, 50_000)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
        head.bias.copy_(2 + torch.randn(head.bias.shape, generator=generator))
    hidden, target = torch.randn(8, 16, generator=generator), torch.arange(8)
    found = LogProbability(head, LogitMap()).at(hidden, target)
    p = (hidden.double() @ head.weight.detach().double().T + head.bias.detach().double()).softmax(-1)
    truth = head.bias.detach().double()[target] - p @ head.bias.detach().double()
    assert found.constant.numpy() == pytest.approx(truth.numpy(), abs=3e-6)
