"""The growth curve, by the data in its artists."""

import numpy as np
import pytest

from streamlens import figures, schema
from streamlens.errors import InputError


def curves(ax):
    return {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}


def dashed(ax):
    """The curves of position 0, whose legend entry stands apart."""
    return [line for line in ax.lines if line.get_linestyle() == "--" and len(line.get_xdata())]


def named(df, model):
    df.attrs["model"] = model
    return df


def test_growth_is_the_geometric_mean_but_for_position_0(norms):
    df = norms(spread=0.5)
    ax = figures.growth(df)
    later = df[df["position"] > 0]
    expected = np.exp(np.log(later["value"]).groupby(later["layer"]).mean())
    line = curves(ax)["positions from 1 on"]
    np.testing.assert_array_equal(line.get_xdata(), range(31))
    np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-12)
    np.testing.assert_allclose(dashed(ax)[0].get_ydata(), 80 * expected, rtol=1e-12)
    assert ax.get_yscale() == "log"
    assert ax.get_xlabel() == "layer (30 is after the last)"
    assert ax.get_title() == "geometric mean of 6 prompts, 95% interval"


def test_the_band_holds_the_curve_and_lies_within_the_prompts(norms):
    df = norms(spread=0.5)
    edge = figures.growth(df).collections[0].get_paths()[0].vertices
    at = edge[np.isclose(edge[:, 0], 30), 1]
    later = df[(df["position"] > 0) & (df["layer"] == 30)]["value"]
    mean = np.exp(np.log(later).mean())
    assert later.min() < at.min() < mean < at.max() < later.max()


def test_a_table_without_position_0_has_one_curve(norms):
    ax = figures.growth(norms(positions=(3, 4)))
    assert list(curves(ax)) == ["positions from 1 on"]
    assert not dashed(ax)


def test_a_table_of_position_0_alone_says_so(norms):
    assert list(curves(figures.growth(norms(positions=(0,))))) == ["position 0"]


def test_only_the_stream_is_drawn(norms):
    df = norms(prompts=1)
    written = df.assign(site="attn_out", value=1e9)
    ax = figures.growth(schema.concat([df, written], "norms"))
    assert curves(ax)["positions from 1 on"].get_ydata().max() < 1e3
    assert ax.get_title() == "1 prompt"


def test_the_fit_is_drawn_over_its_range_and_named(norms):
    ax = figures.growth(norms(rate=1.05), fit=(5, 25))
    line = curves(ax)["×1.050 (1.050 to 1.050) a layer, 5 to 25"]
    curve = curves(ax)["positions from 1 on"]
    np.testing.assert_array_equal(line.get_xdata(), range(5, 26))
    np.testing.assert_allclose(line.get_ydata(), curve.get_ydata()[5:26], rtol=1e-9)
    assert "×1.050 a layer, 5 to 25" in curves(figures.growth(norms(prompts=1), fit=(5, 25)))
    with pytest.raises(InputError, match=r"layers must be \(first, last\), inclusive, with 0 <= first < last <= 30; got \(5, 31\)"):
        figures.growth(norms(), fit=(5, 31))


def test_several_models_need_by(norms):
    df = schema.concat([named(norms(), "large"), named(norms(layers=12, rate=1.1), "small")], "norms")
    with pytest.raises(InputError, match=r"df must hold one model; got 2 \(large, small\): select one or name it in by="):
        figures.growth(df)
    ax = figures.growth(df, by="model", fit=(2, 10))
    assert list(curves(ax))[::2] == ["large", "small", "position 0"]
    assert [len(line.get_xdata()) for line in dashed(ax)] == [31, 13]
    assert "×1.100 (1.100 to 1.100) a layer, 2 to 10" in curves(ax)
    assert ax.get_xlabel() == "layer"


@pytest.mark.parametrize(("rate", "fewest"), [(1.0, 2), (1.02, 4), (1.1, 3), (1.5, 4)])
def test_the_log_axis_has_several_plain_labels(norms, rate, fewest):
    ax = figures.growth(norms(rate=rate, positions=(1,)))
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    shown = [
        label.get_text() for label, tick in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True) if low <= tick <= high
    ]  # fmt: skip
    assert len(shown) >= fewest
    assert all(float(text) > 0 for text in shown)


def test_bad_input_is_named(norms):
    with pytest.raises(InputError, match="measure must be one of 'l2'; got 'rms'"):
        figures.growth(norms(), measure="rms")
    with pytest.raises(InputError, match="df must be a norms table with columns site"):
        figures.growth(norms().drop(columns="site"))
