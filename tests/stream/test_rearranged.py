"""Orders of blocks against module lists that are really reordered, and what is refused."""

import pytest
import torch
from torch import nn

import streamlens as sl
from streamlens import orders, schema
from streamlens.errors import InputError, UnsupportedModelError
from tests import zoo
from tests.models import tiny
from tests.tolerances import REPLAY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21], [44, 6]]
READ = {"target": 11, "positions": "all", "metrics": "target_logit"}
ORDERS = {"swap": [0, 2, 1], "short": [2], "twice": [0, 1, 1, 2, 0], "same": [0, 1, 2]}


def reordered(model, order):
    """Logits of target 11 by the model's own forward over a list of blocks put in this order."""
    stack = model.anatomy.block_paths[0].rpartition(".")[0]
    parent, _, name = stack.rpartition(".")
    holder, blocks = model.module.get_submodule(parent), model.module.get_submodule(stack)
    config = model.module.config
    before = config.num_hidden_layers
    holder._modules[name] = nn.ModuleList([blocks[i] for i in order])
    config.num_hidden_layers = len(order)
    try:
        with torch.no_grad():
            return [model.module(torch.tensor([ids]), use_cache=False).logits[0, :, 11].double() for ids in PROMPTS]
    finally:
        holder._modules[name] = blocks
        config.num_hidden_layers = before


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2", "bloom", "opt-post-norm", "mixtral"])
def test_orders_are_those_of_reordered_module_lists(family):
    model = sl.load(tiny.model(family))
    df = sl.rearrange(model, PROMPTS, ORDERS, max_tokens=1000, **READ)
    schema.validate(df, "ablation")
    assert df.method.unique().tolist() == ["rearrange"]
    for name, order in ORDERS.items():
        rows = df[df.blocks == name].sort_values(["prompt", "position"])
        truth = torch.cat(reordered(model, order)).numpy()
        assert abs(rows.ablated.to_numpy() - truth).max() <= REPLAY * abs(truth).max()
        assert abs(rows.delta).max() < 1e-5 if name == "same" else abs(rows.delta).max() > 1e-3


def test_blocks_keep_their_own_masks():
    """Gemma-2's windows alternate: its list cannot be reordered without them, so the truth takes the blocks out of their places."""
    model = tiny.proven("gemma2")
    df = sl.rearrange(model, PROMPTS, {"without 1": [0, 2], "run twice": [0, 1, 2, 2]}, **READ)
    removed = sl.ablate(model, PROMPTS, layers=1, **READ)
    assert abs(df[df.blocks == "without 1"].ablated.to_numpy() - removed.ablated.to_numpy()).max() < 1e-5
    assert abs(df[df.blocks == "run twice"].delta).max() > 1e-3


def test_parallel_blocks_give_the_mean_of_their_outputs():
    model = tiny.proven("llama")
    df = sl.rearrange(model, PROMPTS, [0, (1, 2), 2], **READ)
    assert df.blocks.unique().tolist() == ["0 (1 2) 2"]
    blocks, mean = model.module.model.layers, {}

    def both(part, args, kwargs, out):  # block 1 gives the mean of itself and block 2 on its input
        return (out + blocks[2].forward(*args, **kwargs)) / 2

    handle = blocks[1].register_forward_hook(both, with_kwargs=True)
    try:
        with torch.no_grad():
            mean = torch.cat([model.module(torch.tensor([ids]), use_cache=False).logits[0, :, 11].double() for ids in PROMPTS])
    finally:
        handle.remove()
    assert abs(df.ablated.to_numpy() - mean.numpy()).max() < 1e-5


def test_helpers_make_the_orders_of_the_literature():
    assert orders.swap(5, 1) == [0, 2, 1, 3, 4]
    assert orders.without(5, 0, 3) == [1, 2, 4]
    assert orders.reverse(6, 1, 4) == [0, 4, 3, 2, 1, 5]
    assert orders.repeat_middle(6, 1, 4) == [0, 3, 3, 3, 3, 5]
    assert orders.parallel_middle(6, 2, 4) == [0, 1, (2, 3, 4), 5]
    assert orders.parallel_middle(6, 2, 4, times=2) == [0, 1, (2, 3, 4), (2, 3, 4), 5]
    assert orders.random_deletions(8, 3, seed=1) == orders.random_deletions(8, 3, seed=1)
    assert len(orders.random_deletions(8, 3)) == 5
    mixed = orders.shuffle(8, 2, 6, seed=4)
    assert (mixed[:2], mixed[7:], sorted(mixed)) == ([0, 1], [7], list(range(8)))
    with pytest.raises(InputError, match="layer must be from 0 to 3; got 4"):
        orders.swap(5, 4)
    with pytest.raises(InputError, match="first must not lie behind last"):
        orders.reverse(5, 3, 2)
    with pytest.raises(InputError, match="k must leave a block of 4; got 4"):
        orders.random_deletions(4, 4)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([0, 3], "from 0 to 2; got 3"),
        ([], "must be a list"),
        ("reverse", "must be a list"),
        ([0, ()], "in an inner tuple"),
        ({}, "one order"),
    ],
)
def test_bad_orders_get_one_line(order, says):
    with pytest.raises(InputError, match=f"order .*{says}"):
        sl.rearrange(tiny.proven("llama"), PROMPTS, order)


def test_a_cache_among_the_arguments_is_fresh_for_every_order():
    model = sl.load(zoo.build("granitemoe"))
    df = sl.rearrange(model, PROMPTS, {"same": [0, 1, 2], "without 1": [0, 2]}, **READ)
    assert abs(df[df.blocks == "same"].delta).max() < 1e-4
    removed = sl.ablate(model, PROMPTS, layers=1, **READ)
    assert abs(df[df.blocks == "without 1"].ablated.to_numpy() - removed.ablated.to_numpy()).max() < 1e-4


@pytest.mark.parametrize(("name", "why"), [("gemma4_shared_kv", "share keys and values"), ("rwkv", "something stands between its blocks")])
def test_families_whose_blocks_do_not_simply_follow_one_another_are_refused(name, why):
    with pytest.raises(UnsupportedModelError, match=why):
        sl.rearrange(sl.load(zoo.build(name)), PROMPTS, [1, 0])
