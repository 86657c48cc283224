"""The lens grid, effects against each other, and promoted tokens, by the data in their artists."""

import numpy as np
import pandas as pd
import pytest

from streamlens import figures, schema
from streamlens.errors import InputError

WORDS = [" Paris", " the", " ", "\n", " $x$", "é", " a very long token"]


def lens_table(layers=5, positions=(0, 1, 2), k=2, seed=0):
    rng = np.random.default_rng(seed)
    index = pd.MultiIndex.from_product([range(layers + 1), positions, range(-1, k)], names=["layer", "position", "k"])
    df = index.to_frame(index=False)
    df["target"] = np.where(df["k"] == -1, 0, rng.integers(0, len(WORDS), len(df)))
    df["probability"] = rng.uniform(size=len(df))
    df["rank"] = np.where(df["k"] == -1, 7, df["k"])
    df = df.assign(site=np.where(df["layer"] == layers, "final", "resid_pre"), norm="recomputed", logit=1.0, prompt=0, prompt_text="p")
    df["target_token"], df["token"] = [WORDS[t] for t in df["target"]], [WORDS[p % len(WORDS)] for p in df["position"]]
    return schema.apply(df, "lens")


def effects_table(prompts=3, layers=4, heads=3, seed=0):
    rng = np.random.default_rng(seed)
    rows = [
        (kind, layer, head) for layer in range(layers) for kind, n in (("head", heads), ("attn", 0), ("mlp", 0)) for head in range(n or 1)
    ]
    part = pd.DataFrame(rows, columns=["component", "layer", "head"])
    part["head"] = np.where(part["component"] == "head", part["head"], -1)
    df = pd.concat([part.assign(prompt=p) for p in range(prompts)])
    for name in ("direct", "direct_recomputed", "total", "indirect", "repair_heads", "repair_mlps", "repair_norm"):
        df[name] = rng.normal(size=len(df))
    df = df.assign(sublayer=0, position=3, token=" of", target=5, target_token=" Paris", versus=-1, versus_token="", method="zero")
    return schema.apply(df.assign(prompt_text="prompt " + df["prompt"].astype(str)), "effects")


def promotes_table(k=4, seed=0):
    rng = np.random.default_rng(seed)
    df = pd.MultiIndex.from_product([["up", "down"], range(k)], names=["direction", "k"]).to_frame(index=False)
    sizes = np.sort(rng.uniform(1, 3, len(df)).reshape(2, k))[:, ::-1].reshape(-1)
    df["contribution"] = np.where(df["direction"] == "up", 1, -1) * sizes
    df = df.assign(target=range(len(df)), target_token=[f" t{i}" for i in range(len(df))], prompt=0, prompt_text="p", position=3)
    return schema.apply(df.assign(token=" of", component="mlp", layer=2, sublayer=0, head=-1), "promotes")


def test_the_lens_shows_the_likeliest_token_of_every_cell_and_its_probability():
    df = lens_table()
    ax = figures.lens(df)
    top = df[df.k == 0]
    grid = top.pivot(index="layer", columns="position", values="probability").to_numpy()
    np.testing.assert_allclose(ax.collections[0].get_array(), grid)
    assert (ax.collections[0].norm.vmin, ax.collections[0].norm.vmax) == (0, 1)
    texts = {tuple(map(int, t.get_position())): t for t in ax.texts}
    assert len(texts) == len(top)
    for row in top.itertuples():
        text = texts[row.position, row.layer]
        assert text.get_color() == ("white" if row.probability >= 0.55 else "black")
        expected = {" Paris": "Paris", " the": "the", " ": "␣", "\n": "\\n", " $x$": "$x$", "é": "é"}.get(row.target_token)
        assert text.get_text() == expected or text.get_text().rstrip("…") in row.target_token
    assert [t.get_text() for t in ax.get_xticklabels()] == ["Paris", "the", "␣"]
    assert ax.get_ylim() == (5.5, -0.5)


def test_the_lens_of_a_single_position_shows_its_likeliest_tokens_side_by_side():
    df = lens_table(positions=(4,))
    df["target_token"] = np.where(df.k == 1, " second", df.target_token)
    ax = figures.lens(df)
    grid = df[df.k >= 0].pivot(index="layer", columns="k", values="probability").to_numpy()
    np.testing.assert_allclose(ax.collections[0].get_array(), grid)
    texts = {tuple(map(int, t.get_position())): t.get_text() for t in ax.texts}
    assert {texts[1, layer] for layer in range(6)} == {"second"}
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "2"]
    assert ax.get_title() == "likeliest tokens at each layer"
    assert "after “" in ax.get_xlabel()


def test_the_lens_of_a_target_shows_its_rank():
    ax = figures.lens(lens_table(), show="target")
    assert {t.get_text() for t in ax.texts} == {"7"}
    assert ax.get_title() == "rank and probability of “ Paris”"
    with figures.style("paper"):
        df = lens_table(positions=range(7)).assign(rank=24612)
        ax = figures.lens(pd.concat([df, df.assign(position=df["position"] + 7)]), show="target")
    assert {t.get_text() for t in ax.texts} == {"25k"}  # five digits do not fit


