"""Experts are found by what their module takes, whatever a family calls it."""

from __future__ import annotations

import pytest
import torch

import streamlens as sl
from streamlens.errors import UnsupportedModelError
from tests import zoo
from tests.models import tiny
from tests.tolerances import REPLAY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]


def test_an_expert_of_gpt_oss_is_gone_as_if_its_weights_were_zero():
    model = zoo.opened("gpt_oss")
    df = sl.ablate(model, PROMPTS, "expert", "zero", target=11, positions="all", metrics=["target_logit"], layers=[0])
    experts = next(part for part in model.module.modules() if hasattr(part, "down_proj_bias"))
    assert sorted(df.expert.unique()) == list(range(len(experts.down_proj)))
    for expert in range(len(experts.down_proj)):
        kept = [w.detach().clone() for w in (experts.down_proj, experts.down_proj_bias)]
        with torch.no_grad():
            experts.down_proj[expert], experts.down_proj_bias[expert] = 0, 0
            truth = torch.cat([model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, 11].double() for ids in PROMPTS])
            experts.down_proj.copy_(kept[0]), experts.down_proj_bias.copy_(kept[1])
        rows = df[df.expert == expert].sort_values(["prompt", "position"])
        assert abs(rows.ablated.to_numpy() - truth.numpy()).max() <= REPLAY * float(truth.abs().max())
    assert abs(df.delta).max() > 1e-3


def test_a_mixture_that_does_not_call_its_experts_by_slot_is_refused_by_name(monkeypatch):
    """Its router is no expert, and tells nothing of how the experts are called."""
    monkeypatch.setattr("streamlens.measure.experts.mixture_of", lambda module, path: None)
    with pytest.raises(UnsupportedModelError, match="by expert: MixtralSparseMoeBlock does not call its experts by slot"):
        sl.attribute(tiny.proven("mixtral"), PROMPTS, target=11, by="expert")
