"""The whole contract on every architecture of the zoo, against forward passes that know nothing of streamlens.

The sum rule alone is blind to a row that has swallowed the stream. So every row is also zeroed by itself, heads are put
together from the projection's own columns, blocks are removed by plain hooks, and the stream is followed block by block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import streamlens as sl
from streamlens import schema
from streamlens.errors import UnsupportedModelError
from streamlens.measure.attribution import Component, attribute_batch, components
from streamlens.measure.promotes import sources
from streamlens.models.anatomy import Anatomy, Layer, Write
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream import changes
from streamlens.stream.clamp import Clamp
from streamlens.stream.replay import Replay
from streamlens.stream.unembed import Unembed
from tests import hooked, slowgrowth, zoo

SUM, MOVED, HEADS, REPLAY, STREAM, PRINTED, ALIGNED = 5e-6, 2e-5, 1e-5, 2e-5, 1e-5, 2e-5, 5e-6
"""Limits: the first two relative to sum|parts|, the others to the largest value that is compared."""

PROMPTS = [[15, 26, 37, 48, 59, 61, 72], [33, 44, 55, 66]]
TARGET = [17, 41]

_NO_STREAM = "the stream is not its input plus its writes"
REFUSED: dict[str, str] = {
    "cpmant": "an embedding gives .* not one vector a token",  # puts 32 tokens of its own before the prompt
    "git": _NO_STREAM,  # BERT's blocks: modules that return the norm of stream plus write
    "reformer": "its forward pass fails while it is watched",  # reversible layers: a backward pass of their own
    "blt": _NO_STREAM,  # bytes, patches and tokens: four transformers in one
    "modernbert_decoder": "contributions miss the logit",  # a dense layer and a GELU between stream and unembedding
    "hrm_text_cut_gradients": _NO_STREAM,  # some of its cycles run without gradients
    "qwen4_exp": _NO_STREAM,
    "inkling2": "contributions miss the logit",  # attends to its earlier streams instead of adding to one
    "inkling2_loop": "contributions miss the logit",
    "dory": _NO_STREAM,  # blocks that move the stream along the unit sphere
}
"""Variants that cannot be read exactly, and what the refusal says."""

WITHOUT_HEADS: dict[str, tuple[int, ...]] = {"jetmoe": (0, 1, 2)}
"""Layers whose attention is one row: its output projection is not one linear map of concatenated heads."""

OPEN = (
    "gpt_neox_japanese",
    "ctrl",
    "doge",
    "doge_moe",
    "zaya",
    "zaya_sliding",
    "hrm_text",
)
"""Variants that are not served yet, and refused meanwhile."""

WHOLE_BLOCKS = ("gemma3n", "gemma3n_shared_kv", "gemma3n_sparse", "hy_v4", "deepseek_v4", "deepseek_v4_compressed")
"""Variants of several vectors a token (AltUp, hyper-connections), whose blocks can be changed as a whole: see test_streams."""

SERVED = [name for name in zoo.VARIANTS if name not in (*REFUSED, *OPEN, *WHOLE_BLOCKS)]


def test_every_architecture_of_transformers_is_in_the_zoo_or_has_a_reason_not_to_be():
    classes = {zoo.class_of(name) for name in zoo.VARIANTS}
    missing = {kind for kind, cls in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if cls not in classes}
    assert missing == set(zoo.NOT_IN_THE_ZOO)
    assert len(classes) >= 90
    assert len(zoo.VARIANTS) >= 140


@dataclass(frozen=True)
class Case:
    name: str
    model: sl.Model

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @property
    def anatomy(self) -> Anatomy:
        return self.model.anatomy


@pytest.fixture(scope="module", params=SERVED)
def case(request) -> Case:
    return Case(request.param, zoo.opened(request.param))


@pytest.fixture(scope="module")
def printed(case) -> list[Tensor]:
    """What the model prints for each prompt by itself, without padding and without a single hook."""
    with torch.no_grad():
        return [case.module(input_ids=torch.tensor([p]), use_cache=False).logits[0].double() for p in PROMPTS]


# -- rows sum to the logit ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def table(case) -> pd.DataFrame:
    return sl.attribute(case.model, PROMPTS, target=TARGET, positions="all")


def test_rows_sum_to_the_printed_logit(table, printed):
    rows = table.groupby(["prompt", "position"])
    total, size = rows.contribution.sum(), rows.contribution.agg(lambda x: x.abs().sum())
    assert list(total.index) == [(p, i) for p, ids in enumerate(PROMPTS) for i in range(len(ids))]
    assert ((total - rows.logit.first()).abs() / size).max() <= SUM
    for (prompt, position), value in total.items():
        logits = printed[prompt][position]
        error = abs(value - float(logits[TARGET[prompt]]))
        assert error <= SUM * size[prompt, position] + PRINTED * float(logits.abs().max())


def test_rows_are_those_that_the_config_names(case, table):
    one = table[(table.prompt == 0) & (table.position == 0)]
    _one_row_each(one)
    assert (one.component == "embed").sum() == 1
    by_layer = {layer: set(part.component) for layer, part in one.groupby("layer")}
    without = tuple(i for i, layer in enumerate(case.anatomy.layers) if any(w.kind == "attn" and not w.n_heads for w in layer.writes))
    assert without == WITHOUT_HEADS.get(case.name, ())
    kinds = getattr(case.module.config.get_text_config(), "layer_types", None) or []
    for layer, kind in enumerate(kinds) if len(kinds) == case.anatomy.n_layers else ():
        if kind.endswith("_attention") and kind != "linear_attention":
            assert by_layer[layer] & {"head", "attn"}
        elif kind in ("linear_attention", "conv"):
            assert "mixer" in by_layer[layer]
            assert not by_layer[layer] & {"head", "attn"}


def _one_row_each(df: pd.DataFrame) -> None:
    counts = Counter(zip(df.component, df.layer, df.sublayer, df["head"], strict=True))
    assert set(counts.values()) == {1}


# -- the lens ------------------------------------------------------------------------------------------------------------
def test_the_lens_at_the_end_is_what_the_model_prints(case, printed):
    df = sl.lens(case.model, PROMPTS, target=TARGET, sites="final", norm=["recomputed", "frozen"], top_k=2)
    assert len(df) == 2 * 3 * sum(map(len, PROMPTS))
    for (prompt, position), rows in df.groupby(["prompt", "position"]):
        logits = printed[prompt][position]
        ids = torch.from_numpy(rows.target.to_numpy(copy=True)).long()
        assert np.abs(rows.logit.to_numpy() - logits[ids].numpy()).max() <= PRINTED * float(logits.abs().max())
        assert np.allclose(rows.probability, logits.softmax(-1)[ids], rtol=1e-3, atol=1e-6)
        assert np.array_equal(rows["rank"], (logits > logits[ids][:, None]).sum(-1))


# -- promoted tokens -----------------------------------------------------------------------------------------------------
def test_promoted_tokens_are_moved_by_the_rows_of_the_attribution(case):
    last = {c.kind: c for c in sources(case.anatomy)}  # of each kind
    asked = [(c.kind, *(n for n in (c.layer, c.head, c.sublayer) if n >= 0)) for c in last.values()]
    df = sl.promotes(case.model, PROMPTS[:1], asked, top_k=1)
    df = df[df.direction == "up"]
    rows = sl.attribute(case.model, PROMPTS[:1], target=df.target.unique().tolist(), versus="mean")
    size = rows.contribution.abs().groupby(rows.target).sum().max()
    for kind, c in last.items():
        of_kind = rows.component.isin(("head", "attn", "attn_bias") if kind == "attn" else (kind,))
        place = (rows.layer == c.layer) & (rows.sublayer == c.sublayer) & ((rows["head"] == c.head) | (c.head < 0))
        truth = rows[of_kind & place].groupby("target").contribution.sum()
        moved = df[(df.component == kind)].set_index("target").contribution
        assert (moved - truth[moved.index]).abs().max() <= SUM * size, kind


# -- effects -------------------------------------------------------------------------------------------------------------
def test_total_effects_are_hooked_passes_and_direct_ones_the_attribution(case, printed):
    layer = case.anatomy.n_layers - 2
    df = sl.effects(case.model, PROMPTS, target=TARGET, layers=layer)
    parts = sl.attribute(case.model, PROMPTS, target=TARGET)
    size = parts.contribution.abs().groupby(parts.prompt).sum().max()
    joined = df.merge(parts, on=["prompt", "component", "layer", "sublayer", "head"])
    assert len(joined) == len(parts[(parts.layer == layer) & ~parts.component.str.endswith("_bias")])
    assert (joined.direct - joined.contribution).abs().max() <= SUM * size
    last = df[df.prompt == 0].drop_duplicates(["component", "sublayer"], keep="last")
    for row in last.itertuples():
        kind = "attn" if row.component == "head" else row.component
        write = next(w for w in case.anatomy.layers[layer].writes if (w.kind, w.sublayer) == (kind, row.sublayer))
        part = slice(row.head * write.d_head, (row.head + 1) * write.d_head) if row.component == "head" else slice(None)
        logits = _zeroed_by_hooks(case, layer, write, part)
        assert abs(row.total - float(printed[0][-1, TARGET[0]] - logits[TARGET[0]])) <= REPLAY * float(printed[0].abs().max()), row


@torch.no_grad()
def _zeroed_by_hooks(case: Case, layer: int, write: Write, part: slice) -> Tensor:
    """What the model prints behind the first prompt with coordinates of a leaf at zero, at every position."""
    call = sum(write.leaf in [w.leaf for w in other.writes] for other in case.anatomy.layers[:layer])
    seen = []

    def zero(x: Tensor) -> Tensor:
        seen.append(x)
        if len(seen) != call + 1:
            return x
        x = x.clone()
        x[..., part] = 0
        return x

    leaf = case.module.get_submodule(write.leaf)
    if write.n_heads:
        handle = leaf.register_forward_pre_hook(lambda _, args: (zero(args[0]), *args[1:]))
    else:
        handle = leaf.register_forward_hook(lambda _, args, out: (zero(out[0]), *out[1:]) if isinstance(out, tuple) else zero(out))
    try:
        return case.module(input_ids=torch.tensor(PROMPTS[:1]), use_cache=False).logits[0, -1].double()
    finally:
        handle.remove()


# -- heads ---------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_heads_and_bias_are_the_attention_write(case):
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    writes = {w.leaf: w for _, w in case.anatomy.writes() if w.n_heads}
    with _hooked(case.module, writes, lambda path, args, out: seen.__setitem__(path, (args[0].clone(), out.clone()))):
        case.module(input_ids=torch.tensor(PROMPTS[:1]), use_cache=False)
    for path, write in writes.items():
        (z, out), projection = seen[path], case.module.get_submodule(path)
        weight = projection.weight if type(projection).__name__ == "Conv1D" else projection.weight.T  # [z, d_model]
        heads = zip(z.split(write.d_head, -1), weight.split(write.d_head, 0), strict=True)
        total = sum((part @ columns).double() for part, columns in heads)
        total = total if projection.bias is None else total + projection.bias
        assert float((total - out).abs().max() / out.abs().max()) <= HEADS


@torch.no_grad()
def test_heads_are_as_many_as_the_attention_patterns(case):
    before, n = case.module.config._attn_implementation, len(PROMPTS[0])
    case.module.set_attn_implementation("eager")
    try:
        out = case.module(input_ids=torch.tensor(PROMPTS[:1]), output_attentions=True, use_cache=False)
    finally:
        case.module.set_attn_implementation(before)
    patterns = [a for a in getattr(out, "attentions", None) or () if a is not None and a.shape[-2:] == (n, n)]
    heads = [w.n_heads for _, w in case.anatomy.writes() if w.n_heads]
    if heads:
        # A head of the differential transformer takes the difference of two maps.
        maps_a_head = 2 if case.module.config.model_type == "diffllama" else 1
        assert [a.shape[1] for a in patterns] == [maps_a_head * n_heads for n_heads in heads]


def test_every_write_and_head_measures_as_if_it_were_made_by_itself(case):
    """Heads by Gram matrices, through frozen branch norms: against each head's write, made and measured alone."""
    sites = [*dict.fromkeys(f"{w.kind}_out" for _, w in case.anatomy.writes()), "head_out"]
    df = sl.norms(case.model, PROMPTS[:1], measures=["l2", "relative", "cosine", "along", "across"], sites=sites)
    found = df.set_index(["site", "layer", "sublayer", "head", "measure", "position"]).value.unstack("position")
    slow = slowgrowth.writes(case.model, PROMPTS[0])
    assert len(found) == 5 * len(slow)
    for key, (write, stream) in slow.items():
        for measure, truth in slowgrowth.measures(write, stream).items():
            unit = {"cosine": 1.0, "relative": float(truth.max())}.get(measure, float(write.norm(dim=-1).max()))
            assert abs(found.loc[(*key, measure)] - truth.numpy()).max() <= ALIGNED * unit, (key, measure)


