"""Models of several vectors a token: whole blocks removed, pruned and rearranged, against forward passes with plain hooks.

Hooks here know the blocks' list only: neither the axes of a stream nor what replays keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import UnsupportedModelError
from streamlens.stream import changes
from streamlens.stream.replay import Replay
from streamlens.stream.unembed import Unembed
from tests import zoo
from tests.test_zoo import PROMPTS, WHOLE_BLOCKS

LIMIT = 1e-5
"""Over the largest logit."""

TARGET = 17
READ = {"target": TARGET, "positions": "all", "metrics": "target_logit"}
LONGER = [*PROMPTS, [81, 12, 95, 44, 23, 67], [9], [52, 13, 88], [70, 31]]


@pytest.fixture(scope="module", params=WHOLE_BLOCKS)
def model(request) -> sl.Model:
    return zoo.opened(request.param)


def blocks_of(model):
    return model.module.model.layers


@contextmanager
def removed(model, layers: Iterable[int], late: int = 0, until: int | None = None) -> Iterator[None]:
    """Blocks whose output is their input from position `late` on, before `until`, computed all the same."""
    n_streams = getattr(model.module.config, "altup_num_inputs", 0)

    def gone(block, args, kwargs, out):
        out, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        new, entered = out.clone(), args[0] if args else kwargs["hidden_states"]
        at = (slice(None), slice(None), slice(late, until)) if n_streams else (slice(None), slice(late, until))
        new[at] = entered[at]
        return new if rest is None else (new, *rest)

    handles = [blocks_of(model)[layer].register_forward_hook(gone, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def printed(model, layers: Iterable[int], late: int = 0, until: int | None = None, prompts=PROMPTS) -> list[torch.Tensor]:
    """What the model prints for each prompt by itself, without these blocks."""
    with removed(model, layers, late, until):
        return [model.module(input_ids=torch.tensor([p]), use_cache=False).logits[0].double() for p in prompts]


def gap(rows, truth: list[torch.Tensor], column: str = "ablated") -> float:
    """How far a table's logits of the target are from printed ones, over the largest."""
    found = rows.sort_values(["prompt", "position"])[column].to_numpy()
    return float(np.abs(found - torch.cat([t[:, TARGET] for t in truth]).numpy()).max() / torch.cat(truth).abs().max())


# -- what is found ------------------------------------------------------------------------------------------------------
def test_axes_are_those_of_the_family(model):
    altup = model.module.config.model_type == "gemma3n_text"
    assert model.anatomy.n_streams == 4
    assert model.anatomy.stream_axes == ((1, 2) if altup else (0, 1))
    assert model.anatomy.d_model == zoo.D_MODEL
    assert model.anatomy.bypass == (not getattr(model.module.config, "num_kv_shared_layers", 0))
    assert model.proof.replay <= LIMIT
    assert model.proof.printed <= LIMIT


def test_loading_leaves_the_model_as_it_was(model):
    with torch.no_grad():
        plain = [zoo.build(name)(input_ids=torch.tensor([PROMPTS[0]])).logits for name in WHOLE_BLOCKS if zoo.opened(name) is model]
        assert torch.equal(model.module(input_ids=torch.tensor([PROMPTS[0]])).logits, plain[0])
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.module.modules())


# -- removals ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("max_tokens", [1, 30, 1000])
def test_spans_are_hooked_forward_passes(model, max_tokens):
    df = sl.ablate(model, LONGER, span="all", max_tokens=max_tokens, check="full", **READ)
    schema.validate(df, "ablation")
    n = model.n_layers
    assert len(df.drop_duplicates(["layer", "span"])) == n * (n + 1) // 2
    assert gap(df[(df.layer == 0) & (df.span == 1)], printed(model, (), prompts=LONGER), "clean") <= LIMIT
    for (layer, span), rows in df.groupby(["layer", "span"]):
        truth = printed(model, range(layer, layer + span), prompts=LONGER)
        assert gap(rows, truth) <= LIMIT, (layer, span)
        assert abs(rows.delta).max() > 1e-3


def test_removals_at_some_positions_are_hooked_forward_passes(model):
    prompts = [p for p in LONGER if len(p) > 2]
    for max_tokens in (1, 1000):
        df = sl.ablate(model, prompts, at=slice(2, None), max_tokens=max_tokens, **READ)
        for layer, rows in df.groupby("layer"):
            assert gap(rows, printed(model, [layer], late=2, prompts=prompts)) <= LIMIT
            assert abs(rows[rows.position < 2].delta).max() <= LIMIT * abs(rows.clean).max()


def test_removals_at_each_position_in_turn_are_hooked_forward_passes(model):
    df = sl.ablate(model, PROMPTS, layers=1, at="each", **READ)
    for at, rows in df.groupby("at"):
        truth = printed(model, [1], at, at + 1)
        assert gap(rows, [t for t, p in zip(truth, PROMPTS, strict=True) if at < len(p)]) <= LIMIT


