"""Figures of writes, norms over positions, depth use, parts of the norm and gradients, by the data in their artists."""

import numpy as np
import pandas as pd
import pytest

from streamlens import figures, schema, stats
from streamlens.errors import InputError
from tests.figures.test_norms import curves

LAYERS, PROMPTS, POSITIONS = 6, 4, 5


def frame(names, *levels):
    df = pd.MultiIndex.from_product(levels, names=names).to_frame(index=False)
    df["prompt_text"] = "p" + df["prompt"].astype(str)
    return df.assign(**{name: -1 for name in ("sublayer", "head") if name not in df})


def writes_table(measure="relative", seed=0):
    names = ["prompt", "position", "layer", "site"]
    df = frame(names, range(PROMPTS), range(POSITIONS), range(LAYERS), ["attn_out", "mlp_out"])
    rng = np.random.default_rng(seed)
    df["value"] = np.exp(rng.normal(-1, 0.2, size=len(df))) * np.where(df.position == 0, 50, 1)
    df["value"] *= np.where((measure == "cosine") & (df.layer % 2 == 0), -0.01, 1 if measure != "cosine" else 0.01)
    return schema.apply(df.assign(measure=measure, token="x", sublayer=0), "norms")


def depth_table(seed=0, positions="all", unit="block"):
    df = frame(["prompt", "layer", "layer_to", "statistic"], range(PROMPTS), range(LAYERS), range(LAYERS + 1), ["max", "mean"])
    df = df[df.layer_to > df.layer].reset_index(drop=True)
    df["value"] = np.random.default_rng(seed).gamma(2, size=len(df))
    df["measure"] = np.where(df.layer_to == LAYERS, "prediction", "write")
    return schema.apply(df.assign(unit=unit, positions=positions, cut=-1), "depth_use")


@pytest.mark.parametrize(("measure", "scale"), [("relative", "log"), ("cosine", "linear")])
def test_writes_are_means_over_positions_but_the_first(measure, scale):
    df = writes_table(measure)
    ax = figures.writes(df, measure=measure)
    later = df[df.position > 0]
    for site, label in (("attn_out", "attn"), ("mlp_out", "MLP")):
        expected = later[later.site == site].groupby("layer").value.mean()
        np.testing.assert_allclose(curves(ax)[label].get_ydata(), expected, rtol=1e-12)
    assert ax.get_yscale() == scale
    assert ax.get_title() == "mean of 4 prompts, 95% interval"
    assert len(ax.collections) == 2


def test_writes_need_writes_and_one_model():
    with pytest.raises(InputError, match=r"df must have cosine of writes at positions from 1 on: sl\.norms\(\.\.\., measures='cosine'\)"):
        figures.writes(writes_table(), measure="cosine")
    both = pd.concat([writes_table().assign(model="a"), writes_table(seed=1).assign(model="b")])
    with pytest.raises(InputError, match="df must hold one model; got 2"):
        figures.writes(both)
    assert set(curves(figures.writes(both, by="model"))) == {"a, attn", "a, MLP", "b, attn", "b, MLP"}


def test_a_map_of_norms_is_not_swallowed_by_position_0(norms):
    df = norms(layers=6, prompts=3, positions=range(5))
    ax = figures.norm_map(df)
    mesh = ax.collections[0]
    cells = np.exp(np.log(df.value).groupby([df.layer, df.position]).mean()).unstack()
    np.testing.assert_allclose(mesh.get_array().reshape(cells.shape), cells, rtol=1e-12)
    later = cells.loc[:, 1:].to_numpy()
    assert (mesh.norm.vmin, mesh.norm.vmax) == pytest.approx((later.min(), later.max()))
    assert cells[0].max() > 10 * mesh.norm.vmax
    bar = ax.figure.axes[1]
    assert bar.get_ylabel().startswith("norm (position 0: ")
    assert ax.get_title() == "geometric mean of 3 prompts"
    assert ax.get_ylim() == (cells.index.max() + 0.5, -0.5)  # from the first layer down, as every map of layers
    bar.figure.canvas.draw()
    assert all("10^" not in text.get_text() for text in bar.get_yticklabels())
    large = figures.norm_map(df.assign(value=100 * df.value / df.value.min()))
    assert "position 0: 8280 to 11100" in large.figure.axes[1].get_ylabel()


def test_a_map_of_one_short_prompt_shows_its_tokens(norms):
    df = norms(layers=4, prompts=1, positions=range(3))
    df["token"] = pd.Categorical.from_codes(df.position, categories=["The", " $cat", " sat"])
    ax = figures.norm_map(df)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["“The”", "“ $cat”", "“ sat”"]
    ax.figure.canvas.draw()