def test_no_row_of_the_norms_stands_twice(case):
    schema.validate(sl.norms(case.model, PROMPTS[:1], measures=None), "norms")


@pytest.mark.slow
def test_the_squared_norm_is_the_sum_of_its_parts_or_refused(case):
    if any(layer.stream_norms for layer in case.anatomy.layers):
        with pytest.raises(UnsupportedModelError, match="norms the stream itself"):
            sl.decompose_norm(case.model, PROMPTS)
        return
    for unit in ("block", "sublayer"):
        df = sl.decompose_norm(case.model, PROMPTS, unit=unit)
        final = sl.norms(case.model, PROMPTS, measures="l2", sites="final").set_index(["prompt", "position"]).value
        rows = df.groupby(["prompt", "position"]).value
        assert ((rows.sum() - final**2).abs() / rows.agg(lambda v: v.abs().sum())).max() <= SUM


@pytest.mark.slow
def test_gradient_norms_are_those_of_a_plain_backward_pass(case):
    found = sl.gradient_norms(case.model, PROMPTS[:1]).pivot_table(index="layer", columns="position", values="value").to_numpy()
    truth, _ = slowgrowth.gradients(case.module, case.anatomy.block_paths, PROMPTS[0])
    assert found.shape == truth.shape
    assert abs(found - truth).max() <= REPLAY * truth.max()


