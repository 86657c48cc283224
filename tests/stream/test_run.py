"""The user's model comes back as it was: after success, after an exception and after Ctrl-C, whatever was called."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch

import streamlens as sl
from streamlens.errors import InputError, UnsupportedModelError
from streamlens.stream.run import Run, borrowed
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]
CALLS = {
    "load": lambda model: sl.load(model.module),
    "attribute": lambda model: sl.attribute(model, PROMPTS),
    "attribute-full": lambda model: sl.attribute(model, PROMPTS, target="next", positions="all", check="full"),
    "ablate-block": lambda model: sl.ablate(model, PROMPTS),
    "ablate-attn": lambda model: sl.ablate(model, PROMPTS, unit="attn"),
    "norms": lambda model: sl.norms(model, PROMPTS),
    "record": lambda model: sl.record(model, PROMPTS, sites=["z", "pattern", "resid_mid", "post"]),
}


def state(module):
    """All that a call may not change; weights are compared by value and by identity."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs")
    return {
        "hooks": {name: [dict(getattr(part, h)) for h in hooks] for name, part in module.named_modules()},
        "training": {name: part.training for name, part in module.named_modules()},
        "forward": {name: part.__dict__.get("forward") for name, part in module.named_modules()},
        "requires_grad": {name: weight.requires_grad for name, weight in module.named_parameters()},
        "grad": {name: weight.grad for name, weight in module.named_parameters()},
        "identity": {name: id(weight) for name, weight in module.named_parameters()},
        "leaf_hooks": {name: dict(weight._post_accumulate_grad_hooks or {}) for name, weight in module.named_parameters()},
        "attention": {name: part.config._attn_implementation for name, part in module.named_modules() if hasattr(part, "config")},
        "config": module.config.to_dict(),
    }


def mixed(family="gpt2"):
    """A model in a state that is easy to lose: part trains, part is frozen, a user's hook is on it. With its hook's count."""
    model = deepcopy(tiny.proven(family))
    module = model.module.train()
    blocks = [module.get_submodule(path) for path in model.anatomy.block_paths]
    blocks[1].eval()
    for weight in blocks[0].parameters():
        weight.requires_grad_(False)
    calls = []
    blocks[2].register_forward_hook(lambda *call: calls.append(1))
    return model, calls


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt-post-norm"])
@pytest.mark.parametrize("call", CALLS)
def test_model_is_as_it_was_after_a_call(family, call):
    model, calls = mixed(family)
    before, weights = state(model.module), {k: v.clone() for k, v in model.module.state_dict().items()}
    CALLS[call](model)
    assert calls
    assert state(model.module) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.module.state_dict().items())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["model.layers.1", "model.layers.1.mlp.act_fn", "model.norm"])
@pytest.mark.parametrize("call", CALLS)
def test_model_is_as_it_was_after_an_exception(call, where, error):
    """The error comes out of the model, in the second of the passes where a call makes several, and reaches the caller unchanged.

    Only `load` refuses the model instead, with the error's words.
    """
    model, _ = mixed("llama")
    passes = []

    def stop(part, args):
        passes.append(1)
        if len(passes) == (1 if call in ("attribute", "norms", "record") else 2):
            raise error("stop")

    model.module.get_submodule(where).register_forward_pre_hook(stop)
    before = state(model.module)
    refused = UnsupportedModelError if call == "load" and error is ValueError else error
    with pytest.raises(refused, match="stop"):
        CALLS[call](model)
    assert state(model.module) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["attribute", "ablate-block", "norms", "record"])
def test_model_is_as_it_was_after_an_exception_in_our_own_hook(call, error, monkeypatch):
    model, _ = mixed("llama")
    before = state(model.module)

    def stop(*args, **kwargs):
        raise error("stop")

    place = {
        "attribute": "streamlens.stream.readout.Readout._leaf_at_output",
        "ablate-block": "streamlens.stream.replay.Replay._block",
        "norms": "streamlens.stream.sites._Watcher.enter",
        "record": "streamlens.models.attention.eager_attention",
    }[call]
    monkeypatch.setattr(place, stop)
    with pytest.raises(error, match="stop"):
        CALLS[call](model)
    assert state(model.module) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_model_is_as_it_was_after_an_exception_in_the_backward_pass(error, monkeypatch):
    model, _ = mixed("llama")
    before = state(model.module)

    def stop(form, g, x):
        raise error("stop")

    monkeypatch.setattr("streamlens.models.norms.NormForm.pull_back", stop)
    with pytest.raises(error, match="stop"):
        sl.attribute(model, PROMPTS)
    assert state(model.module) == before
    monkeypatch.undo()
    assert sl.attribute(model, PROMPTS).attrs["additivity_error"] < 5e-6


def test_hooks_planted_half_way_are_taken_off(monkeypatch):
    model, _ = mixed("llama")
    before, planted = state(model.module), []
    original = Run.on_output

    def stop(run, path, hook):
        planted.append(path)
        if len(planted) == 5:
            raise KeyboardInterrupt("stop")
        original(run, path, hook)

    monkeypatch.setattr(Run, "on_output", stop)
    for call in ("attribute", "ablate-block"):
        planted.clear()
        with pytest.raises(KeyboardInterrupt, match="stop"):
            CALLS[call](model)
        assert state(model.module) == before


