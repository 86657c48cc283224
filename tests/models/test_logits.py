"""From the unembedding's output to the printed logits: the map is measured, and named exactly where the config names it."""

import pytest
import torch
import transformers

import streamlens as sl
from streamlens.errors import UnsupportedModelError
from streamlens.models.anatomy import LogitMap
from streamlens.models.logits import apply_map, capped, fit_logit_map
from tests.models import tiny


@pytest.fixture
def raw():
    return torch.randn(3, 60, generator=torch.Generator().manual_seed(0)) * 4


def load(config, **changes):
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config(**tiny.SMALL | tiny.GQA | changes)).eval()
    tiny.randomise(module)
    return sl.load(module)


def test_plain_logits_are_the_identity(raw):
    assert fit_logit_map(tiny.llama(), raw, raw) == LogitMap(1.0, None)


@pytest.mark.parametrize("multiplier", [0.37, -2.0, 12.5])
def test_a_multiplier_that_no_config_names_is_measured(raw, multiplier):
    found = fit_logit_map(tiny.llama(), raw, raw * multiplier)
    assert found.multiplier == pytest.approx(multiplier, rel=1e-6)
    assert found.cap is None


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_named_cap_is_found_also_where_it_hardly_bends(raw, size):
    module = tiny.proven("gemma2").module
    assert fit_logit_map(module, raw * size, capped(raw * size, 3.0)) == LogitMap(1.0, 3.0)


def test_multiplier_and_cap_together(raw):
    module = tiny.proven("gemma2").module
    found = fit_logit_map(module, raw, capped(raw * 0.3, 3.0))
    assert found.cap == 3.0
    assert found.multiplier == pytest.approx(0.3, rel=1e-5)


def test_a_cap_that_the_model_does_not_use_is_not_believed(raw):
    assert fit_logit_map(tiny.proven("gemma2").module, raw, raw) == LogitMap(1.0, None)


@pytest.mark.parametrize("bend", [torch.square, torch.relu, torch.tanh, lambda u: u + 1.0], ids=["square", "relu", "tanh", "shift"])
def test_any_other_map_is_refused(raw, bend):
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: the printed logits are not the unembedding's output times a number"):
        fit_logit_map(tiny.llama(), raw, bend(raw))


def test_the_map_is_applied_before_the_cap():
    u = torch.tensor([-10.0, 0.5, 10.0])
    assert torch.equal(apply_map(u, LogitMap(2.0, None)), 2 * u)
    assert torch.allclose(apply_map(u, LogitMap(2.0, 3.0)), 3 * torch.tanh(2 * u / 3))


@pytest.mark.parametrize(
    ("config", "changes", "multiplier"),
    [
        (transformers.GraniteConfig, {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}, 1 / 8.0),
        (transformers.CohereConfig, {"logit_scale": 0.3, "pad_token_id": 0}, 0.3),
    ],
    ids=["granite divides", "cohere multiplies"],
)
def test_contract_holds_with_a_multiplier(config, changes, multiplier):
    model = load(config, **changes)
    assert model.anatomy.logits == LogitMap(multiplier, None)
    df = sl.attribute(model, [[5, 9, 3]], target=11, versus=4, check="full")
    with torch.no_grad():
        logits = model.module(torch.tensor([[5, 9, 3]])).logits[0, -1]
    assert df.contribution.sum() == pytest.approx(float(logits[11] - logits[4]), abs=1e-5)
