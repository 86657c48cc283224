"""Rank agreement: known orders, ties, intervals that resample prompts, and what is refused."""

import itertools

import numpy as np
import pandas as pd
import pytest

from streamlens import schema, stats
from streamlens.errors import InputError
from streamlens.stats.ranks import paired_means


def ablation(values, span=1, method="remove", **columns):
    """`values` [prompt, layer] as the deltas of an ablation table, the same at three positions but for noise that cancels."""
    rows = [
        {"prompt": p, "position": t, "layer": layer, "delta": value + (t - 1) * 0.1}
        for (p, layer), value in np.ndenumerate(np.asarray(values, dtype=float))
        for t in range(3)
    ]
    df = pd.DataFrame(rows).assign(clean=1.0, unit="block", method=method, sublayer=-1, head=-1, span=span, metric="loss", token="x")
    df = df.assign(prompt_text="p", target=-1, target_token="", versus=-1, versus_token="", **columns)
    return schema.apply(df.assign(ablated=df["clean"] + df["delta"]), "ablation")


def similarity(values, measure="block_influence"):
    rows = [
        {"prompt": p, "position": t, "layer": layer, "value": value if t else 1e6 * (-1) ** layer}
        for (p, layer), value in np.ndenumerate(np.asarray(values, dtype=float))
        for t in range(3)
    ]
    df = pd.DataFrame(rows).assign(measure=measure, token="x", prompt_text="p")
    return schema.apply(df.assign(layer_to=df["layer"] + 1), "similarity")


