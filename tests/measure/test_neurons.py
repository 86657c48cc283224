"""Neurons, against the weights by hand, and what a split must keep of the contract."""

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError, UnsupportedModelError
from streamlens.measure import splits
from streamlens.stream import mixtures
from streamlens.stream.neurons import NeuronTap, pulled_through
from streamlens.stream.patterns import by_value
from tests import byhand
from tests.measure.test_attribution import GROUP, PROMPTS, check_contract, groups
from tests.models import tiny
from tests.tolerances import ADDITIVITY, HAND

PLACE = [*GROUP, "layer", "sublayer"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_neuron_is_what_the_weights_give_by_hand(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS[:2], target=11, versus=4, positions="all", by="neuron", top_k=None)
    down = {"llama": "model.layers.{}.mlp.down_proj", "gpt2": "transformer.h.{}.mlp.c_proj"}[family]
    for prompt, ids in enumerate(PROMPTS[:2]):
        trace = getattr(byhand, family)(model.module, ids)
        size = sum(share.abs() for share in trace.shares(11, 4).values())
        weights, direction = byhand.weights(model.module), trace.unembed[11] - trace.unembed[4]
        for layer in range(model.n_layers):
            weight = weights[down.format(layer) + ".weight"]
            weight = weight if family == "gpt2" else weight.T  # [d_mlp, d_model]
            writes = trace.inside["post", layer][..., None] * weight  # [pos, d_mlp, d_model]
            truth = trace.norm(("mlp", layer, -1), writes.transpose(0, 1)).transpose(0, 1) @ direction
            rows = df[(df.prompt == prompt) & (df.layer == layer) & (df.component == "neuron")]
            found = rows.pivot(index="position", columns="neuron", values="contribution").to_numpy()
            assert (np.abs(found - truth.numpy()) <= HAND * size.numpy()[:, None]).all()


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "bloom", "opt-post-norm"])
@pytest.mark.parametrize("top_k", [1, 5, 48, 10**6])  # llama, gemma2 and olmo2 have 48 neurons
def test_the_largest_stand_by_themselves_and_the_rest_is_their_sum(family, top_k):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target="next", positions="all", by="neuron", top_k=top_k)
    check_contract(model, df, PROMPTS)
    every = sl.attribute(model, PROMPTS, target="next", positions="all", by="neuron", top_k=None)
    size = float(groups(df)["size"].max())
    for place, rows in every[every.component == "neuron"].groupby(PLACE):
        kept = df[(df[PLACE] == list(place)).all(axis=1)]
        of = rows.set_index("neuron").contribution
        largest = of.loc[of.abs().nlargest(top_k).index]
        named = kept[kept.component == "neuron"].set_index("neuron").contribution
        assert set(named.index) == set(largest.index)
        assert np.allclose(named.loc[largest.index], largest, rtol=0, atol=HAND * size)
        rest = kept[kept.component == "neuron_rest"].contribution
        assert len(rest) == (top_k < len(of))
        assert np.allclose(rest, of.drop(largest.index).sum(), rtol=0, atol=HAND * size)
        if place[1] > 1:
            break


def test_other_rows_stay_as_they_are():
    model = tiny.proven("llama")
    df = sl.attribute(model, PROMPTS, target=11, positions="all", by="neuron")
    whole = sl.attribute(model, PROMPTS, target=11, positions="all")
    mine = ["neuron", "neuron_rest", "mlp_bias"]
    left, right = df[~df.component.isin(mine)], whole[whole.component != "mlp"]
    assert np.allclose(left.contribution, right.contribution, rtol=0, atol=1e-6)
    assert (left.neuron == -1).all()
    assert left.component.astype(str).tolist() == right.component.astype(str).tolist()


@pytest.mark.parametrize("by", ["neuron", "source", "token", "expert"])
def test_several_targets_and_a_few_positions(by):
    model = tiny.proven("mixtral" if by == "expert" else "llama")
    df = sl.attribute(model, PROMPTS[0], target=[11, 12, 13], versus=[4, 5, 6], positions=[1, -1], by=by)
    check_contract(model, df, PROMPTS)
    every = sl.attribute(model, PROMPTS[0], target=12, versus=5, positions="all", by=by)
    one, same = df[df.target == 12], every[every.position.isin([1, 6])]
    assert np.allclose(one.contribution, same.contribution, rtol=0, atol=HAND * same.contribution.abs().sum())
    number = {"token": "source"}.get(by, by)
    assert one[number].tolist() == same[number].tolist()


