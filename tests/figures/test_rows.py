"""Figures of finer rows, by the data in their artists."""

import itertools

import numpy as np
import pandas as pd
import pytest

from streamlens import figures, schema
from streamlens.errors import InputError

TOKENS = ["The", " cat", " sat", "\n", " on", " the", " mat", " and", " slept", " there", " all", " afternoon", "."]
GROUP = {"prompt": 0, "prompt_text": "p", "position": 12, "token": ".", "target": 3, "target_token": " x", "versus": -1, "versus_token": ""}


def table(rows, **columns):
    df = pd.DataFrame(rows).assign(**GROUP | {"logit": 1.0, "sublayer": 0} | columns)
    return schema.apply(df.fillna({name: -1 for name in ("layer", "head", "neuron", "expert", "source") if name in df}), "attribution")


@pytest.fixture
def by_source():
    rng = np.random.default_rng(0)
    rows = [
        {
            "component": "head",
            "layer": layer,
            "head": head,
            "source": s,
            "source_token": TOKENS[s],
            "attention": 0.1,
            "contribution": rng.normal(),
        }
        for layer in range(4)
        for head in range(3)
        for s in range(len(TOKENS))
    ]
    mlp = {"component": "mlp", "layer": 1, "head": -1, "source": -1, "source_token": "", "attention": np.nan, "contribution": 9.0}
    return table([*rows, mlp])


@pytest.fixture
def by_neuron():
    rows = [{"component": "neuron", "layer": n % 3, "head": -1, "neuron": 10 * n, "contribution": (-1) ** n * float(n)} for n in range(20)]
    return table([*rows, {"component": "neuron_rest", "layer": 0, "head": -1, "neuron": -1, "contribution": 50.0}])


@pytest.fixture
def by_expert():
    rows = [(0, 3, 0.5), (0, 1, -0.25), (0, -1, 0.125), (2, 7, -1.0), (2, 0, -0.5), (2, -1, 2.0)]
    named = [
        {"component": "expert" if e >= 0 else "shared_expert", "layer": layer, "head": -1, "expert": e, "contribution": c}
        for layer, e, c in rows
    ]
    return table([*named, {"component": "mlp", "layer": 1, "head": -1, "expert": -1, "contribution": 50.0}])


def test_sources_maps_the_heads_with_the_largest_contributions(by_source):
    ax = figures.sources(by_source, top=5)
    heads = by_source[by_source.component == "head"]
    grid = heads.pivot_table(index=["layer", "head"], columns="source", values="contribution", aggfunc="sum", observed=True)
    kept = sorted(grid.abs().max(axis=1).nlargest(5).index)
    np.testing.assert_allclose(ax.collections[0].get_array(), grid.loc[kept].to_numpy(), rtol=1e-12)
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"L{layer} H{head}" for layer, head in kept]
    assert [label.get_text() for label in ax.get_xticklabels()][:4] == ["“The”", "“ cat”", "“ sat”", "“\\n”"]
    norm = ax.collections[0].norm
    assert norm.vmax == -norm.vmin == pytest.approx(grid.loc[kept].abs().to_numpy().max())


def test_many_tokens_get_as_many_labels_as_can_be_read(by_source):
    rows = [
        {"component": "head", "layer": 0, "head": 0, "source": s, "source_token": f"t{s}", "attention": 0.1, "contribution": 1.0}
        for s in range(200)
    ]
    ax = figures.sources(table(rows))
    ax.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert 20 <= len(boxes) <= 40
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))


def test_tokens_are_the_prompt_in_order_coloured_by_their_sum_over_heads(by_source):
    ax = figures.tokens(by_source)
    total = by_source[by_source.source >= 0].groupby("source").contribution.sum()
    assert [text.get_text() for text in ax.texts] == [token if token != "\n" else "\\n" for token in TOKENS]
    bar = ax.figure.axes[1]
    assert bar.get_xlabel() == "contribution through all heads (logits)"
    blue = [patch.get_facecolor()[2] > patch.get_facecolor()[0] for patch in ax.patches]
    strong = total.abs() > 0.1 * total.abs().max()
    assert [b for b, s in zip(blue, strong, strict=True) if s] == [bool(v > 0) for v in total[strong]]


def test_tokens_wrap_without_breaking_one(by_source):
    ax = figures.tokens(by_source)
    assert max(patch.get_x() + patch.get_width() for patch in ax.patches) <= 40
    assert len({patch.get_y() for patch in ax.patches}) == 2
    starts = [(patch.get_y(), patch.get_x()) for patch in ax.patches]
    assert starts == sorted(starts)


