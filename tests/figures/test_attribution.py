"""The head map and the waterfall, by the data in their artists."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from streamlens import figures, schema, stats
from streamlens.errors import InputError
from streamlens.figures import labels


def mesh(ax, number):
    return ax.collections[number].get_array()


def means(df, component):
    rows = df[df["component"] == component]
    return rows.groupby(["layer", "head"])["contribution"].mean().unstack("head").to_numpy()


def relabel(df, **columns):
    return schema.apply(df.assign(**columns), "attribution")


def test_heads_shows_the_mean_of_each_head_and_mlp(attribution):
    df = attribution()
    ax = figures.heads(df)
    np.testing.assert_allclose(mesh(ax, 0), means(df, "head"), rtol=1e-12)
    np.testing.assert_allclose(mesh(ax, 1), means(df, "mlp"), rtol=1e-12)
    assert mesh(ax, 0).shape == (30, 9)


def test_colours_are_centred_and_shared(attribution):
    df = attribution()
    ax = figures.heads(df)
    top = max(np.abs(means(df, "head")).max(), np.abs(means(df, "mlp")).max())
    for collection in ax.collections:
        assert collection.norm.vmin == -collection.norm.vmax == pytest.approx(-top)
    assert ax.figure.axes[1].get_ylabel() == "contribution (logits)"


def test_a_limit_says_that_colours_end(attribution):
    ax = figures.heads(attribution(), limit=0.5)
    assert ax.collections[0].norm.vmax == 0.5
    assert ax.collections[-1].colorbar.extend == "both"
    assert ax.figure.axes[1].get_ylabel().startswith("contribution (logits; largest -4.")
    with pytest.raises(InputError, match=r"limit must be above 0, in logits; got -1\.0"):
        figures.heads(attribution(), limit=-1.0)


def test_one_large_mlp_does_not_whiten_the_heads(attribution):
    df = attribution()
    df.loc[(df["component"] == "mlp") & (df["layer"] == 29), "contribution"] = 100.0
    ax = figures.heads(df)
    assert ax.collections[0].norm.vmax == pytest.approx(2 * np.abs(means(df, "head")).max())
    assert ax.figure.axes[1].get_ylabel() == "contribution (logits; largest 100)"


def test_layers_run_down_and_the_mlps_stand_beside_the_heads(attribution):
    ax = figures.heads(attribution())
    assert ax.get_ylim() == (29.5, -0.5)
    x = {label.get_text(): tick for label, tick in zip(ax.get_xticklabels(), ax.get_xticks(), strict=True)}
    assert list(x)[-1] == "MLP"
    assert x["MLP"] > x["8"] + 1
    assert ax.get_xlim()[1] > x["MLP"]


def test_the_title_of_several_prompts_says_n_and_the_interval(attribution):
    df = attribution()
    shown = df[df["component"].isin(["head", "mlp"])].astype({"component": str})
    shown = stats.mean_interval(shown, "contribution", ["component", "layer", "head"])
    widest = (shown["high"] - shown["low"]).max() / 2
    assert figures.heads(df).get_title() == f"mean of 6 prompts; 95% intervals up to ±{widest:.2g}"
    several = attribution(positions=(3, 4))
    title = figures.heads(several).get_title().replace("\n", " ")
    assert title.startswith("mean of 6 prompts, 2 positions each; 95% intervals up to ±0.0")
    fewer = several[(several["prompt"] > 0) | (several["position"] == 3)]
    assert figures.heads(fewer).get_title().replace("\n", " ").startswith("mean of 6 prompts, 1 to 2 positions each; ")


def test_the_title_of_one_prompt_is_its_target(attribution):
    assert figures.heads(attribution(prompts=1)).get_title() == "“ Paris” − “ Rome”"
    assert figures.heads(attribution(prompts=1, positions=(3, 4))).get_title() == "mean over 2 positions"


def test_split_rows_are_summed_into_their_cell(attribution):
    df = attribution(prompts=2)
    halves = [df.assign(contribution=df["contribution"] / 4, source=0), df.assign(contribution=df["contribution"] * 0.75, source=1)]
    ax = figures.heads(schema.concat(halves, "attribution"))
    np.testing.assert_allclose(mesh(ax, 0), means(df, "head"), rtol=1e-12)
    neurons = relabel(df, component=df["component"].astype(str).replace("mlp", "neuron"))
    np.testing.assert_allclose(mesh(figures.heads(neurons), 1), means(df, "mlp"), rtol=1e-12)


def test_a_layer_without_heads_is_left_blank(attribution):
    df = attribution(prompts=1)
    mixer = (df["component"] == "head") & (df["layer"] == 3)
    df = relabel(df, component=df["component"].astype(str).mask(mixer & (df["head"] == 0), "mixer"))
    ax = figures.heads(df[~(mixer & (df["head"] > 0))])
    assert np.isnan(mesh(ax, 0).filled(np.nan)[3]).all()
    assert [label.get_text() for label in ax.get_xticklabels()][-2:] == ["mixer", "MLP"]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("model", ("a", "b"), r"df must hold one model; got 2 \(a, b\): select one"),
        ("target", (1, 2), r"df must hold one target and versus a position; got several, first at prompt 0, position 7"),
        ("versus", (1, 2), r"df must hold one target and versus a position"),
        ("sublayer", (0, 1), r"df must hold one sublayer; got 2 \(0, 1\)"),
    ],
)
def test_heads_refuses_what_has_no_common_mean(attribution, column, values, message):
    df = attribution()
    both = schema.apply(pd.concat([df.assign(**{column: value}) for value in values]), "attribution")
    with pytest.raises(InputError, match=message):
        figures.heads(both)


def test_heads_needs_heads_or_mlps(attribution):
    df = attribution()
    with pytest.raises(InputError, match="df must have heads or MLPs; got components embed"):
        figures.heads(df[df["component"] == "embed"])
    with pytest.raises(InputError, match="df must be an attribution table with columns contribution; got prompt"):
        figures.heads(df.drop(columns="contribution"))
    with pytest.raises(InputError, match="df must be an attribution table with rows; got none"):
        figures.heads(df.head(0))


def bars(ax):
    """(name, start, width) of each bar, from the top down."""
    names = [label.get_text() for label in ax.get_yticklabels()]
    return [(name, bar.get_x(), bar.get_width()) for name, bar in zip(names, ax.patches, strict=True)]


def test_a_waterfall_sums_to_the_logit(attribution):
    df = attribution(prompts=1)
    drawn = bars(figures.waterfall(df, top=5))
    ordered = df["contribution"].iloc[df["contribution"].abs().argsort()[::-1]].to_numpy()
    np.testing.assert_allclose([width for *_, width in drawn[:5]], ordered[:5], rtol=1e-12)
    assert drawn[5][0] == f"{len(df) - 5} others"
    for above, below in pairwise(drawn[:6]):
        assert below[1] == pytest.approx(above[1] + above[2])
    assert drawn[5][1] + drawn[5][2] == pytest.approx(df["logit"].iloc[0])
    assert drawn[6] == ("logit difference", 0, pytest.approx(df["logit"].iloc[0]))


@pytest.mark.parametrize(("top", "others"), [(6, []), (5, []), (4, ["2 others"])])
def test_a_single_component_is_never_the_others(attribution, top, others):
    df = attribution(prompts=1, layers=1, heads=1)
    df = pd.concat([df, df.head(1).assign(component="softcap")])
    names = [name for name, *_ in bars(figures.waterfall(df.assign(logit=df["contribution"].sum()), top=top))]
    assert len(df) == 6
    assert [name for name in names if "other" in name] == others


def test_a_waterfall_names_its_bars_and_says_their_size(attribution):
    df = attribution(prompts=1, layers=2, heads=1)
    contributions = {"embed": 0.5, "head": 2.0, "mlp": -3.0, "attn_bias": 0.25, "unembed_bias": 0.125}
    df["contribution"] = df["component"].astype(str).map(contributions) * np.where(df["layer"] == 1, 2, 1)
    df = df.assign(logit=df["contribution"].sum(), versus=-1)
    ax = figures.waterfall(df)
    assert [name for name, *_ in bars(ax)] == [
        "MLP 1", "L1 H0", "MLP 0", "L0 H0", "attn bias 1", "embed", "attn bias 0", "unembed bias", "logit"
    ]  # fmt: skip
    assert [text.get_text() for text in ax.texts][:3] == ["−6.00", "+4.00", "−3.00"]
    assert ax.texts[-1].get_text() == "−1.62"
    assert ax.get_title() == "“ Paris” after “ of”"


def test_a_waterfall_takes_one_group(attribution):
    with pytest.raises(InputError, match=r"df must hold one prompt, position, target and versus; got 6 that differ in prompt: select one"):
        figures.waterfall(attribution())
    with pytest.raises(InputError, match="got 2 that differ in position"):
        figures.waterfall(attribution(prompts=1, positions=(1, 2)))
    with pytest.raises(InputError, match="top must be a whole number, 1 or more; got 0"):
        figures.waterfall(attribution(prompts=1), top=0)


def test_a_waterfall_refuses_rows_that_do_not_sum_to_the_logit(attribution):
    df = attribution(prompts=1)
    for sign in (1, -1):
        missing = df[df["contribution"] * sign < 0]
        with pytest.raises(InputError, match="df must hold every row of its group; got rows that sum to"):
            figures.waterfall(missing)


@pytest.mark.filterwarnings("error")
def test_tokens_that_a_font_or_mathtext_cannot_draw_are_spelled_out(attribution):
    df = relabel(attribution(prompts=1, layers=2), target_token="$x_1", versus_token="中\n", token="a" * 40)
    ax = figures.waterfall(df)
    assert ax.get_title().replace("\n", " ") == f"“$x_1” − “\\u4e2d\\n” after “{'a' * 23}…”"
    assert ax.figure._repr_png_()


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"component": "head", "layer": 12, "head": 3}, "L12 H3"),
        ({"component": "head", "layer": 12, "sublayer": 1, "head": 3, "source": 5}, "L12.1 H3 from 5"),
        ({"component": "mlp", "layer": 20, "head": -1}, "MLP 20"),
        ({"component": "neuron", "layer": 2, "sublayer": 0, "head": -1, "neuron": 77}, "neuron 2 #77"),
        ({"component": "norm_bias", "layer": -1, "head": -1}, "norm bias"),
    ],
)
def test_component_labels(row, label):
    assert labels.component(row) == label


def test_tables_put_together_without_numbers_of_their_own_are_refused(attribution):
    df = attribution()
    with pytest.raises(InputError, match=r"df must hold each row once; got repeated rows: .* different numbers in `prompt`"):
        figures.heads(pd.concat([df, df]))


def test_contributions_that_are_not_finite_are_refused(attribution):
    with pytest.raises(InputError, match=r"df must hold finite contributions; got .* that are not"):
        figures.heads(attribution().assign(contribution=np.nan))
