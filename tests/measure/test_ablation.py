"""Removing layers: the metrics of a forward pass in which plain hooks, or the sums by hand, leave the layer out."""

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError
from streamlens.measure import ablation
from streamlens.measure.metrics import METRICS
from streamlens.stream import unembed
from tests import byhand
from tests.models import tiny
from tests.tolerances import HAND, REPLAY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]
FOUR = [*PROMPTS, [44, 6]]  # as many as the heads, which a family may mistake for them
BLOCKS = {  # where a block is, and which module's output is all that its attention and its MLP add
    "llama": ("model.layers.{}", "self_attn", "mlp"),
    "gpt2": ("transformer.h.{}", "attn.c_proj", "mlp"),
    "neox": ("gpt_neox.layers.{}", "attention.dense", "mlp"),
    "gemma2": ("model.layers.{}", "post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo2": ("model.layers.{}", "post_attention_layernorm", "post_feedforward_layernorm"),
    "bloom": ("transformer.h.{}", "self_attention.dense", "mlp.dense_4h_to_h"),
    "opt-post-norm": ("model.decoder.layers.{}", "self_attn.out_proj", "fc2"),
    "mixtral": ("model.layers.{}", "self_attn.o_proj", "mlp"),
    "gemma4": ("model.layers.{}", "post_attention_layernorm", "post_feedforward_layernorm"),
}


def hooked_logits(module, family, unit, layer, ids):
    """The model's own forward pass over one prompt, with one hook that hands on a block's input or zeros."""
    block, attn, mlp = BLOCKS[family]
    path = block.format(layer) + {"block": "", "attn": f".{attn}", "mlp": f".{mlp}"}[unit]

    def same(part, args, kwargs, output):
        stream = args[0] if args else kwargs["hidden_states"]
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    def zeros(part, args, kwargs, output):
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    handle = module.get_submodule(path).register_forward_hook(same if unit == "block" else zeros, with_kwargs=True)
    try:
        return plain_logits(module, ids)
    finally:
        handle.remove()


def plain_logits(module, ids):
    with torch.no_grad():
        return module(torch.tensor([ids]), use_cache=False).logits[0].double()


def metrics(clean, changed, ids, target, versus):
    """Every metric of one prompt, `[pos]` each, from the two logits; float64."""
    log_p, log_q = clean.log_softmax(-1), changed.log_softmax(-1)
    following = torch.tensor(ids[1:])
    return {
        "loss": -log_q[:-1].gather(-1, following[:, None])[:, 0],
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "top1_agree": (clean.argmax(-1) == changed.argmax(-1)).double(),
        "target_logit": changed[:, target],
        "logit_diff": changed[:, target] - changed[:, versus],
        "target_rank": (changed > changed[:, [target]]).sum(-1).double(),
    }


def check(df, prompts, clean, changed, targets, tolerance):
    """Every row of `df` against logits: `clean[prompt]`, `changed[layer][prompt]`."""
    schema.validate(df, "ablation")
    assert np.array_equal(df.delta, df.ablated - df.clean)
    n_rows = 0
    for layer, changes in changed.items():
        for prompt, ids in enumerate(prompts):
            size = float(max(clean[prompt].abs().max(), changes[prompt].abs().max()))
            for column, logits in (("clean", clean[prompt]), ("ablated", changes[prompt])):
                for name, expected in metrics(clean[prompt], logits, ids, *targets[prompt]).items():
                    rows = df[(df.prompt == prompt) & (df.layer == layer) & (df.metric == name)]
                    assert rows.position.tolist() == list(range(len(expected)))
                    assert abs(rows[column].to_numpy() - expected.numpy()).max() <= tolerance * size, (layer, prompt, name, column)
                    n_rows += len(rows)
    assert n_rows == 2 * len(df)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("unit", ["block", "attn", "mlp"])
def test_removal_by_hand(family, unit):
    model, targets = tiny.proven(family), [(11, 4), (12, 5), (13, 6)]
    df = sl.ablate(model, PROMPTS, unit=unit, target=[11, 12, 13], versus=[4, 5, 6], positions="all")
    forward = getattr(byhand, family)
    clean = [forward(model.module, ids).logits for ids in PROMPTS]
    changed = {layer: [forward(model.module, ids, {(unit, layer)}).logits for ids in PROMPTS] for layer in range(3)}
    check(df, PROMPTS, clean, changed, targets, 5 * HAND)
    assert (df.unit == unit).all()
    assert (df.method == "remove").all()
    assert (df.span == 1).all()
    assert (df["head"] == -1).all()
    assert (df.sublayer == (-1 if unit == "block" else 0)).all()


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("unit", ["block", "attn", "mlp"])
def test_removal_is_that_of_a_plainly_hooked_pass(family, unit):
    model = tiny.proven(family)
    df = sl.ablate(model, FOUR, unit=unit, target=11, versus=4, positions="all", max_tokens=1000)
    clean = [plain_logits(model.module, ids) for ids in FOUR]
    changed = {layer: [hooked_logits(model.module, family, unit, layer, ids) for ids in FOUR] for layer in range(model.n_layers)}
    check(df, FOUR, clean, changed, [(11, 4)] * 4, REPLAY)


@pytest.mark.parametrize("family", ["bloom", "gemma4", "gemma2"])
def test_removal_does_not_depend_on_the_batch(family):
    model = tiny.proven(family)
    together, apart = (sl.ablate(model, FOUR, max_tokens=n) for n in (1000, 1))
    numbers = ["clean", "ablated", "delta"]
    pd.testing.assert_frame_equal(together.drop(columns=numbers), apart.drop(columns=numbers), check_categorical=False)
    assert abs(together[numbers].to_numpy() - apart[numbers].to_numpy()).max() < REPLAY * 10


def test_the_clean_run_agrees_with_itself():
    df = sl.ablate(tiny.proven("llama"), PROMPTS)
    assert (df[df.metric == "kl"].clean == 0).all()
    assert (df[df.metric == "top1_agree"].clean == 1).all()
    assert (df[df.metric == "kl"].ablated > 0).all()


def test_by_default_every_next_token_is_read():
    df = sl.ablate(tiny.proven("llama"), PROMPTS)
    loss = df[(df.metric == "loss") & (df.layer == 0)]
    ranks = df[(df.metric == "target_rank") & (df.layer == 0)]
    assert set(df.metric) == {"loss", "kl", "top1_agree", "target_logit", "target_rank"}
    assert set(zip(loss.prompt, loss.position, strict=True)) == {(p, t) for p, ids in enumerate(PROMPTS) for t in range(len(ids) - 1)}
    assert ranks.target.tolist() == [token for ids in PROMPTS for token in ids[1:]]
    kl = df[(df.metric == "kl") & (df.layer == 0)]
    assert len(kl) == sum(map(len, PROMPTS))
    assert (kl.target == -1).all()
    assert (kl.versus == -1).all()


def test_with_a_target_the_last_token_is_read():
    df = sl.ablate(tiny.proven("llama"), PROMPTS, target=11, versus=4)
    assert df.groupby("prompt").position.unique().map(list).tolist() == [[6], [3], [5]]
    assert set(df.metric) == {"kl", "top1_agree", "target_logit", "logit_diff", "target_rank"}


def test_top_is_the_clean_argmax_in_changed_runs_too():
    model = tiny.proven("llama")
    df = sl.ablate(model, PROMPTS, positions="last")
    ranks = df[df.metric == "target_rank"]
    assert (ranks.clean == 0).all()
    assert ranks.groupby("prompt").target.first().tolist() == [int(plain_logits(model.module, ids)[-1].argmax()) for ids in PROMPTS]
    assert (ranks.ablated > 0).any()


def test_versus_mean_is_the_logit_above_the_vocabularys_mean():
    model = tiny.proven("gemma2")
    df = sl.ablate(model, PROMPTS[0], target=11, versus="mean", metrics="logit_diff", layers=1)
    clean, changed = plain_logits(model.module, PROMPTS[0])[-1], hooked_logits(model.module, "gemma2", "block", 1, PROMPTS[0])[-1]
    assert abs(df.clean.item() - (clean[11] - clean.mean()).item()) < REPLAY
    assert abs(df.ablated.item() - (changed[11] - changed.mean()).item()) < REPLAY


@pytest.mark.parametrize(("rows", "kept"), [(1, 1), (3, 200), (7, 10**6)])
def test_numbers_do_not_depend_on_how_many_logits_are_made_at_once(monkeypatch, rows, kept):
    model, arguments = tiny.proven("llama"), {"span": "all", "target": 11, "versus": 4, "positions": "all", "metrics": METRICS}
    whole = sl.ablate(model, PROMPTS, **arguments)
    monkeypatch.setattr(unembed, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(unembed, "CHUNK_ROWS", rows)
    monkeypatch.setattr(ablation, "KEPT_ELEMENTS", kept)
    parts = sl.ablate(model, PROMPTS, **arguments)
    pd.testing.assert_frame_equal(whole, parts, rtol=1e-5, atol=1e-5)


def test_layers_and_metrics_are_chosen():
    df = sl.ablate(tiny.proven("llama"), PROMPTS[0], layers=[2, 0, 2], metrics=["kl", "loss"])
    assert sorted(df.layer.unique()) == [0, 2]
    assert set(df.metric) == {"kl", "loss"}
    assert set(sl.ablate(tiny.proven("llama"), PROMPTS[0], layers=range(1, 3), metrics="kl").layer) == {1, 2}


def test_carried_columns_and_positions_of_a_frame():
    frame = pd.DataFrame({"prompt": PROMPTS, "target": [11, 12, 13], "versus": [4, 5, 6], "position": [1, 2, -1], "kind": ["a", "b", "a"]})
    df = sl.ablate(tiny.proven("llama"), frame, layers=1)
    schema.validate(df, "ablation")
    assert df.groupby("prompt").position.unique().map(list).tolist() == [[1], [2], [5]]
    assert df.groupby("prompt").kind.unique().map(list).tolist() == [["a"], ["b"], ["a"]]
    assert df[df.metric == "logit_diff"].versus.tolist() == [4, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model = tiny.proven("llama", dtype)
    df = sl.ablate(model, PROMPTS, unit="mlp", metrics="kl")
    expected = []
    for ids in PROMPTS:
        clean = plain_logits(model.module, ids).log_softmax(-1)
        changed = [hooked_logits(model.module, "llama", "mlp", layer, ids).log_softmax(-1) for layer in range(3)]
        expected.append(torch.stack([(clean.exp() * (clean - c)).sum(-1) for c in changed], dim=1).flatten())
    expected = torch.cat(expected).numpy()
    assert abs(df.ablated.to_numpy() - expected).max() < {torch.float64: 1e-6, torch.bfloat16: 0.1}[dtype]


def test_metrics_without_inputs_are_refused():
    with pytest.raises(InputError, match="have no inputs at the positions that are read: loss needs a next token, logit_diff a versus"):
        sl.ablate(tiny.proven("llama"), PROMPTS, metrics=["loss", "logit_diff"], positions="last")


def test_default_model_loses_paris_without_its_first_block(smollm2):
    df = sl.ablate(smollm2, "The Eiffel Tower is in the city of", target=" Paris", versus=" Rome", layers=[0, 15])
    first = df[df.layer == 0].set_index("metric")
    assert first.clean["target_rank"] == 0
    assert first.ablated["target_rank"] > 100
    assert first.ablated["kl"] > df[df.layer == 15].set_index("metric").ablated["kl"] > 0