@pytest.mark.parametrize("call", ["attribute", "ablate-block", "norms"])
def test_a_model_in_training_mode_is_served_without_dropout(call):
    model = deepcopy(tiny.proven("gpt2"))
    assert model.module.transformer.drop.p == 0.1
    quiet = CALLS[call](model)
    model.module.train()
    assert CALLS[call](model).equals(quiet)
    assert all(part.training for part in model.module.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_work_without_gradients_around_them(mode):
    model = tiny.proven("llama")
    expected = sl.attribute(model, PROMPTS)
    with mode():
        assert sl.attribute(model, PROMPTS).equals(expected)
        assert not torch.is_grad_enabled()
        assert len(sl.ablate(model, PROMPTS))


def test_gradients_of_the_user_are_left_alone():
    model = deepcopy(tiny.proven("llama"))
    module = model.module
    module(torch.tensor(PROMPTS[:1])).logits.sum().backward()
    before = {name: weight.grad.clone() for name, weight in module.named_parameters()}
    sl.attribute(model, PROMPTS, target="next", positions="all")
    assert all(torch.equal(weight.grad, before[name]) for name, weight in module.named_parameters())


def test_borrowed_gives_back_each_flag():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Linear(2, 2))
    module[1].eval()
    module[2].weight.requires_grad_(False)
    with pytest.raises(KeyboardInterrupt), borrowed(module):
        assert not any(part.training for part in module.modules())
        assert not any(weight.requires_grad for weight in module.parameters())
        raise KeyboardInterrupt
    assert [part.training for part in module] == [True, False, True]
    assert [weight.requires_grad for weight in module.parameters()] == [True, True, False, True]


def test_layers_are_counted_as_they_run():
    model, seen = tiny.proven("llama"), []
    anatomy = model.anatomy
    with Run(model.module, anatomy.block_paths, anatomy.unembed, anatomy.n_layers) as run:
        for path in ("model.embed_tokens", "model.layers.1.mlp", "model.layers.2", "model.norm"):
            run.on_output(path, lambda layer, out, x, path=path: seen.append((path, layer)))
        run.hidden(torch.tensor(PROMPTS[:1]))
    assert seen == [("model.embed_tokens", -1), ("model.layers.1.mlp", 1), ("model.layers.2", 2), ("model.norm", 3)]


def test_hidden_is_what_the_unembedding_reads():
    model = tiny.proven("llama")
    anatomy, ids = model.anatomy, torch.tensor(PROMPTS[:1])
    with torch.no_grad(), Run(model.module, anatomy.block_paths, anatomy.unembed) as run:
        hidden, (at_logits, logits) = run.hidden(ids), run.logits(ids)
    with torch.no_grad():
        assert torch.equal(hidden, at_logits)
        assert torch.equal(model.module.lm_head(hidden), logits)
        assert torch.equal(model.module(ids, use_cache=False).logits, logits)


def test_a_hooks_tensor_takes_the_place_of_input_and_output():
    model = tiny.proven("gpt2")
    anatomy, ids = model.anatomy, torch.tensor(PROMPTS[:1])
    with torch.no_grad(), Run(model.module, anatomy.block_paths, anatomy.unembed) as run:
        clean = run.hidden(ids)
        run.on_output("transformer.h.1.mlp", lambda layer, out, x: torch.zeros_like(out))
        changed = run.hidden(ids)
        run.on_input("transformer.h.2.mlp", lambda layer, named: named | {"hidden_states": torch.zeros_like(named["hidden_states"])})
        twice = run.hidden(ids)
    assert not torch.equal(clean, changed)
    assert not torch.equal(changed, twice)


def test_one_thread_at_a_time_has_a_model():
    model = tiny.proven("llama")
    before, expected = state(model.module), sl.ablate(model, PROMPTS, metrics="kl")
    with ThreadPoolExecutor(3) as pool:
        frames = list(pool.map(lambda _: sl.ablate(model, PROMPTS, metrics="kl"), range(6)))
    assert all(frame.equals(expected) for frame in frames)
    assert state(model.module) == before


def test_a_model_that_changed_since_it_was_loaded_is_named():
    model = sl.load(tiny.model("llama"))
    del model.module.model.layers[2]
    with pytest.raises(InputError, match=r"model has changed since it was loaded \(model.layers.2 is gone\): load it again"):
        sl.norms(model, PROMPTS)


def test_weights_made_under_inference_mode_come_back_as_they_were():
    with torch.inference_mode():
        module = tiny.model("llama").train()
    before = state(module)
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        sl.load(module)
    assert state(module) == before


def test_autocast_is_refused():
    model = tiny.proven("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="autocast is on for cpu: leave it around"):
        sl.norms(model, PROMPTS)
    assert len(sl.norms(model, PROMPTS))