@pytest.mark.parametrize("by", ["neuron", "source", "token", "expert"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_contract_in_other_dtypes(by, dtype):
    if by == "expert" and dtype == torch.float64:
        pytest.skip("transformers multiplies grouped experts in at most float32")
    model = tiny.proven("mixtral" if by == "expert" else "llama", dtype)
    df = sl.attribute(model, PROMPTS, target="next", positions="all", by=by)
    check_contract(model, df, PROMPTS)


@pytest.mark.parametrize("by", ["neuron", "source", "token", "expert"])
def test_rows_do_not_depend_on_the_batch(by):
    model = tiny.proven("mixtral" if by == "expert" else "gemma4")
    together = sl.attribute(model, PROMPTS, target=11, versus=4, positions="all", by=by)
    apart = sl.attribute(model, PROMPTS[::-1], target=11, versus=4, positions="all", by=by, max_tokens=1)
    apart = apart.assign(prompt=2 - apart.prompt).sort_values(["prompt", "position"], kind="stable").reset_index(drop=True)
    size = groups(together)["size"].max()
    assert np.allclose(together.contribution, apart.contribution, rtol=0, atol=ADDITIVITY[torch.float32] * size)
    same = ["position", "component", "layer", "head", *({"neuron", "source", "expert"} & set(together.columns))]
    pd.testing.assert_frame_equal(together[same].astype({"component": str}), apart[same].astype({"component": str}))


def test_a_batch_keeps_no_more_than_it_may(monkeypatch):
    model, seen = tiny.proven("llama"), []
    original = NeuronTap.close
    monkeypatch.setattr(NeuronTap, "close", lambda tap: (seen.append(sum(kept.numel() for kept in tap._post.values())), original(tap)))
    whole = sl.attribute(model, PROMPTS, target=11, positions="all", by="neuron")
    assert len(seen) == 1
    monkeypatch.setattr("streamlens.calls.attribute.KEPT", splits.KEPT // 2**24 * 1200)
    small = sl.attribute(model, PROMPTS, target=11, positions="all", by="neuron")
    assert len(seen) == 4
    assert max(seen[1:]) <= 1200
    assert np.allclose(whole.contribution, small.contribution, rtol=0, atol=1e-6)
    sl.attribute(model, PROMPTS, target=11, by="neuron")
    assert seen[-1] == 3 * 3 * 48  # of three prompts' last positions, the activations of three layers


def test_a_map_that_is_not_plainly_linear_is_asked_by_differentiating_it():
    torch.manual_seed(0)

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    plain, scaled = torch.nn.Linear(5, 3), Scaled(5, 3)
    scaled.load_state_dict(plain.state_dict())
    g, x = torch.randn(4, 3), torch.randn(4, 5)
    assert torch.allclose(pulled_through(scaled, g, x), 2 * pulled_through(plain, g, x))


@pytest.mark.parametrize(("by", "place"), [("neuron", "neurons.pulled_through"), ("source", "sources.by_value")])
def test_parts_that_miss_their_row_are_refused(by, place, monkeypatch):
    name = f"streamlens.stream.{place}"
    original = {"neuron": pulled_through, "source": by_value}[by]
    monkeypatch.setattr(name, lambda *args: original(*args) * 1.01)
    with pytest.raises(
        UnsupportedModelError, match=rf"LlamaForCausalLM cannot be split by {by}: parts miss the row that they stand for by"
    ):
        sl.attribute(tiny.proven("llama"), PROMPTS, target=11, positions="all", by=by)


def test_experts_that_do_not_add_up_over_slots_are_refused(monkeypatch):
    original = mixtures._slot
    monkeypatch.setattr(mixtures, "_slot", lambda routed, k, weights, pairs: original(routed, k if weights else 0, weights, pairs))
    with pytest.raises(UnsupportedModelError, match="experts do not add up over routing slots, off by"):
        sl.attribute(tiny.proven("mixtral"), PROMPTS, target=11, by="expert")


def test_bad_arguments_are_named():
    model = tiny.proven("llama")
    with pytest.raises(InputError, match="by must be one of None, 'neuron', 'expert', 'source', 'token'; got 'layer'"):
        sl.attribute(model, PROMPTS, by="layer")
    for top_k in (0, -1, True):
        with pytest.raises(InputError, match="top_k must be a whole number above 0, or None for all; got"):
            sl.attribute(model, PROMPTS, by="neuron", top_k=top_k)
    with pytest.raises(UnsupportedModelError, match="MixtralForCausalLM has no neurons that can be read"):
        sl.attribute(tiny.proven("mixtral"), PROMPTS, by="neuron")
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be split by expert: none of its MLPs is a mixture"):
        sl.attribute(model, PROMPTS, by="expert")


def test_the_default_model_by_neuron(smollm2):
    df = sl.attribute(smollm2, "The Eiffel Tower is in the city of", target=" Paris", versus=" Rome", by="neuron")
    schema.validate(df, "attribution")
    assert df.component.value_counts().to_dict() == {"neuron": 300, "head": 270, "neuron_rest": 30, "embed": 1}
    assert df.attrs["arguments"]["by"] == "neuron"