@pytest.mark.parametrize("positions", [8, 14, 20, 40])
def test_ranks_beside_one_another_do_not_run_together(positions):
    with figures.style("paper"):
        ax = figures.lens(lens_table(positions=range(positions)).assign(rank=871, token="x"), show="target")
    ax.figure.canvas.draw()
    cell = ax.get_window_extent().width / positions
    assert {t.get_text() for t in ax.texts} <= {"871", "…"}
    assert {t.get_text() for t in ax.texts} == {"871"} or positions > 14
    assert all(t.get_window_extent().width < 0.92 * cell for t in ax.texts)


@pytest.mark.parametrize("positions", [8, 14, 20, 40])
def test_tokens_beside_one_another_do_not_run_together(positions):
    with figures.style("paper"):
        df = lens_table(positions=range(positions)).assign(token="x")
        ax = figures.lens(schema.apply(df.assign(target_token=np.resize([" and", " We", " Mary", " mmmm", "."], len(df))), "lens"))
    ax.figure.canvas.draw()
    cell = ax.get_window_extent().width / positions
    assert "." in {t.get_text() for t in ax.texts}
    assert {"and", "We"} <= {t.get_text() for t in ax.texts} or positions > 14
    assert all(t.get_window_extent().width < 0.98 * cell for t in ax.texts)


@pytest.mark.parametrize(
    ("show", "title"), [("top", "probability of the likeliest token at each layer"), ("target", "probability of “ Paris”")]
)
def test_a_lens_without_room_for_words_does_not_promise_them(show, title):
    with figures.style("paper"):
        ax = figures.lens(lens_table(positions=range(120)), show=show)
    assert len(ax.texts) == 0
    assert ax.get_title().replace("\n", " ") == title


@pytest.mark.parametrize("n", [10, 40, 160])
def test_the_lens_of_many_positions_writes_nothing_over_its_neighbours(n):
    ax = figures.lens(lens_table(positions=tuple(range(n))).assign(token=" token"))
    ax.figure.canvas.draw()
    cell = ax.get_window_extent().width / n
    widest = max((text.get_window_extent().width for text in ax.texts), default=0.0)
    assert widest <= 1.1 * cell
    assert bool(ax.texts) == (n < 160)
    ticks = ax.get_xticks()
    assert len(ticks) == len(ax.get_xticklabels())
    assert ticks[0] == 0
    assert (ticks[1] - ticks[0]) * cell >= ax.figure.dpi / 72 * 10
    assert len(ax.collections[0].get_array().ravel()) == 6 * n


def test_the_lens_is_of_chosen_positions_and_says_when_the_norm_is_frozen():
    df = lens_table(positions=(4, 6))
    ax = figures.lens(schema.apply(df.assign(norm="frozen"), "lens"))
    assert ax.get_title().replace("\n", " ") == "likeliest token at each layer, final norm frozen"
    assert ax.collections[0].get_array().shape == (6, 2)


@pytest.mark.parametrize(
    ("change", "asked", "message"),
    [
        (lambda df: pd.concat([df, df.assign(prompt=1)]), {}, "df must hold one prompt; got 2"),
        (lambda df: pd.concat([df, df.assign(norm="frozen")]), {}, "df must hold one norm; got 2"),
        (lambda df: pd.concat([df, df[df.site == "resid_pre"].assign(site="resid_post")]), {}, "df must hold one site of a layer"),
        (lambda df: pd.concat([df, df[df.k == -1].assign(target=3)]), {"show": "target"}, "df must hold one target of a position"),
        (lambda df: df[df.k == -1], {}, "df must have rows of k=0 for show='top'; got k from -1 to -1"),
        (lambda df: df, {"show": "all"}, "show must be one of 'top', 'target'; got 'all'"),
    ],
)
def test_what_is_no_one_lens(change, asked, message):
    with pytest.raises(InputError, match=message):
        figures.lens(schema.apply(change(lens_table()), "lens"), **asked)


def test_effects_are_points_of_means_over_prompts_and_the_line_is_the_diagonal():
    df = effects_table()
    ax = figures.effects(df, top=2)
    means = df.assign(component=df.component.astype(str)).groupby(["component", "layer", "head"])[["direct", "total"]].mean()
    assert [c.get_label() for c in ax.collections] == ["head", "attention", "MLP"]
    for points, kind in zip(ax.collections, ("head", "attn", "mlp"), strict=True):
        np.testing.assert_allclose(np.sort(points.get_offsets().data, 0), np.sort(means.loc[kind].to_numpy(), 0))
    line = next(line for line in ax.lines if line.get_label() == "no self-repair")
    np.testing.assert_array_equal(line.get_xdata(), line.get_ydata())
    assert ax.get_xlim() == ax.get_ylim()
    assert ax.get_title() == "mean of 3 prompts"
    assert len(ax.texts) == 2
    largest = means.abs().max(axis=1).idxmax()
    named = {"head": f"L{largest[1]} H{largest[2]}", "attn": f"attn {largest[1]}", "mlp": f"MLP {largest[1]}"}[largest[0]]
    assert named in {t.get_text() for t in ax.texts}


