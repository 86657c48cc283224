"""A TransformerBridge in, and one out: the numbers are those of the transformers model inside; and models that nobody opened."""

import inspect

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens.errors import InputError
from streamlens.models.bridge import make_bridge
from tests.models import tiny
from tests.tolerances import HAND, PARITY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]
FAMILIES = ["llama", "gpt2", "gemma2"]
TABLES = {
    "attribute": (lambda m: sl.attribute(m, PROMPTS, target=11, versus=4, positions="all"), "contribution"),
    "blocks": (lambda m: sl.ablate(m, PROMPTS, positions="all"), "ablated"),
    "mlps": (lambda m: sl.ablate(m, PROMPTS, unit="mlp", target=11, versus=4), "ablated"),
    "norms": (lambda m: sl.norms(m, PROMPTS), "value"),
}


def state(module):
    """What of a model must not change: its parts, their hooks and modes, and every parameter with its flag and value."""
    parts = {name: (id(m), type(m), len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for name, m in module.named_modules()}
    return parts, {n: (id(p), p.requires_grad, float(p.detach().double().sum())) for n, p in module.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridge_gives_the_numbers_of_the_model_inside(family):
    module = tiny.model(family)
    before, bridge = state(module), make_bridge(module)
    with torch.no_grad():
        bridge(torch.tensor([PROMPTS[0]]))  # at its first pass a bridge plants hooks of its own
    inside = state(bridge.original_model)
    plain, bridged = tiny.proven(family), sl.load(bridge)
    assert bridged.source.startswith("the TransformerBridge's ")
    for call, column in TABLES.values():
        ours, theirs = call(plain), call(bridged)
        keys = [c for c in ours.columns if c not in ("contribution", "logit", "clean", "ablated", "delta", "value")]
        assert ours[keys].equals(theirs[keys])
        values, others = ours[column].to_numpy(), theirs[column].to_numpy()
        assert np.abs(values - others).max() <= HAND * np.abs(values).max()
    assert state(bridge.original_model) == inside
    assert state(module) == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("copy", [False, True])
def test_a_bridge_that_is_handed_out_prints_the_models_logits_and_leaves_the_model_alone(family, copy):
    model = sl.load(tiny.model(family))
    before, ids = state(model.module), torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        plain = model.module(ids).logits
        theirs = (bridge := model.bridge(copy=copy))(ids)
    assert (theirs - plain).abs().max() <= PARITY * plain.abs().max()
    assert state(model.module) == before
    shared = {id(p) for p in bridge.original_model.parameters()} & {id(p) for p in model.module.parameters()}
    assert bool(shared) is not copy
    again = sl.load(bridge)
    first, second = (sl.attribute(m, PROMPTS, target=11).contribution.to_numpy() for m in (model, again))
    assert np.abs(first - second).max() <= HAND * np.abs(first).max()


CALLS = {"attribute": (PROMPTS,), "ablate": (PROMPTS,), "norms": (PROMPTS,), "record": (PROMPTS, "z"), "card": ()}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_wants_a_model_that_was_opened(call):
    plain = inspect.unwrap(getattr(sl, call))  # without the shape checker of the tests, which would speak first
    module = tiny.model("llama")
    for given, name in ((module, "LlamaForCausalLM"), (make_bridge(module), "TransformerBridge"), ("smollm2-135m", "str")):
        with pytest.raises(InputError, match=rf"^model must come from sl\.load\(\.\.\.\); got {name}$"):
            plain(given, *CALLS[call])
