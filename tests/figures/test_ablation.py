"""The removal curve, by the data in its artists."""

import numpy as np
import pandas as pd
import pytest

from streamlens import figures, schema, stats
from streamlens.errors import InputError


def curves(ax):
    """The labelled lines, by label."""
    return {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}


def test_a_curve_a_unit_is_the_mean_over_prompts(ablation):
    df = ablation()
    ax = figures.removal(df, metric="kl")
    assert list(curves(ax)) == ["block", "attn", "mlp"]
    for unit, line in curves(ax).items():
        rows = df[(df["unit"] == unit) & (df["metric"] == "kl")]
        expected = rows.groupby(["layer", "prompt"])["delta"].mean().groupby("layer").mean()
        np.testing.assert_array_equal(line.get_xdata(), range(30))
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-12)
    assert ax.get_ylabel() == "KL divergence (nats)"
    assert ax.get_title() == "mean of 6 prompts, 95% interval"


def test_the_band_is_the_interval(ablation):
    df = ablation(units=("block",))
    ax = figures.removal(df)
    interval = stats.mean_interval(df[df["metric"] == "loss"], "delta", "layer")
    edge = ax.collections[0].get_paths()[0].vertices
    for layer in (0, 13, 29):
        at = edge[np.isclose(edge[:, 0], layer), 1]
        np.testing.assert_allclose([at.min(), at.max()], interval.loc[layer, ["low", "high"]].to_numpy(float), rtol=1e-12)


def test_one_prompt_has_no_band(ablation):
    ax = figures.removal(ablation(prompts=1))
    assert not ax.collections
    assert ax.get_title() == "1 prompt"


def test_a_baseline_marks_no_change(ablation):
    assert list(figures.removal(ablation()).lines[0].get_ydata()) == [0, 0]


@pytest.mark.parametrize("layers", [12, 30, 80])
def test_layer_ticks_are_few_and_whole(ablation, layers):
    ticks = figures.removal(ablation(layers=layers, prompts=1)).get_xticks()
    assert len(ticks) <= 10
    assert (ticks == ticks.astype(int)).all()


def two(df, **column):
    ((name, values),) = column.items()
    return schema.apply(pd.concat([df.assign(**{name: value}) for value in values]), "ablation")


@pytest.mark.parametrize(("name", "values"), [("model", ("a", "b")), ("method", ("remove", "zero")), ("span", (1, 2)), ("at", (-1, 3))])
def test_several_of_a_kind_are_refused_or_drawn_apart(ablation, name, values):
    df = two(ablation(units=("block",)), **{name: values})
    with pytest.raises(InputError, match=rf"df must hold one {name}; got 2 \({values[0]}, {values[1]}\): select one or name it in by="):
        figures.removal(df)
    assert list(curves(figures.removal(df, by=name))) == [f"{value}, block" for value in values]


def test_two_mlps_of_one_block_are_not_averaged(ablation):
    df = two(ablation(units=("mlp",)), sublayer=(0, 1))
    with pytest.raises(InputError, match=r"df must hold one sublayer; got 2 \(0, 1\): select one or name it in by="):
        figures.removal(df)


def test_several_targets_are_refused_or_drawn_apart(ablation):
    df = two(ablation(units=("attn",)), target=(5, 6))
    with pytest.raises(InputError, match="df must hold one target and versus a position; got several, first at prompt 0, position 0"):
        figures.removal(df)
    assert list(curves(figures.removal(df, by="target"))) == ["5, attn", "6, attn"]


def test_models_differ_in_colour_and_units_in_dashes(ablation):
    ax = figures.removal(two(ablation(units=("block", "mlp")), model=("a", "b")), by="model")
    line = curves(ax)
    assert line["a, block"].get_color() == line["a, mlp"].get_color() != line["b, mlp"].get_color()
    assert line["a, mlp"].get_linestyle() == line["b, mlp"].get_linestyle() != line["a, block"].get_linestyle()


def test_by_a_column_of_the_user(ablation):
    df = ablation(units=("block",))
    df["template"] = np.where(df["prompt"] < 2, "ABBA", "BABA")
    ax = figures.removal(df, by="template")
    assert list(curves(ax)) == ["ABBA, block", "BABA, block"]
    assert ax.get_title() == "mean of 2 to 4 prompts, 95% interval"


def test_bad_input_is_named(ablation):
    df = ablation()
    with pytest.raises(InputError, match="metric must be one of 'loss', 'kl'; got 'logit_diff'"):
        figures.removal(df, metric="logit_diff")
    with pytest.raises(InputError, match=r"by must name a column of df \(prompt, .*\); got 'template'"):
        figures.removal(df, by="template")
    with pytest.raises(InputError, match=r"one curve each; got head; of heads figures\.ablated_heads draws"):
        figures.removal(df.assign(unit="head"))
    with pytest.raises(InputError, match="df must be an ablation table with columns delta"):
        figures.removal(df.drop(columns="delta"))
    for column, what in (("together", "sets of units"), ("blocks", "orders of blocks")):
        with pytest.raises(InputError, match=f"df must have a layer in every row; got {what}"):
            figures.removal(df.assign(layer=-1, **{column: "a"}))