def test_a_table_by_token_has_no_single_heads(by_source):
    summed = by_source.assign(head=-1, layer=-1).drop_duplicates(["source"])
    assert len(figures.tokens(summed).patches) == len(TOKENS)
    with pytest.raises(InputError, match=r"df must hold single heads; got their sum, as by='token' gives: take by='source'"):
        figures.sources(summed)
    ax = figures.waterfall(summed.assign(logit=summed.contribution.sum()), top=3)
    names = [label.get_text() for label in ax.get_yticklabels()]
    largest = summed.iloc[summed.contribution.abs().argsort()[::-1][:3]]
    assert names[:3] == [f"heads from {s}" if s >= 0 else "MLP" for s in largest.source]


def test_a_sum_over_heads_has_no_place_in_a_map_of_layers(by_source):
    summed = by_source.assign(head=-1).assign(layer=by_source.layer.where(by_source.source < 0, -1)).drop_duplicates(["source"])
    loud = summed.assign(contribution=summed.contribution.where(summed.source < 0, 100.0))
    ax = figures.heads(loud)
    assert [mesh.get_array().compressed().tolist() for mesh in ax.collections] == [[9.0]]
    assert ax.collections[0].norm.vmax == 9.0
    assert ax.figure.axes[1].get_ylabel() == "contribution (logits)"


@pytest.mark.parametrize("figure", ["sources", "tokens", "neurons", "experts"])
def test_shares_of_a_log_probability_are_in_nats(figure, by_source, by_neuron, by_expert):
    df = {"sources": by_source, "tokens": by_source, "neurons": by_neuron, "experts": by_expert}[figure]
    for scaled, unit in ((df, "logits"), (df.assign(log_probability=-0.5), "nats")):
        ax = getattr(figures, figure)(scaled)
        words = [label for part in ax.figure.axes for label in (part.get_xlabel(), part.get_ylabel()) if "contribution" in label]
        assert [f"({unit}" in label for label in words] == [True]


def test_neurons_are_the_largest_of_all_layers_and_never_the_rest(by_neuron):
    ax = figures.neurons(by_neuron, top=4)
    assert [patch.get_width() for patch in ax.patches] == [-19.0, 18.0, -17.0, 16.0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["neuron 1 #190", "neuron 0 #180", "neuron 2 #170", "neuron 1 #160"]


def test_experts_pile_up_on_either_side_of_zero(by_expert):
    ax = figures.experts(by_expert)
    pieces = [(patch.get_y() + patch.get_height() / 2, patch.get_x(), patch.get_width()) for patch in ax.patches]
    assert pieces == [(0, 0, 0.5), (0, 0, -0.25), (0, 0.5, 0.125), (1, 0, -1.0), (1, -1.0, -0.5), (1, 0, 2.0)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "2"]
    assert {text.get_text() for text in ax.texts} == {"3", "1", "7", "0"}


@pytest.mark.parametrize("figure", ["sources", "tokens", "neurons", "experts"])
def test_each_takes_one_group_of_its_own_table(figure, by_source, by_neuron, by_expert):
    df = {"sources": by_source, "tokens": by_source, "neurons": by_neuron, "experts": by_expert}[figure]
    draw = getattr(figures, figure)
    with pytest.raises(InputError, match="df must hold one prompt, position, target and versus; got 2 that differ in prompt"):
        draw(pd.concat([df, df.assign(prompt=1)]))
    with pytest.raises(InputError, match=r"df must be an attribution by .* table with columns"):
        draw(df.drop(columns=["source", "neuron", "expert"], errors="ignore"))
    assert draw(df).figure._repr_png_()


@pytest.mark.parametrize(
    ("figure", "what"), [("sources", "a source"), ("tokens", "a source"), ("neurons", "a neuron"), ("experts", "an expert")]
)
def test_each_needs_rows_that_are_split_and_finite(figure, what, by_source, by_neuron, by_expert):
    df = {"a source": by_source, "a neuron": by_neuron, "an expert": by_expert}[what]
    draw, whole = getattr(figures, figure), df[~df.component.isin(["head", "neuron", "expert", "shared_expert"])]
    with pytest.raises(InputError, match=f"df must have rows with {what}; got components (mlp|neuron_rest)$"):
        draw(whole)
    with pytest.raises(InputError, match="df must hold finite contributions; got 1 that are not"):
        draw(df.assign(contribution=df.contribution.where(df.index != 1)))


@pytest.mark.parametrize("figure", ["sources", "neurons"])
def test_top_is_a_number_of_rows(figure, by_source, by_neuron):
    with pytest.raises(InputError, match="top must be a whole number, 1 or more; got 0"):
        getattr(figures, figure)({"sources": by_source, "neurons": by_neuron}[figure], top=0)
