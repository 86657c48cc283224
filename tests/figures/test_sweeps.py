"""Figures of sweeps, by the data in their artists."""

import numpy as np
import pandas as pd
import pytest

from streamlens import figures, schema, stats
from streamlens.errors import InputError

LAYERS, PROMPTS = 8, 4


def table(unit, rows, **columns):
    """An ablation table with `delta` by (layer, head, span) at three positions of four prompts."""
    rng, out = np.random.default_rng(0), []
    for prompt in range(PROMPTS):
        for position in range(3):
            part = rows.assign(prompt=prompt, position=position)
            out.append(part.assign(delta=part["delta"] + 0.01 * rng.normal(size=len(part))))
    df = pd.concat(out).assign(unit=unit, clean=2.0, token="x", prompt_text="p", target=-1, target_token="", versus=-1, versus_token="")
    df = df.assign(**{"method": "zero", "sublayer": 0 if unit == "head" else -1, "metric": "loss"} | columns)
    return schema.apply(df.assign(ablated=df["clean"] + df["delta"]), "ablation")


def heads(**columns):
    index = pd.MultiIndex.from_product([range(LAYERS), range(4)], names=["layer", "head"]).to_frame(index=False)
    return table("head", index.assign(span=1, delta=(index["layer"] - 3.5) * (index["head"] + 1) / 8), **columns)


def triangle():
    pairs = [(start, n) for n in range(1, LAYERS + 1) for start in range(LAYERS + 1 - n)]
    rows = pd.DataFrame(pairs, columns=["layer", "span"])
    return table("block", rows.assign(head=-1, delta=0.02 * np.exp(0.7 * rows["span"]) / (1 + rows["layer"])))


def test_heads_are_the_means_over_prompts():
    df = heads()
    ax = figures.ablated_heads(df, metric="loss")
    grid = ax.collections[0].get_array().reshape(LAYERS, 4)
    expected = df.groupby(["layer", "head", "prompt"]).delta.mean().groupby(["layer", "head"]).mean().unstack()
    np.testing.assert_allclose(grid, expected)
    low, high = ax.collections[0].get_clim()
    assert (low, high) == pytest.approx((-abs(expected.to_numpy()).max(), abs(expected.to_numpy()).max()))
    assert ax.get_title() == "mean of 4 prompts"


def test_what_is_recovered_is_centred_at_one():
    df = heads()
    df["recovered"] = 1 - df["delta"].abs() / 10
    ax = figures.ablated_heads(df, metric="loss", value="recovered")
    left = df.groupby(["layer", "head"]).recovered.mean()
    assert ax.collections[0].get_clim() == pytest.approx((left.min(), 2 - left.min()))  # as far on the other side of 1
    with pytest.raises(InputError, match="value must be one of 'delta'; got 'recovered'"):
        figures.ablated_heads(heads(), metric="loss", value="recovered")


def positions(prompts=PROMPTS, **columns):
    index = pd.MultiIndex.from_product([range(LAYERS), range(5)], names=["layer", "at"]).to_frame(index=False)
    df = table("attn", index.assign(span=1, head=-1, delta=(index["layer"] - 3.5) * (index["at"] + 1) / 8), **columns)
    return df[df.prompt < prompts].assign(at_token="tok" + df["at"].astype(str))


def test_positions_are_the_means_over_prompts_layers_running_down():
    df = positions()
    ax = figures.ablated_positions(df, metric="loss")
    expected = df.groupby(["layer", "at", "prompt"]).delta.mean().groupby(["layer", "at"]).mean().unstack()
    np.testing.assert_allclose(ax.collections[0].get_array().reshape(LAYERS, 5), expected)
    assert ax.get_ylim() == (LAYERS - 0.5, -0.5)
    assert ax.get_xlabel() == "position at which attn is changed"
    assert ax.get_title() == "mean of 4 prompts"
    one = figures.ablated_positions(positions(prompts=1), metric="loss")
    assert [text.get_text() for text in one.get_xticklabels()] == [f"“tok{i}”" for i in range(5)]
    recovered = figures.ablated_positions(df.assign(recovered=1 + df.delta), metric="loss", value="recovered")
    np.testing.assert_allclose(recovered.collections[0].get_array().reshape(LAYERS, 5), 1 + expected)


def test_a_map_of_positions_takes_changes_at_single_ones():
    one = positions().query("at == 1")
    with pytest.raises(InputError, match=r"df must hold changes at single positions: sl\.ablate\(\.\.\., at='each'\)"):
        figures.ablated_positions(one.drop(columns="at"), metric="loss")
    with pytest.raises(InputError, match="df must hold changes at single positions"):
        figures.ablated_positions(one.assign(at=-2), metric="loss")
    with pytest.raises(InputError, match="df must hold one unit; got 2"):
        figures.ablated_positions(schema.concat([positions(), positions().assign(unit="mlp")], "ablation"), metric="loss")
    with pytest.raises(InputError, match="df must hold one at; got 5"):
        figures.ablated_heads(positions().assign(unit="head", head=0), metric="loss")
    with pytest.raises(InputError, match="df must hold a recovered of loss; got none that is defined"):
        figures.ablated_positions(positions().assign(recovered=np.nan), metric="loss", value="recovered")