@pytest.mark.slow
def test_what_later_layers_and_tokens_take_from_the_first_layer(case):
    df = sl.depth_use(case.model, PROMPTS, positions="future", layers=[0])
    for prompt, ids in enumerate(PROMPTS):
        found = df[(df.prompt == prompt) & (df.statistic == "max")].sort_values("layer_to").value
        cut = int(0.5 * (len(ids) - 1))
        truth = slowgrowth.without_the_first_block(case.model, ids, cut)
        assert abs(found.to_numpy() - truth).max() <= 1e-4 * truth.max()


# -- every component by itself -------------------------------------------------------------------------------------------
@torch.no_grad()
def test_every_component_moves_the_logit_by_its_row_when_it_is_zeroed(case):
    anatomy, ids = case.anatomy, torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    readouts = _readouts(ids, anatomy.n_vocab)
    shares = attribute_batch(case.module, anatomy, TokenBatch(np.arange(2), ids, torch.ones_like(ids, dtype=torch.bool)), readouts)
    size = np.abs(shares.contribution).sum(-1)
    logits = case.module(input_ids=ids, use_cache=False).logits.double().numpy()
    truth = logits[readouts.prompt, readouts.position, readouts.target] - logits[readouts.prompt, readouts.position, readouts.versus]
    assert (np.abs(shares.contribution.sum(-1) - truth) <= SUM * size + PRINTED * np.abs(logits).max()).all()
    direction = Unembed(case.module.get_submodule(anatomy.unembed), anatomy.logits).direction(
        torch.from_numpy(readouts.target), torch.from_numpy(readouts.versus)
    )
    with Clamp(case.module, anatomy, ids) as clamp:
        zeroed = _ways_to_zero(case, clamp)
        for column, component in enumerate(components(anatomy)):
            if component.kind in ("unembed_bias", "softcap"):  # behind the stream; the printed logits hold them
                continue
            change = (clamp.hidden - zeroed[component]()).reshape(len(readouts), -1)
            moved = (change * direction).sum(-1).double().numpy()
            error = float((np.abs(moved - shares.contribution[:, column]) / size).max())
            assert error <= MOVED, f"{component}: off by {error:.2g} of sum|parts|"