@pytest.mark.parametrize("statistic", ["max", "mean"])
def test_depth_use_is_a_matrix_of_later_layers(statistic):
    df = depth_table()
    ax = figures.depth_use(df, statistic=statistic)
    cells = ax.collections[0].get_array().reshape(LAYERS, LAYERS)
    rows = df[(df.measure == "write") & (df.statistic == statistic)]
    for layer in range(LAYERS):
        for to in range(LAYERS):
            values = rows[(rows.layer == layer) & (rows.layer_to == to)].value
            if to <= layer:
                assert np.ma.is_masked(cells[to, layer]) or np.isnan(cells[to, layer])
            else:
                assert cells[to, layer] == pytest.approx(getattr(values, statistic)())
    assert ax.get_title().replace("\n", " ") == f"{statistic} of 4 prompts, taken away at every position but the first"
    assert ax.get_ylim() == (LAYERS - 0.5, -0.5)
    assert figures.depth_use(df, limit=0.5).collections[0].norm.vmax == 0.5
    shown = np.sort(cells.compressed())
    assert ax.collections[0].norm.vmax == pytest.approx(np.quantile(shown, 0.95))
    assert ax.figure.axes[1].get_ylabel() == f"relative change of the write (largest {shown[-1]:.3g})"


def test_depth_use_of_several_kinds_is_refused():
    both = pd.concat([depth_table(), depth_table(positions="future")])
    with pytest.raises(InputError, match="df must hold one positions; got 2"):
        figures.depth_use(both)
    with pytest.raises(InputError, match="df must hold whole layers; got heads"):
        figures.depth_use(depth_table(unit="head"))
    with pytest.raises(InputError, match="limit must be above 0; got 0"):
        figures.depth_use(depth_table(), limit=0.0)


def test_parts_of_the_norm_are_bars_that_sum_to_one():
    df = frame(["prompt", "position", "layer", "layer_to"], range(3), range(4), range(-1, 4), range(-1, 4))
    df = df[df.layer_to <= df.layer].reset_index(drop=True)
    df["value"] = np.random.default_rng(0).gamma(2, size=len(df))
    df["total"] = df.groupby(["prompt", "position"]).value.transform("sum")
    df = schema.apply(df.assign(component="block", component_to="block", sublayer_to=-1, token="x"), "norm_parts")
    ax = figures.norm_parts(df)
    heights = np.array([bar.get_height() for bar in ax.patches])
    assert heights.sum() == pytest.approx(1.0)
    size = stats.growth_sources(df)
    np.testing.assert_allclose(heights[:5], size[size.source == "size"]["mean"])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["size", "alignment"]


def test_gradients_are_geometric_means_where_there_are_any():
    df = frame(["prompt", "position", "layer"], range(PROMPTS), range(POSITIONS), range(LAYERS + 1))
    df["value"] = np.exp(np.random.default_rng(0).normal(0, 1, size=len(df)))
    df.loc[(df.layer == LAYERS) & (df.position == POSITIONS - 1), "value"] = 0.0
    df["site"] = np.where(df.layer == LAYERS, "final", "resid_pre")
    df = schema.apply(df.assign(token="x", loss=1.0), "gradients")
    ax = figures.gradients(df)
    assert ax.get_xlabel() == f"layer ({LAYERS} is after the last)"
    rows = df[(df.position > 0) & (df.value > 0)]
    expected = np.exp(np.log(rows.value).groupby([rows.layer, rows.prompt]).mean().groupby("layer").mean())
    np.testing.assert_allclose(ax.lines[0].get_ydata(), expected, rtol=1e-12)
    with pytest.raises(InputError, match="df must have gradients above 0 at positions from 1 on; got none"):
        figures.gradients(df[df.position == 0])


def test_forms_are_drawn_with_their_r2_over_their_range(norms):
    df = norms(rate=1.08, spread=0.0)
    ax = figures.growth(df, forms=(3, 27))
    fits = stats.growth_forms(df, (3, 27)).set_index("form")
    for form, row in fits.iterrows():
        line = curves(ax)[f"{form} (R² {row['r2']:.3f})"]
        np.testing.assert_array_equal(line.get_xdata(), range(3, 28))
        expected = stats.forms.fitted({"form": form, **row}, np.arange(3, 28))
        shown = line.get_ydata()
        np.testing.assert_allclose(shown[np.isfinite(shown)], expected[expected > 0], rtol=1e-12)
    assert fits.r2["exponential"] == pytest.approx(1.0)


def test_initialisation_is_drawn_from_the_curves_first_value_on(norms):
    ax = figures.growth(norms(), initial=0.5)
    line, start = curves(ax)["random walk, variance 0.5"], curves(ax)["positions from 1 on"].get_ydata()[0]
    np.testing.assert_allclose(line.get_ydata(), start * np.sqrt(1 + np.arange(31)))
    df = schema.concat([norms().assign(model="a"), norms(layers=12).assign(model="b")], "norms")
    with pytest.raises(InputError, match="forms and initial must stand beside one curve; got 2"):
        figures.growth(df, by="model", initial=0.5)