def test_named_sets_of_blocks_are_hooked_forward_passes(model):
    sets = {"ends": [0, model.n_layers - 1], "start": [0, 1]}
    df = sl.ablate(model, LONGER, layers=sets, **READ)
    for name, layers in sets.items():
        assert gap(df[df["together"] == name], printed(model, layers, prompts=LONGER)) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("size", [2, 4])  # four: as many prompts as vectors a token, and as heads
def test_replays_in_any_order_batched_or_not_are_hooked_forward_passes(model, size):
    anatomy, prompts = model.anatomy, (LONGER[:4] if size == 4 else PROMPTS)
    length = max(map(len, prompts))
    mask = torch.tensor([[i < len(p) for i in range(length)] for p in prompts])
    ids = torch.tensor([p + [0] * (length - len(p)) for p in prompts])
    late = (torch.arange(length) > 1).expand(size, length)
    n = anatomy.n_layers
    sets = [(layer,) for layer in range(n)] + [(0, n - 1), (1, 2), tuple(range(1, n))]
    made = {(s, at): [changes.block(anatomy, i, at=late if at else None) for i in s] for s in sets for at in (0, 2)}
    unembed = Unembed(model.module.get_submodule(anatomy.unembed), anatomy.logits)
    truth = {key: torch.cat(printed(model, *key, prompts=prompts)) for key in made}

    def demand(key, hidden):
        assert float((unembed.logits(hidden[mask]) - truth[key]).abs().max() / truth[key].abs().max()) <= LIMIT, key

    with Replay(model.module, anatomy) as replay:
        replay.record(ids, mask)
        for key in (*made, *reversed(made)):
            demand(key, replay.changed(*made[key]))
        for start in range(0, len(made), 5):
            some = list(made)[start : start + 5]
            for key, hidden in zip(some, replay.each([made[k] for k in some]), strict=True):
                demand(key, hidden)


@pytest.mark.parametrize("keep", [sl.Keep(limit=0), sl.Keep(dtype=torch.float64)])
def test_streams_kept_elsewhere_change_nothing(model, keep):
    plain, kept = (sl.ablate(model, LONGER, keep=k, max_tokens=60, **READ) for k in (None, keep))
    assert np.array_equal(plain.ablated, kept.ablated)


def test_a_sweep_resumes_from_what_is_finished(model, tmp_path):
    first = sl.ablate(model, LONGER, span=[1, 2], resume=tmp_path, max_tokens=30, **READ)
    again = sl.ablate(model, LONGER, span=[1, 2], resume=tmp_path, max_tokens=30, **READ)
    assert np.array_equal(first.ablated, again.ablated)
    assert np.array_equal(first.ablated, sl.ablate(model, LONGER, span=[1, 2], max_tokens=30, **READ).ablated)


# -- orders --------------------------------------------------------------------------------------------------------------
def test_greedy_pruning_takes_the_block_that_costs_least(model):
    df = sl.prune(model, PROMPTS, steps=2, metrics="loss")
    left, gone = set(range(model.n_layers)), []
    for n in (1, 2):
        losses = {layer: _loss(printed(model, [*gone, layer])) for layer in left - set(gone)}
        gone.append(min(losses, key=losses.get))
        rows = df[df.n_removed == n]
        assert rows.layer.unique().tolist() == [gone[-1]]
        assert abs(rows.groupby("prompt").ablated.mean().mean() - losses[gone[-1]]) <= LIMIT * losses[gone[-1]]


def _loss(logits: list[torch.Tensor]) -> float:
    """Mean over prompts of the mean over positions."""
    each = [-z.log_softmax(-1)[:-1].gather(-1, torch.tensor(p[1:])[:, None]).mean() for z, p in zip(logits, PROMPTS, strict=True)]
    return float(torch.stack(each).mean())


def test_random_and_own_orders_are_pruned(model):
    df = sl.prune(model, PROMPTS, {"mine": [1, 0]}, **READ)
    for n, gone in enumerate(([1], [1, 0]), 1):
        assert gap(df[df.n_removed == n], printed(model, gone)) <= LIMIT
    assert set(sl.prune(model, PROMPTS, "random", n_samples=2, metrics="loss")["sample"]) == {0, 1}


def test_orders_are_those_of_blocks_called_in_that_order(model):
    orders = {"same": list(range(model.n_layers)), "swap": [1, 0, *range(2, model.n_layers)], "twice": [0, 1, 1, 2], "short": [2]}
    if not model.anatomy.bypass:
        with pytest.raises(UnsupportedModelError, match="share keys and values, and no order but its own makes them"):
            sl.rearrange(model, PROMPTS, orders, **READ)
        return
    if model.module.config.model_type == "hy_v4":  # a layer's choice of keys serves the next one too
        with pytest.raises(UnsupportedModelError, match="hands more than its stream to the next"):
            sl.rearrange(model, PROMPTS, orders, **READ)
        return
    df = sl.rearrange(model, PROMPTS, orders | {"parallel": [0, (1, 2)]}, **READ)
    for name, order in (orders | {"parallel": [0, (1, 2)]}).items():
        assert gap(df[df.blocks == name], _in_order(model, order)) <= LIMIT, name
        assert (abs(df[df.blocks == name].delta).max() > 1e-3) == (name != "same")