def _ways_to_zero(case: Case, clamp: Clamp) -> dict[Component, Callable[[], Tensor]]:
    """How each component is taken out of an otherwise clamped pass; each gives the unembedding's input."""
    anatomy, ways = case.anatomy, {Component("embed"): lambda: clamp.without((-1, case.anatomy.embed))}
    for n, path in enumerate(anatomy.pos_embeds):
        ways[Component("pos_embed", -1, n if len(anatomy.pos_embeds) > 1 else -1)] = lambda path=path: clamp.without((-1, path))
    calls: Counter[str] = Counter()
    for layer, w in anatomy.writes():
        for h in range(w.n_heads):
            part = slice(h * w.d_head, (h + 1) * w.d_head)
            ways[Component("head", layer, w.sublayer, h)] = lambda at=(layer, w.leaf), part=part: clamp.without(at, part)
        if not w.n_heads:
            ways[Component(w.kind, layer, w.sublayer)] = lambda at=(layer, w.leaf): clamp.without(at)
        elif w.bias:
            bias = case.module.get_submodule(w.leaf).bias
            ways[Component("attn_bias", layer, w.sublayer)] = lambda a=(w.leaf, calls[w.leaf], bias): _without_constant(case, clamp, *a)
        calls[w.leaf] += 1
    ordinals: Counter[int] = Counter()
    for layer, path in _in_order(anatomy):
        bias = anatomy.norms[path].bias
        if bias is not None:
            ways[Component("norm_bias", layer, ordinals[layer])] = lambda a=(path, calls[path], bias): _without_constant(case, clamp, *a)
            ordinals[layer] += 1
        calls[path] += 1
    return ways


