"""The forward pass of every choice against the slow one by hand, and what is refused of its input."""

import copy

import pytest
import torch

import streamlens as sl
from streamlens.decoder.positions import alibi_slopes
from tests.decoder import byhand
from tests.decoder.configs import CASES, decoder, tokens

EXACT = 1e-12
"""Of the largest logit, in float64."""


@torch.no_grad()
def gap(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_are_those_by_hand(changes):
    module, ids = decoder(**changes), tokens()
    with torch.no_grad():
        logits = module(ids).logits
        for row, prompt in zip(logits, ids, strict=True):
            assert gap(row, byhand.logits(module, prompt)) <= EXACT


def test_padding_on_the_right_changes_no_real_token():
    module, ids = decoder(n_experts=3, window=4), tokens()
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        assert gap(module(ids, attention_mask=mask).logits[1, :6], module(ids[1:, :6]).logits[0]) <= EXACT


def test_padding_elsewhere_is_refused():
    module, ids = decoder(), tokens()
    for places in ((0,), (3,)):
        mask = torch.ones_like(ids)
        mask[1, list(places)] = 0
        with pytest.raises(sl.errors.InputError, match="padding stands on the right"):
            module(ids, attention_mask=mask)


def test_learned_positions_end_where_their_rows_do():
    with pytest.raises(sl.errors.InputError, match=r"max_length = 8 tokens .* got 11"):
        decoder(positions="learned", max_length=8)(tokens())


@pytest.mark.parametrize("n_heads", [6, 8, 12, 20])
def test_alibi_slopes_are_the_paper_s(n_heads):
    expected = torch.tensor([byhand.slope(h, n_heads) for h in range(n_heads)], dtype=torch.float64)
    torch.testing.assert_close(alibi_slopes(n_heads), expected, rtol=1e-15, atol=0)


def test_the_text_s_example_of_an_rms_norm():
    norm = sl.Decoder(sl.DecoderConfig(4, 2, 1, 1, norm_eps=1e-12)).final_norm
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([0.849, 1.131]), rtol=0, atol=5e-4)


def test_norms_compute_in_float64_where_the_model_is():
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for changes in ({}, {"norm": "layernorm", "norm_bias": True}):
        norm = decoder(**changes).final_norm
        assert gap(norm(x), byhand.norm(norm, x)) <= 1e-15 * 10


def test_mixture_in_training_gives_its_balancing_loss():
    """1 for a router that sends tokens evenly; n_experts where all go to one with certainty."""
    from streamlens.decoder.moe import load_balancing_loss

    even = torch.full((8, 4), 0.25)
    assert float(load_balancing_loss(even, torch.arange(8)[:, None] % 4)) == pytest.approx(1.0)
    one = torch.eye(4)[torch.zeros(8, dtype=torch.long)]
    assert float(load_balancing_loss(one, torch.zeros(8, 1, dtype=torch.long))) == pytest.approx(4.0)
    module = decoder(n_experts=4).train()
    assert module(tokens()).aux_loss.requires_grad
    copy.deepcopy(module)  # no graph is left behind in it
    assert module.eval()(tokens()).aux_loss is None
    assert decoder().train()(tokens()).aux_loss is None


def test_every_parameter_gets_a_gradient():
    module = decoder(n_experts=2, n_shared_experts=1, qk_norm="head", sink=True, embed_norm=True, placement="sandwich", positions="learned")
    out = module.train()(tokens())
    (out.logits.logsumexp(-1).mean() + out.aux_loss).backward()
    silent = [name for name, weight in module.named_parameters() if weight.grad is None or not bool(weight.grad.any())]
    assert silent == []
