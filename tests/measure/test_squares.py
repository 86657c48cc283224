"""The decomposition of the squared norm: against plain sums, over blocks and sublayers."""

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError, UnsupportedModelError
from tests import byhand
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]


@pytest.mark.parametrize("unit", ["block", "sublayer"])
def test_terms_by_hand(unit):
    model = tiny.proven("llama")
    df = sl.decompose_norm(model, PROMPTS, unit=unit)
    schema.validate(df, "norm_parts")
    for prompt, ids in enumerate(PROMPTS):
        sites = byhand.llama(model.module, ids).sites
        parts = {("embed", -1): sites["embed", 0]}
        for layer in range(model.n_layers):
            attn, mlp = sites["attn_out", layer], sites["mlp_out", layer]
            parts |= {("block", layer): attn + mlp} if unit == "block" else {("attn", layer): attn, ("mlp", layer): mlp}
        rows = df[df.prompt == prompt].set_index(["component", "layer", "component_to", "layer_to", "position"]).sort_index().value
        assert len(rows) == len(ids) * len(parts) * (len(parts) + 1) // 2
        names = list(parts)
        for i, later in enumerate(names):
            for earlier in names[: i + 1]:
                truth = (parts[later] * parts[earlier]).sum(-1) * (1 if later == earlier else 2)
                found = rows.loc[(*later, *earlier)].to_numpy()
                assert abs(found - truth.numpy()).max() <= 2e-6 * float(sites["final", model.n_layers].square().sum(-1).max())


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if f != "opt-post-norm"])
@pytest.mark.parametrize("unit", ["block", "sublayer"])
def test_rows_sum_to_the_squared_norm_of_the_final_stream(family, unit):
    model = tiny.proven(family)
    df = sl.decompose_norm(model, PROMPTS, unit=unit)
    sums = df.groupby(["prompt", "position"])
    size = sums.value.apply(lambda v: v.abs().sum())
    final = sl.norms(model, PROMPTS, measures="l2", sites="final").set_index(["prompt", "position"]).value
    assert ((sums.value.sum() - final**2).abs() / size).max() < 5e-6
    np.testing.assert_allclose(sums.total.first(), final**2, rtol=1e-5)
    assert df.attrs["additivity_error"] < 5e-6


def test_a_layer_s_rows_are_what_it_grew_the_squared_norm_by():
    model = tiny.proven("gpt2")
    by_layer = sl.decompose_norm(model, PROMPTS).groupby(["prompt", "position", "layer"]).value.sum().unstack("layer")
    norms = sl.norms(model, PROMPTS, measures="l2", sites=["resid_pre", "final"])
    squares = norms.groupby(["prompt", "position", "layer"]).value.first().pow(2).unstack("layer")
    np.testing.assert_allclose(by_layer[-1], squares[0], rtol=1e-5)
    steps = squares.diff(axis=1).iloc[:, 1:]
    assert abs(by_layer.iloc[:, 1:].to_numpy() - steps.to_numpy()).max() < 1e-5 * squares.to_numpy().max()


@pytest.mark.parametrize("unit", ["block", "sublayer"])
def test_parts_are_as_long_as_what_is_left_of_them_at_the_end(unit):
    """Gemma-4 multiplies the whole stream by a scalar of each layer."""
    module, scalars = tiny.model("gemma4"), [0.5, 2.0, 1.5, 0.8]
    for layer, scalar in zip(module.model.layers, scalars, strict=True):
        layer.layer_scalar.fill_(scalar)
    model = sl.load(module)
    df = sl.decompose_norm(model, PROMPTS, unit=unit)
    assert df.attrs["additivity_error"] < 5e-6
    norms = sl.norms(model, PROMPTS, measures="l2", sites=["resid_pre", "mlp_out"]).set_index(["prompt", "position", "layer", "site"]).value
    own = df[(df.component == df.component_to) & (df.layer == df.layer_to)].set_index(["prompt", "position", "layer", "component"]).value
    embed = own.xs((-1, "embed"), level=("layer", "component"))
    np.testing.assert_allclose(embed, (np.prod(scalars) * norms.xs((0, "resid_pre"), level=("layer", "site"))) ** 2, rtol=1e-5)
    for layer in range(4) if unit == "sublayer" else ():
        length = np.prod(scalars[layer:]) * norms.xs((layer, "mlp_out"), level=("layer", "site"))
        np.testing.assert_allclose(own.xs((layer, "mlp"), level=("layer", "component")), length**2, rtol=1e-5)


def test_norms_on_the_stream_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"no sum over its writes: .* \(layer 0\) norms the stream itself"):
        sl.decompose_norm(tiny.proven("opt-post-norm"), PROMPTS)


def test_bf16_adds_up_to_its_rounding():
    df = sl.decompose_norm(tiny.proven("llama", torch.bfloat16), PROMPTS)
    assert 0 < df.attrs["additivity_error"] < 2e-2
    places = df.groupby(["prompt", "position"])
    error = (places.value.sum() - places.total.first()).abs() / places.value.apply(lambda terms: terms.abs().sum())
    assert df.attrs["additivity_error"] == pytest.approx(error.max(), rel=1e-6)


def test_positions_and_units_are_chosen():
    df = sl.decompose_norm(tiny.proven("llama"), PROMPTS, positions="last")
    assert df.groupby("prompt").position.unique().map(list).tolist() == [[6], [3], [5]]
    with pytest.raises(InputError, match="unit must be one of 'block', 'sublayer'; got 'head'"):
        sl.decompose_norm(tiny.proven("llama"), PROMPTS, unit="head")