def test_spans_are_a_triangle_on_a_logarithmic_scale():
    df = triangle()
    ax = figures.spans(df)
    grid = ax.collections[0].get_array().reshape(LAYERS, LAYERS)
    expected = df.groupby(["span", "layer", "prompt"]).delta.mean().groupby(["span", "layer"]).mean()
    low, high = ax.collections[0].get_clim()
    assert high == pytest.approx(expected.max())
    for n in range(1, LAYERS + 1):
        for start in range(LAYERS):
            if start + n <= LAYERS:
                assert grid[n - 1, start] == pytest.approx(max(expected[n, start], low))
            else:
                assert np.ma.is_masked(grid[n - 1, start]) or np.isnan(grid[n - 1, start])
    assert ax.collections[0].norm.__class__.__name__ == "LogNorm"
    assert low == pytest.approx(expected.max() / 1000)
    assert low > expected.min()
    near = figures.spans(df[df.span > 1])  # within three decades
    least = expected[expected.index.get_level_values("span") > 1].min()
    assert near.collections[0].get_clim() == pytest.approx((least, expected.max()))
    assert (ax.collections[0].colorbar.extend, near.collections[0].colorbar.extend) == ("min", "neither")
    with pytest.raises(InputError, match="df must hold a change of loss above 0"):
        figures.spans(df.assign(delta=-1.0))


def similarity():
    index = pd.MultiIndex.from_product([range(PROMPTS), range(3), range(LAYERS)], names=["prompt", "position", "layer"])
    df = index.to_frame(index=False)
    df = df.assign(layer_to=df["layer"] + 1, measure="block_influence", value=(df["layer"] * 3 % 8) * 1.0, token="x", prompt_text="p")
    return schema.apply(df, "similarity")


def test_points_of_the_agreement_are_layers():
    blocks = triangle()
    blocks = blocks[blocks.span == 1]
    ax = figures.agreement(blocks, similarity())
    points = ax.collections[0].get_offsets()
    truth = blocks.groupby("layer").delta.mean()
    np.testing.assert_allclose(points, np.column_stack([np.arange(LAYERS) * 3 % 8, truth]))
    assert {t.get_text() for t in ax.texts} == {str(i) for i in range(LAYERS)}
    tall = ax.containers[0].lines[2][1].get_segments()  # from low to high
    means = stats.mean_interval(blocks, "delta", "layer")
    np.testing.assert_allclose([s[:, 1] for s in tall], means[["low", "high"]])
    row = stats.rank_agreement(blocks, similarity()).iloc[0]
    tau = f"τ = {row.kendall:.2f} ({row.kendall_low:.2f} to {row.kendall_high:.2f})"
    rho = f"ρ = {row.spearman:.2f} ({row.spearman_low:.2f} to {row.spearman_high:.2f})"
    assert ax.get_title().replace("\u00a0", " ").replace("\n", " ") == f"{tau}; {rho}".replace("-", "−")
    with pytest.raises(InputError, match="measure must be one of 'block_influence'; got 'angular_distance'"):
        figures.agreement(blocks, similarity(), measure="angular_distance")


def test_numbers_of_crowded_layers_are_left_out_but_the_costliest():
    blocks = triangle()
    blocks = blocks[blocks.span == 1].assign(delta=lambda df: df.layer * 1e-6 + (df.layer == 2))
    near = similarity().assign(value=lambda df: df["layer"] * 1e-6 + (df["layer"] == 2))
    ax = figures.agreement(blocks, near)
    assert [t.get_text() for t in ax.texts] == ["2", str(LAYERS - 1)]
    with figures.style("paper"):
        first, second = figures.agreement(blocks, near).get_title().split("\n")  # broken between the two, never within an interval
    assert first.startswith("τ")
    assert second.startswith("ρ")


def test_pruning_curves_start_at_the_untouched_model():
    parts = []
    for method, rate in (("greedy", 0.1), ("random", 0.5)):
        rows = pd.DataFrame({"layer": range(5), "n_removed": range(1, 6), "span": 1, "head": -1})
        parts.append(table("block", rows.assign(delta=rate * rows["n_removed"]), method=method))
    df = schema.concat(parts, "ablation")
    ax = figures.pruning(df)
    curves = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    assert list(curves) == ["greedy", "random"]
    for method, line in curves.items():
        means = df[df.method == method].groupby(["n_removed", "prompt"]).ablated.mean().groupby("n_removed").mean()
        np.testing.assert_array_equal(line.get_xdata(), range(6))
        np.testing.assert_allclose(line.get_ydata(), [2.0, *means])
    assert ax.get_ylabel() == "loss (nats)"


@pytest.mark.parametrize("draw", [figures.ablated_heads, figures.spans])
def test_several_methods_and_other_units_are_refused(draw):
    df = heads() if draw is figures.ablated_heads else triangle()
    with pytest.raises(InputError, match="df must hold one method; got 2"):
        draw(schema.concat([df, df.assign(method="mean")], "ablation"), metric="loss")
    with pytest.raises(InputError, match="df must hold the unit"):
        draw(triangle() if draw is figures.ablated_heads else heads(), metric="loss")
    with pytest.raises(InputError, match="metric must be one of 'loss'; got 'kl'"):
        draw(df, metric="kl")