def _in_order(anatomy: Anatomy) -> list[tuple[int, str]]:
    order = {path: i for i, path in enumerate(anatomy.norms)}
    return sorted(anatomy.path_norms, key=lambda place: (place[0], order[place[1]]))


def _without_constant(case: Case, clamp: Clamp, path: str, call: int, constant: Tensor) -> Tensor:
    """A clamped pass in which the module's `call`-th output lacks a constant; planted behind the clamp's own hooks."""
    seen = Counter()

    def subtract(_: str, args: tuple, out: Tensor) -> Tensor | None:
        seen[path] += 1
        return out - constant if seen[path] == call + 1 else None

    with _hooked(case.module, [path], subtract):
        return clamp.without((-2, "nothing"))


def _readouts(ids: Tensor, n_vocab: int) -> Readouts:
    """Every position of every prompt, with a target and another versus each."""
    prompt, position = (x.numpy() for x in torch.ones_like(ids).nonzero(as_tuple=True))
    target = (31 * position + 17 * prompt + 5) % n_vocab
    return Readouts(prompt, position, target, (target + 1 + position) % n_vocab)


# -- replays -------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_replays_in_both_orders_are_hooked_forward_passes(case):
    n = case.anatomy.n_layers
    ids, mask = _padded()
    removals: list[int | tuple[int, int]] = sorted({0, n // 2, n - 1})
    removals += [(n // 2, i) for i in range(len(case.anatomy.layers[n // 2].adds))]
    truth = {change: _removed_by_hooks(case, change, ids, mask) for change in removals}
    unembed = Unembed(case.module.get_submodule(case.anatomy.unembed), case.anatomy.logits)
    with Replay(case.module, case.anatomy) as replay:
        replay.record(ids, mask)
        for change in (*removals, *reversed(removals)):
            layer, add = change if isinstance(change, tuple) else (change, None)
            hidden = replay.without_blocks({layer}) if add is None else replay.without_write(layer, case.anatomy.layers[layer].adds[add])
            logits = unembed.logits(hidden[mask])
            assert float((logits - truth[change]).abs().max() / truth[change].abs().max()) <= REPLAY, f"without {change}"


@torch.no_grad()
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])  # four: as many prompts as heads
def test_changes_batched_or_not_are_hooked_forward_passes(case, size):
    ids, mask = (x.repeat(size // 2, 1) for x in _padded())
    made = list(_changes(case.anatomy, ids.shape, range(case.anatomy.n_layers) if size > 2 else (1,)))
    unembed = Unembed(case.module.get_submodule(case.anatomy.unembed), case.anatomy.logits)
    with Replay(case.module, case.anatomy) as replay:
        clean = replay.record(ids, mask, attention=True)
        alone = [replay.changed(*variant) for variant in reversed(made)][::-1]
        batched = torch.cat([replay.each(made[i : i + 5]) for i in range(0, len(made), 5)])
        last = torch.zeros_like(mask).scatter(1, mask.sum(1, keepdim=True) - 1, True)
        replay.read_at(last.flatten().nonzero()[:, 0], clean)
        batched[:, last] = torch.cat([replay.each(made[i : i + 5])[:, last] for i in range(0, len(made), 5)])
    for variant, *replayed in zip(made, alone, batched, strict=True):
        truth = hooked.logits(case.model, variant, ids, mask)[mask]
        for hidden in replayed:
            gap = float((unembed.logits(hidden[mask]) - truth).abs().max() / truth.abs().max())
            assert gap <= 1e-5, f"{gap:.2g} off under {variant}"


def _changes(anatomy: Anatomy, shape: torch.Size, layers) -> Iterator[tuple[changes.Change, ...]]:
    """Stretches of blocks that end together, then heads, writes and blocks: zero, other values, some positions."""
    generator, late = torch.Generator().manual_seed(3), torch.arange(shape[1]).expand(shape) > 1
    for layer in layers:
        yield from (tuple(changes.block(anatomy, i) for i in range(start, layer + 1)) for start in {0, layer})
        value = torch.randn(*shape, anatomy.d_model, generator=generator)
        yield (changes.block(anatomy, layer, value, late),)
        for add in anatomy.layers[layer].adds:
            yield changes.write(layer, add, [value] * len(add.outputs), late)
        for write in (w for w in anatomy.layers[layer].writes if w.n_heads):
            yield (changes.head(layer, write, 0),)
            yield (changes.head(layer, write, write.n_heads - 1, torch.randn(1, 1, write.d_head, generator=generator), late),)


def _padded() -> tuple[Tensor, Tensor]:
    length = max(map(len, PROMPTS))
    mask = torch.tensor([[i < len(p) for i in range(length)] for p in PROMPTS])
    return torch.tensor([p + [0] * (length - len(p)) for p in PROMPTS]), mask


@torch.no_grad()
def _removed_by_hooks(case: Case, change: int | tuple[int, int], ids: Tensor, mask: Tensor) -> Tensor:
    """Printed logits with a block bypassed or one addition at zero, by plain hooks; of each prompt's own tokens."""
    layer, add = change if isinstance(change, tuple) else (change, None)
    path = case.anatomy.layers[layer].path
    call = [i for i, other in enumerate(case.anatomy.layers) if other.path == path].index(layer)
    inside: list[str] = [] if add is None else _outputs(case.anatomy.layers[layer], add)
    seen = Counter()

    def hook(name: str, args: tuple, out):
        seen[name] += 1
        if seen[name] != call + 1:
            return None
        value = torch.zeros_like(_first(out)) if name != path else next(a for a in args if a.is_floating_point())
        return type(out)((value, *out[1:])) if isinstance(out, (tuple, list)) else value

    with _hooked(case.module, inside or [path], hook):
        return case.module(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[mask]


def _outputs(layer: Layer, index: int) -> list[str]:
    add = layer.adds[index]
    return [add.norm] if add.norm else [w.output for w in add.writes]


# -- the stream, block by block ------------------------------------------------------------------------------------------
def test_stream_and_writes_add_up_at_every_block(case):
    sites = ["resid_pre", "resid_post"] + [s for s in ("attn_out", "mlp_out", "mixer_out", "other_out") if _has(case.anatomy, s)]
    sites += ["resid_mid"] * any(layer.reads_mid for layer in case.anatomy.layers)
    kept = sl.record(case.model, PROMPTS, sites=sites)
    mask = kept["mask"]
    streams = _streams_by_hooks(case)
    for index, layer in enumerate(case.anatomy.layers):
        at = {name.split("hook_")[1]: value[mask] for name, value in kept.items() if name.startswith(f"blocks.{index}.")}
        for site, truth in zip(("resid_pre", "resid_post"), streams[index], strict=True):
            assert _gap(at[site], truth) == 0 or _gap(at[site], truth) <= STREAM
        if len(layer.segments) > 1 or any(s.norm or abs(s.scale - 1) > 1e-4 for s in layer.segments):
            continue
        written = [value for name, value in at.items() if not name.startswith("resid")]
        assert len(written) == sum(len(add.outputs) for add in layer.adds)
        assert _gap(at["resid_pre"] + sum(written), at["resid_post"]) <= STREAM
        if "resid_mid" in at and len(written) == 2:
            first = next(value for name, value in at.items() if name in ("attn_out", "mixer_out"))
            assert _gap(at["resid_pre"] + first, at["resid_mid"]) <= STREAM
            assert _gap(at["resid_mid"] + at["mlp_out"], at["resid_post"]) <= STREAM


def _has(anatomy: Anatomy, site: str) -> bool:
    return any(f"{w.kind}_out" == site for _, w in anatomy.writes())


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@torch.no_grad()
def _streams_by_hooks(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Each block's input and output at the prompts' own tokens, from one plain forward pass."""
    ids, mask = _padded()
    before: list[Tensor] = []
    streams: list[tuple[Tensor, Tensor]] = []

    def enter(_: nn.Module, args: tuple, kwargs: dict) -> None:
        before.append(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point())[mask])

    handles = [case.module.get_submodule(p).register_forward_pre_hook(enter, with_kwargs=True) for p in case.anatomy.block_paths]
    try:
        with _hooked(case.module, case.anatomy.block_paths, lambda path, args, out: streams.append((before.pop(), _first(out)[mask]))):
            case.module(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return streams


# -- what is refused -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*REFUSED, *OPEN])
def test_what_cannot_be_read_exactly_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=REFUSED.get(name, "stream|logit")):
        sl.load(zoo.build(name))


@contextmanager
def _hooked(module: nn.Module, paths, hook: Callable) -> Iterator[None]:
    """`hook(path, tensor arguments, output)` behind every call of the modules at `paths`; what it returns takes the output's place."""

    def planted(path: str):
        return lambda _, args, kwargs, out: hook(path, tuple(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), out)

    handles = [module.get_submodule(path).register_forward_hook(planted(path), with_kwargs=True) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(out):
    return out[0] if isinstance(out, (tuple, list)) else out
