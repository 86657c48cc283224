"""Pruning orders: the greedy one by brute force, those of the literature from their own measures."""

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import orders, schema
from streamlens.errors import InputError
from streamlens.measure.pruning import alike_runs, greedy
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]


@pytest.fixture(scope="module")
def model():
    return sl.load(tiny.model("llama", num_hidden_layers=5))


@pytest.fixture(scope="module")
def table(model):
    return sl.prune(model, PROMPTS, ["greedy", "shortgpt", "angular", "random"], metrics="loss", n_samples=2, seed=1)


def loss_without(model, removed):
    """Mean over prompts of the mean loss, of a model that really lacks these blocks."""
    module = sl.without_blocks(model, list(removed))
    with torch.no_grad():
        return np.mean([float(module(torch.tensor([ids]), labels=torch.tensor([ids]), use_cache=False).loss) for ids in PROMPTS])


def mean_loss(rows):
    return rows.groupby("prompt").ablated.mean().mean()


def test_the_greedy_order_is_that_of_brute_force(model, table):
    schema.validate(table, "ablation")
    rows, gone = table[table.method == "greedy"], []
    for n in range(1, 5):
        costs = {i: loss_without(model, [*gone, i]) for i in range(5) if i not in gone}
        gone.append(min(costs, key=costs.get))
        mine = rows[rows.n_removed == n]
        assert mine.layer.unique().tolist() == [gone[-1]]
        assert mean_loss(mine) == pytest.approx(costs[gone[-1]], abs=1e-5)


def test_the_shortgpt_order_is_by_block_influence(model, table):
    similar = sl.similarity(model, PROMPTS, measures="block_influence")
    means = similar[similar.position > 0].groupby(["prompt", "layer"]).value.mean().groupby("layer").mean()
    rows = table[table.method == "shortgpt"]
    assert rows.groupby("n_removed").layer.first().tolist() == means.sort_values().index.tolist()[:4]
    removed = means.sort_values().index.tolist()[:3]
    assert mean_loss(rows[rows.n_removed == 3]) == pytest.approx(loss_without(model, removed), abs=1e-5)


def test_the_shortgpt_order_leaves_the_first_token_out(model):
    prompts = [[3, 5, 23, 50], [24, 47, 19, 15]]  # with it, blocks 1 and 2 would change places
    similar = sl.similarity(model, prompts, measures="block_influence")
    first, rest = (
        rows.groupby(["prompt", "layer"]).value.mean().groupby("layer").mean() for rows in (similar, similar[similar.position > 0])
    )
    found = sl.prune(model, prompts, "shortgpt", metrics="loss").groupby("n_removed").layer.first().tolist()
    assert found == rest.sort_values().index.tolist()[:4]
    assert found != first.sort_values().index.tolist()[:4]


def test_the_angular_order_is_the_best_run_of_each_length(model, table):
    similar = sl.similarity(model, PROMPTS, "last", measures="angular_distance")
    means = similar.groupby(["layer", "layer_to"]).value.mean()
    rows = table[table.method == "angular"]
    for n in range(1, 5):
        best = min(range(6 - n), key=lambda layer: means[layer, layer + n])
        mine = rows[rows.n_removed == n]
        assert (mine.layer.unique().tolist(), mine.span.unique().tolist()) == ([best], [n])
        assert mean_loss(mine) == pytest.approx(loss_without(model, range(best, best + n)), abs=1e-5)


def test_random_orders_are_seeded(model, table):
    again = sl.prune(model, PROMPTS, "random", metrics="loss", n_samples=2, seed=1)
    mine = table[table.method == "random"]
    assert mine.layer.tolist() == again.layer.tolist()
    assert again["sample"].unique().tolist() == [0, 1]
    assert (table[table.method != "random"].seed == -1).all()


def test_an_order_of_ones_own(model):
    df = sl.prune(model, PROMPTS, {"mine": [4, 2, 0]}, metrics="loss")
    assert df.groupby("n_removed").layer.first().tolist() == [4, 2, 0]
    run = sl.rearrange(model, PROMPTS, orders.without(5, 2, 4), metrics="loss")
    pd.testing.assert_series_equal(
        df[df.n_removed == 2].ablated.reset_index(drop=True), run.ablated, check_names=False, rtol=1e-5, atol=1e-5
    )


def test_greedy_looks_at_what_is_left():
    costs = {(0,): 3, (1,): 1, (2,): 2, (1, 0): 5, (1, 2): 9}
    assert [s.removed for s in greedy(3, 2, lambda sets: np.array([costs[s] for s in sets], dtype=float))] == [(1,), (0, 1)]


def test_runs_are_those_least_apart():
    distance = {(0, 1): 0.3, (1, 2): 0.1, (2, 3): 0.2, (0, 2): 0.4, (1, 3): 0.5}
    assert [(s.layer, s.span) for s in alike_runs(distance, 3, 2)] == [(1, 1), (0, 2)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"order": "best"}, "order must be one of 'greedy', 'shortgpt', 'angular', 'random'; got 'best'"),
        ({"order": {"mine": [1, 1]}}, "order 'mine' must be a list of different layers"),
        ({"order": {"mine": [1]}, "steps": 2}, "order 'mine' must name steps=2 blocks or more; got 1"),
        ({"steps": 5}, "steps must be a number of blocks from 1 to 4; got 5"),
        ({"cost": "top1_agree"}, "cost must be one of 'loss', 'kl', 'js'"),
        ({"positions": "last"}, "cost='loss' has no inputs"),
    ],
)
def test_bad_input_gets_one_line(model, arguments, says):
    with pytest.raises(InputError, match=says):
        sl.prune(model, PROMPTS, **arguments)
