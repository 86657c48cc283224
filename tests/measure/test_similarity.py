"""Similarities of streams: by hand, against plain hooks, and near 0 and 1 where naive formulas lose their digits."""

import math

import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.measure.similarity import angular_distance, block_influence, relative_magnitude
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]


def test_formulas_by_hand():
    x, y = torch.tensor([[3.0, 4.0], [1.0, 0.0], [2.0, 0.0]]), torch.tensor([[4.0, -3.0], [-2.0, 0.0], [1.0, 1.0]])
    assert block_influence(x, y).tolist() == pytest.approx([1.0, 2.0, 1 - math.sqrt(0.5)])
    assert angular_distance(x, y).tolist() == pytest.approx([0.5, 1.0, 0.25])
    assert relative_magnitude(x, y).tolist() == pytest.approx([math.sqrt(50) / 5, 1.5, math.sqrt(2) / math.sqrt(2)])


@pytest.mark.parametrize("angle", [1e-5, 1e-3, 1.0, math.pi - 1e-5])
def test_angles_keep_their_digits_in_float32(angle):
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[math.cos(angle), math.sin(angle)]])
    assert angular_distance(x, y).item() == pytest.approx(angle / math.pi, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt-post-norm", "gemma4"])
def test_the_streams_are_those_that_enter_each_block(family):
    model = tiny.proven(family)
    df = sl.similarity(model, PROMPTS)
    schema.validate(df, "similarity")
    for prompt, ids in enumerate(PROMPTS):
        streams = _streams(model, ids)
        n = model.n_layers
        assert len(streams) == n + 1
        rows = df[df.prompt == prompt].set_index(["measure", "layer", "layer_to", "position"]).value
        assert len(rows) == len(ids) * (2 * n + n * (n + 1) // 2)
        for (measure, layer, layer_to, position), value in rows.items():
            x, y = streams[layer][position].double(), streams[layer_to][position].double()
            cosine = float(x @ y / (x.norm() * y.norm()))
            expected = {
                "block_influence": 1 - cosine,
                "angular_distance": math.acos(cosine) / math.pi,
                "relative_magnitude": float((y - x).norm() / y.norm()),
            }[measure]
            assert value == pytest.approx(expected, abs=1e-5)


def _streams(model, ids):
    streams, last = [], model.anatomy.layers[-1].path
    keep = [
        model.module.get_submodule(path).register_forward_pre_hook(
            lambda part, args, kwargs: streams.append((args[0] if args else kwargs["hidden_states"])[0].clone()), with_kwargs=True
        )
        for path in model.anatomy.block_paths
    ]
    keep.append(
        model.module.get_submodule(last).register_forward_hook(
            lambda part, args, out: streams.append((out[0] if isinstance(out, tuple) else out)[0].clone())
        )
    )
    try:
        with torch.no_grad():
            model.module(torch.tensor([ids]), use_cache=False)
    finally:
        for handle in keep:
            handle.remove()
    return streams


def test_measures_and_positions_are_chosen():
    df = sl.similarity(tiny.proven("llama"), PROMPTS, "last", measures="angular_distance")
    assert set(df.measure) == {"angular_distance"}
    assert df.groupby("prompt").position.unique().map(list).tolist() == [[6], [3]]