def naive(a, b):
    """Kendall's tau-b by counting pairs, Spearman's rho from mean ranks."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    s = [(np.sign(a[i] - a[j]), np.sign(b[i] - b[j])) for i, j in pairs]
    tau = sum(x * y for x, y in s) / np.sqrt(sum(x * x for x, _ in s) * sum(y * y for _, y in s))
    ranks = [pd.Series(v).rank().to_numpy() for v in (a, b)]
    return np.corrcoef(*ranks)[0, 1], tau


@pytest.mark.parametrize(
    ("a", "b"),
    [([1, 2, 3, 4], [10, 20, 30, 40]), ([1, 2, 3, 4], [4, 3, 2, 1]), ([3, 1, 1, 2, 5], [1, 1, 2, 8, 3]), ([1, 5, 2, 4], [2, 2, 1, 9])],
)
def test_point_values(a, b):
    row = stats.rank_agreement(ablation([a, a]), similarity([b, b])).iloc[0]
    assert (row.spearman, row.kendall) == pytest.approx(naive(np.array(a), np.array(b)))
    assert (row.n_units, row.n_prompts, row.measure, row.unit) == (len(a), 2, "block_influence", "block")
    assert (row.spearman_low, row.spearman_high) == pytest.approx((row.spearman, row.spearman))  # the prompts are alike


def test_the_interval_resamples_prompts_and_ranks_again():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(12, 6)) + 0.2 * np.arange(6) for _ in range(2))
    row = stats.rank_agreement(ablation(a), similarity(b), n_boot=400, seed=5).iloc[0]
    drawn = np.random.default_rng(5).multinomial(12, np.full(12, 1 / 12), size=400) / 12
    both = np.array([naive(w @ a, w @ b) for w in drawn])
    for i, name in enumerate(("spearman", "kendall")):
        assert (row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx(np.quantile(both[:, i], [0.025, 0.975]))
    assert row.spearman_low < row.spearman <= row.spearman_high


def test_one_prompt_has_no_interval():
    row = stats.rank_agreement(ablation([[1, 2, 3]]), similarity([[1, 2, 4]])).iloc[0]
    assert row.kendall == pytest.approx(1)
    assert np.isnan(row.kendall_low)


def test_position_0_is_left_out_of_the_similarity_unless_asked():
    a, b = ablation([[1, 2, 3]]), similarity([[1, 2, 3]])
    assert stats.rank_agreement(a, b).spearman.iloc[0] == pytest.approx(1)
    assert stats.rank_agreement(a, b, skip_first=False).spearman.iloc[0] < 1


def test_first_positions_are_taken_where_there_are_no_others():
    first = similarity([[1, 2, 3]])
    first = first[first.position == 0]
    row = stats.rank_agreement(ablation([[1, 2, 3]]), first).iloc[0]
    assert (row.spearman, row.kendall) == pytest.approx(naive(np.array([1, 2, 3]), np.array([1, -1, 1])))


def test_paired_means_leave_out_position_0_unless_asked():
    a, b = ablation([[1, 2, 3], [3, 4, 5]]), similarity([[1, 2, 3], [3, 4, 5]])
    points = paired_means(a, b, "block_influence")
    assert (points.truth.tolist(), points.estimate.tolist()) == (pytest.approx([2, 3, 4]), pytest.approx([2, 3, 4]))
    first = [1e6, -1e6, 1e6]  # a third of the positions
    every = paired_means(a, b, "block_influence", skip_first=False).estimate.tolist()
    assert every == pytest.approx([(2 * later + at_0) / 3 for later, at_0 in zip([2, 3, 4], first, strict=True)])


def test_a_layer_that_a_prompt_lacks_is_not_ranked():
    a, b = ablation([[1, 2, 3, 4, 0], [2, 3, 1, 4, 9]]), similarity([[1, 2, 3, 4, 0], [1, 2, 3, 4, 0]])
    lacking = stats.rank_agreement(a[(a.prompt == 0) | (a.layer < 4)], b)
    pd.testing.assert_frame_equal(lacking, stats.rank_agreement(a[a.layer < 4], b))
    assert lacking.n_units.tolist() == [4]


def test_resampling_in_pieces_loses_no_replicate(monkeypatch):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(12, 6)) for _ in range(2))
    whole = stats.rank_agreement(ablation(a), similarity(b), n_boot=40)
    monkeypatch.setattr(stats.ranks, "CELLS", 36 * 21)  # 21 replicates at a time, and 19
    pd.testing.assert_frame_equal(stats.rank_agreement(ablation(a), similarity(b), n_boot=40), whole)


def test_each_unit_is_ranked_by_itself():
    """attn and mlp of a layer have the same place in the table."""
    orders = {"attn": [[1, 2, 3, 4]], "mlp": [[9, 7, 3, 1]]}
    tables = [
        pd.concat([ablation(order, method=method).assign(unit=unit, sublayer=0) for unit, order in orders.items()])
        for method in ("remove", "gradient")
    ]
    rows = stats.rank_agreement(*tables)
    assert rows.unit.tolist() == ["attn", "mlp"]
    assert rows.kendall.tolist() == pytest.approx([1, 1])


def test_spans_are_held_against_pairs_of_the_same_length():
    spans = pd.concat([ablation([[1, 2, 3]]), ablation([[4, 5]], span=2)])
    pairs = similarity([[1, 2, 3]], "angular_distance")
    longer = similarity([[0.5, 9]], "angular_distance").assign(layer_to=lambda d: d["layer"] + 2)
    row = stats.rank_agreement(spans, pd.concat([pairs, longer])).iloc[0]
    assert row.n_units == 5
    assert (row.spearman, row.kendall) == pytest.approx(naive(np.array([1, 2, 3, 4, 5]), np.array([1, 2, 3, 0.5, 9])))


def test_an_estimate_is_held_against_the_exact_sweep():
    row = stats.rank_agreement(ablation([[1, 2, 3, 4]]), ablation([[1, 3, 2, 4]], method="gradient")).iloc[0]
    assert (row.measure, row.kendall) == ("gradient", pytest.approx(4 / 6))


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="must share their prompts and three blocks or more; got 2 blocks"):
        stats.rank_agreement(ablation([[1, 2]]), similarity([[1, 2]]))
    with pytest.raises(InputError, match="must share their prompts"):
        stats.rank_agreement(ablation([[1, 2, 3]]), similarity([[1, 2, 3], [1, 2, 3]]))
    with pytest.raises(InputError, match="metric must be one of 'loss'; got 'kl'"):
        stats.rank_agreement(ablation([[1, 2, 3]]), similarity([[1, 2, 3]]), metric="kl")
    two = pd.concat([ablation([[1, 2, 3]]), ablation([[1, 2, 3]], method="mean")])
    with pytest.raises(InputError, match="ablation must hold one method; got 2"):
        stats.rank_agreement(two, similarity([[1, 2, 3]]))
    sets = pd.concat([ablation([[1, 2, 3]]).assign(together=name) for name in "ab"])
    with pytest.raises(InputError, match="ablation must hold one together; got 2"):
        stats.rank_agreement(sets, similarity([[1, 2, 3]]))


def test_perplexity_is_exp_of_the_mean_loss():
    losses = ablation([[0.5, 1.0], [1.5, 2.0]])
    df = stats.perplexity(losses)
    assert df.layer.tolist() == [0, 1]
    assert df.clean.tolist() == pytest.approx([np.e, np.e])
    assert df.ablated.tolist() == pytest.approx(np.exp([2.0, 2.5]))
    assert df.ratio.tolist() == pytest.approx(np.exp([1.0, 1.5]))
    assert df.ratio_low.tolist() == pytest.approx(np.exp([0.5, 1.0]))
    assert df.ratio_high.tolist() == pytest.approx(np.exp([1.5, 2.0]))
    assert (df.low.tolist(), df.high.tolist()) == (pytest.approx(np.exp([1.5, 2.0])), pytest.approx(np.exp([2.5, 3.0])))
    assert df.n.tolist() == [2, 2]
    pd.testing.assert_frame_equal(stats.perplexity(pd.concat([losses, losses.assign(metric="kl", clean=0.0)])), df)
    with pytest.raises(InputError, match="ablation must hold the metric loss"):
        stats.perplexity(ablation([[1.0]]).assign(metric="kl"))