def test_effects_against_the_prediction_are_named_by_their_size():
    df = effects_table()
    low = (df["component"] == "mlp") & (df["layer"] == 1)
    ax = figures.effects(df.assign(total=df["total"].where(~low, -50.0)), top=1)
    assert [text.get_text() for text in ax.texts] == ["MLP 1"]


def test_names_of_effects_do_not_cover_one_another():
    """L2 H1 stands left of the middle's right-hand side and attn 2 right of its left-hand side, one line apart."""
    df = effects_table()
    rows = df[(df["component"] != "head") | (df["head"] == 0)].drop_duplicates(["component", "layer", "head"]).head(4)
    rows = rows.assign(direct=[-1.0, 5.0, 2.2, 1.6], total=[-1.0, 5.0, 2.0, 2.0], prompt=0, position=0)
    with figures.style("paper"):
        ax = figures.effects(rows, top=4)
    ax.figure.canvas.draw()
    boxes = [t.get_window_extent() for t in ax.texts]
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(("small", "large", "corner"), [("direct", "total", "lower right"), ("total", "direct", "upper left")])
@pytest.mark.parametrize("columns", [1, 2])
def test_the_legend_of_effects_is_off_the_diagonal_where_points_are_few(small, large, corner, columns):
    rows = effects_table(prompts=1).head(4).assign(**{small: [0.0, -0.2, -2.0, 5.0], large: [12.0, 9.0, -2.0, 4.9]})
    with figures.style("paper", columns):
        ax = figures.effects(rows, top=0)
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent().transformed(ax.transData.inverted())
    assert box.y1 < box.x0 if corner == "lower right" else box.x1 < box.y0
    assert not any(box.contains(*point) for point in rows[["direct", "total"]].to_numpy())


def test_effects_of_one_prompt_say_target_and_method():
    assert figures.effects(effects_table(prompts=1)).get_title() == "“ Paris”, zero ablation"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda df: pd.concat([df, df.assign(method="mean")]), "df must hold one method; got 2"),
        (lambda df: pd.concat([df, df.assign(target=9)]), "df must hold one target and versus a position"),
        (lambda df: pd.concat([df, df]), "df must hold each row once"),
        (lambda df: df.drop(columns="total"), "df must be an effects table with columns total"),
    ],
)
def test_what_is_no_one_effects_table(change, message):
    with pytest.raises(InputError, match=message):
        figures.effects(change(effects_table()))


def test_promoted_tokens_are_bars_up_and_down():
    df = promotes_table()
    ax = figures.promotes(df, top=3)
    widths = [bar.get_width() for bar in ax.patches]
    kept = df[df.k < 3].sort_values("contribution", ascending=False)
    assert widths == kept.contribution.to_list()
    assert [t.get_text() for t in ax.get_yticklabels()] == [f"“{t}”" for t in kept.target_token]
    assert ax.get_title() == "MLP 2 after “ of”"
    colours = [bar.get_facecolor() for bar in ax.patches]
    assert len(set(colours)) == 2
    assert len(set(colours[:3])) == 1


def test_long_runs_of_spaces_are_counted():
    df = promotes_table()
    df["target_token"] = df["target_token"].astype(str).where(df.k > 0, "\n" + 22 * " ")
    assert "“\\n␣×22”" in {t.get_text() for t in figures.promotes(df).get_yticklabels()}


def test_promoted_tokens_of_several_places_are_refused():
    df = promotes_table()
    with pytest.raises(InputError, match="one component at one position of one prompt; got 2 that differ in layer: select one"):
        figures.promotes(schema.apply(pd.concat([df, df.assign(layer=3)]), "promotes"))
    with pytest.raises(InputError, match="top must be a whole number, 1 or more; got 0"):
        figures.promotes(df, top=0)


@pytest.mark.parametrize(("make", "table"), [("lens", lens_table), ("effects", effects_table), ("promotes", promotes_table)])
@pytest.mark.parametrize("columns", [1, 2])
def test_they_draw_into_given_axes_and_save(make, table, columns, tmp_path):
    with figures.style("paper", columns):
        ax = getattr(figures, make)(table())
        assert getattr(figures, make)(table(), ax=ax.figure.add_subplot()) is not ax
        assert figures.save(getattr(figures, make)(table()), tmp_path / "x", "png")[0].stat().st_size > 1000


def test_shares_of_a_log_probability_are_in_nats(attribution):
    df = attribution(prompts=1).assign(versus=-1, versus_token="", log_probability=-1.0)
    ax = figures.waterfall(schema.apply(df, "attribution"))
    assert ax.get_xlabel() == "nats, summed from the top"
    assert ax.get_yticklabels()[-1].get_text() == "log p + entropy"
    assert figures.heads(schema.apply(df, "attribution")).figure.axes[1].get_ylabel().startswith("contribution (nats")