@torch.no_grad()
def _in_order(model, order) -> list[torch.Tensor]:
    """Printed logits where the first block runs the whole order, each block on its own arguments, and the others hand on."""
    blocks, given = blocks_of(model), {}
    forwards = [block.forward for block in blocks]

    def keep(layer):
        return lambda x, *args, **kwargs: given.__setitem__(layer, (args, kwargs)) or forwards[layer](x, *args, **kwargs)

    def run(layer, x):
        args, kwargs = given[layer]
        return forwards[layer](x, *args, **{k: {} if k == "shared_kv_states" else v for k, v in kwargs.items()})

    def all_of_them(x, *args, **kwargs):
        for item in order:
            x = torch.stack([run(i, x) for i in item]).mean(0) if isinstance(item, tuple) else run(item, x)
        return x

    out = []
    for prompt in PROMPTS:
        try:
            for layer, block in enumerate(blocks):
                block.forward = keep(layer)
            model.module(input_ids=torch.tensor([prompt]), use_cache=False)
            for layer, block in enumerate(blocks):
                block.forward = all_of_them if layer == 0 else lambda x, *args, **kwargs: x
            out.append(model.module(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].double())
        finally:
            for block in blocks:
                del block.forward
    return out


# -- the rest ------------------------------------------------------------------------------------------------------------
def test_a_model_of_its_own_without_blocks_is_the_replay_or_refused(model):
    if model.module.config.model_type == "gemma3n_text":
        with pytest.raises(UnsupportedModelError, match=r"depends on the number of layers|is refused"):
            sl.without_blocks(model, [1])
        return
    shorter = sl.without_blocks(model, [2])
    with torch.no_grad():
        for prompt, truth in zip(PROMPTS, printed(model, [2]), strict=True):
            found = shorter(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
            assert float((found - truth).abs().max() / truth.abs().max()) <= LIMIT


def test_the_card_says_what_is_known(model):
    card = sl.card(model).iloc[0]
    assert (card.streams, card.n_layers, card.d_model) == (4, model.n_layers, zoo.D_MODEL)
    assert card.norm.startswith("rmsnorm")
    assert (card.norm_placement, card.writes_per_layer) == ("unknown", "unknown")
    assert np.isnan(card.residual_multiplier)


def test_it_still_generates(model):
    ids = torch.tensor([PROMPTS[0]])
    out = model.module.generate(ids, max_new_tokens=3, do_sample=False)
    assert out.shape == (1, ids.shape[1] + 3)
    assert int(out[0, ids.shape[1]]) == int(printed(model, ())[0][-1].argmax())


def test_a_plan_counts_every_vector(model):
    plan = sl.plan(sl.ablate, model, PROMPTS, span="all").iloc[0]
    assert plan.variants == model.n_layers * (model.n_layers + 1) // 2
    assert plan.memory > 4 * 4 * model.n_layers * 14 * zoo.D_MODEL


REFUSED = {
    "attribute": lambda m: sl.attribute(m, PROMPTS),
    "norms": lambda m: sl.norms(m, PROMPTS),
    "decompose_norm": lambda m: sl.decompose_norm(m, PROMPTS),
    "depth_use": lambda m: sl.depth_use(m, PROMPTS),
    "gradient_norms": lambda m: sl.gradient_norms(m, PROMPTS),
    "effects": lambda m: sl.effects(m, PROMPTS, target=TARGET),
    "similarity": lambda m: sl.similarity(m, PROMPTS),
    "lens": lambda m: sl.lens(m, PROMPTS),
    "promotes": lambda m: sl.promotes(m, PROMPTS, component="embed"),
    "record": lambda m: sl.record(m, PROMPTS, sites=["resid_pre"]),
    "attn": lambda m: sl.ablate(m, PROMPTS, unit="attn"),
    "head": lambda m: sl.ablate(m, PROMPTS, unit="head", method="zero"),
    "mlp": lambda m: sl.plan(sl.ablate, m, PROMPTS, unit="mlp"),
    "mean": lambda m: sl.ablate(m, PROMPTS, method="mean", reference=PROMPTS),
    "resample": lambda m: sl.ablate(m, PROMPTS, method="resample", reference=PROMPTS),
    "gradient": lambda m: sl.ablate(m, PROMPTS, method="gradient", target=TARGET),
    "shortgpt": lambda m: sl.prune(m, PROMPTS, "shortgpt"),
    "angular": lambda m: sl.prune(m, PROMPTS, ["greedy", "angular"]),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_needs_one_stream_is_refused_in_a_sentence(call):
    for name in ("gemma3n_shared_kv", "hy_v4"):
        with pytest.raises(UnsupportedModelError, match=r"keeps 4 vectors a token .* only whole blocks can be changed"):
            REFUSED[call](zoo.opened(name))
