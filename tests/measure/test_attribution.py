"""The contract: rows that sum to the model's own logit, each the number that an obvious slow reference gives."""

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import AdditivityError
from streamlens.models import limits
from streamlens.stream.clamp import Clamp
from streamlens.stream.unembed import Unembed
from tests import byhand
from tests.models import tiny
from tests.tolerances import ADDITIVITY, HAND, PRINTED

GROUP = ["prompt", "position", "target", "versus"]
PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]
KINDS = {  # kind: rows of each of three layers, or of the model
    "llama": {"embed": 1, "head": 12, "attn_bias": 3, "mlp": 3},
    "gpt2": {"embed": 1, "pos_embed": 1, "head": 12, "attn_bias": 3, "mlp": 3, "norm_bias": 1},
    "neox": {"embed": 1, "head": 12, "attn_bias": 3, "mlp": 3, "norm_bias": 1},
    "gemma2": {"embed": 1, "head": 12, "mlp": 3, "softcap": 1},
    "olmo2": {"embed": 1, "head": 12, "mlp": 3},
    "bloom": {"embed": 1, "head": 12, "attn_bias": 3, "mlp": 3, "norm_bias": 2},
    "opt-post-norm": {"embed": 1, "pos_embed": 1, "head": 12, "attn_bias": 3, "mlp": 3, "norm_bias": 6},
    "mixtral": {"embed": 1, "head": 12, "mlp": 3},
    "gemma4": {"embed": 1, "head": 16, "mlp": 4, "other": 4},
}


def printed(module, ids):
    """The logits that the model itself prints, `[pos, vocab]` in float64."""
    with torch.no_grad():
        return module(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()


def groups(df):
    """Of each group of rows: their sum, sum|parts| and logit."""
    by = df.groupby(GROUP)
    return pd.DataFrame({"sum": by.contribution.sum(), "size": by.contribution.apply(lambda c: c.abs().sum()), "logit": by.logit.first()})


def difference(logits, position, target, versus):
    minus = 0.0 if versus == -1 else logits[position].mean() if versus == -2 else logits[position, versus]
    return logits[position, target] - minus


def check_contract(model, df, prompts):
    """Sums against the logit in the row, that against what the model prints, keys, one logit a group."""
    schema.validate(df, "attribution")
    found = groups(df)
    assert (df.groupby(GROUP).logit.nunique() == 1).all()
    assert ((found["sum"] - found.logit).abs() <= ADDITIVITY[model.dtype] * found["size"]).all()
    assert df.attrs["additivity_error"] <= ADDITIVITY[model.dtype]
    logits = [printed(model.module, ids) for ids in prompts]
    for (prompt, position, target, versus), row in found.iterrows():
        truth = difference(logits[prompt], position, target, versus)
        assert abs(row.logit - truth) <= PRINTED[model.dtype] * max(abs(logits[prompt]).max(), row["size"])


def key(row):
    return (row.component, row.layer, row.head)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_row_is_what_the_weights_give_by_hand(family):
    model = sl.load(tiny.model(family, num_hidden_layers=2))
    df = sl.attribute(model, PROMPTS[:2], target=11, versus=[4, 6], positions="all")
    for prompt, (ids, versus) in enumerate(zip(PROMPTS, (4, 6), strict=False)):
        trace = getattr(byhand, family)(model.module, ids)
        shares = trace.shares(11, versus)
        size = sum(share.abs() for share in shares.values())
        rows = df[df.prompt == prompt]
        assert len(rows) == len(shares) * len(ids)
        for row in rows.itertuples():
            assert abs(row.contribution - shares[key(row)][row.position]) <= HAND * size[row.position], row
        logit = trace.logits[:, 11] - trace.logits[:, versus]
        assert np.allclose(rows.groupby("position").logit.first(), logit, atol=HAND * float(size.max()))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_contract(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target="next", positions="all", max_tokens=14)
    check_contract(model, df, PROMPTS)
    assert len(groups(df)) == sum(len(ids) - 1 for ids in PROMPTS)
    check_contract(model, sl.attribute(model, PROMPTS, target=11, versus=4, positions="all"), PROMPTS)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_are_those_of_the_architecture(family):
    df = sl.attribute(tiny.proven(family), PROMPTS[0])
    assert df.component.value_counts().to_dict() == KINDS[family]
    assert (df.contribution != 0).all()
    heads = df[df.component == "head"]
    assert set(zip(heads.layer, heads["head"], strict=True)) == {(i, h) for i in range(KINDS[family]["head"] // 4) for h in range(4)}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_zeroing_any_write_moves_the_logit_by_its_row(family):
    """Every head, MLP and embedding, with frozen norms and without the backward pass that made the rows."""
    model, ids = tiny.proven(family), PROMPTS[0]
    df = sl.attribute(model, ids, target=11, versus=4, positions="all")
    size = groups(df)["size"].to_numpy()
    direction = (
        Unembed(model.module.get_submodule(model.anatomy.unembed), model.anatomy.logits)
        .direction(torch.tensor([11]), torch.tensor([4]))[0]
        .detach()
    )
    places = {("embed", -1, -1): ((-1, model.anatomy.embed), slice(None))}
    for layer, write in model.anatomy.writes():
        for head in range(write.n_heads):
            places["head", layer, head] = ((layer, write.leaf), slice(head * write.d_head, (head + 1) * write.d_head))
        if not write.n_heads:
            places[write.kind, layer, -1] = ((layer, write.leaf), slice(None))
    with Clamp(model.module, model.anatomy, torch.tensor([ids])) as clamp:
        for (component, layer, head), (place, part) in places.items():
            rows = df[(df.component == component) & (df.layer == layer) & (df["head"] == head)]
            moved = ((clamp.hidden - clamp.without(place, part))[0] @ direction).double().numpy()
            assert (abs(moved - rows.contribution.to_numpy()) <= ADDITIVITY[torch.float32] * size).all(), (component, layer, head)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_rows_do_not_depend_on_the_batch(family, order):
    model, prompts = tiny.proven(family), PROMPTS[order]
    together = sl.attribute(model, prompts, target=11, versus=4, positions="all", max_tokens=1000)
    apart = sl.attribute(model, prompts, target=11, versus=4, positions="all", max_tokens=1)
    size = together.groupby(GROUP).contribution.transform(lambda c: c.abs().sum())
    assert ((together.contribution - apart.contribution).abs() <= ADDITIVITY[torch.float32] * size).all()
    same = [c for c in together.columns if c not in ("contribution", "logit")]
    pd.testing.assert_frame_equal(together[same], apart[same])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_contract_in_other_dtypes(family, dtype):
    model = tiny.proven(family, dtype)
    df = sl.attribute(model, PROMPTS, target="next", versus="mean", positions="all")
    assert df.attrs["dtype"] == str(dtype).split(".")[1]
    assert (df.dtypes[["contribution", "logit"]] == "float64").all()
    check_contract(model, df, PROMPTS)


def test_float64_is_summed_in_float64():
    """GPT-2's norms follow the model's dtype, so nothing but rounding at 1e-16 is left."""
    df = sl.attribute(tiny.proven("gpt2", torch.float64), PROMPTS, target="next", positions="all")
    assert df.attrs["additivity_error"] < 1e-13


def test_several_targets_and_versus_pair_up():
    model = tiny.proven("gpt2")
    df = sl.attribute(model, PROMPTS[0], target=[11, 12, 13], versus=[4, 5, 6], positions=[1, -1])
    check_contract(model, df, PROMPTS)
    assert [tuple(g) for g in df[GROUP].drop_duplicates().to_numpy()] == [
        (0, position, 11 + i, 4 + i) for position in (1, 6) for i in range(3)
    ]
    alone = sl.attribute(model, PROMPTS[0], target=12, versus=5, positions=[1, -1])
    both = df[df.target == 12]
    assert np.allclose(both.contribution, alone.contribution, rtol=0, atol=HAND * alone.contribution.abs().sum())


def test_several_targets_a_prompt():
    model = tiny.proven("llama")
    df = sl.attribute(model, PROMPTS[:2], target=[[11, 12], [13]], versus=[[4], [5]])
    check_contract(model, df, PROMPTS)
    assert [tuple(g) for g in df[GROUP].drop_duplicates().to_numpy()] == [(0, 6, 11, 4), (0, 6, 12, 4), (1, 3, 13, 5)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt-post-norm"])
def test_versus_mean_centres_over_the_vocabulary(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target=11, versus="mean", positions="all")
    check_contract(model, df, PROMPTS)
    assert (df.versus == -2).all()
    assert list(df.versus_token.unique()) == ["mean"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_top_is_the_models_own_argmax(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, positions="all")
    check_contract(model, df, PROMPTS)
    for prompt, ids in enumerate(PROMPTS):
        top = df[df.prompt == prompt].groupby("position").target.first()
        assert top.tolist() == printed(model.module, ids).argmax(-1).tolist()


def test_next_is_each_positions_own_next_token():
    df = sl.attribute(tiny.proven("llama"), PROMPTS, target="next", positions="all")
    for prompt, ids in enumerate(PROMPTS):
        assert df[df.prompt == prompt].groupby("position").target.first().tolist() == ids[1:]


def test_softcap_row_is_what_the_cap_bends():
    model = tiny.proven("gemma2")
    df = sl.attribute(model, PROMPTS[0], target=11, versus=4)
    bend = df.contribution[df.component == "softcap"].item()
    rest = df.contribution[df.component != "softcap"].sum()
    z = {}
    for token in (11, 4):
        alone = sl.attribute(model, PROMPTS[0], target=token)
        z[token] = alone.contribution[alone.component != "softcap"].sum()
        assert abs(3 * np.tanh(z[token] / 3) - printed(model.module, PROMPTS[0])[-1, token]) < 1e-5
    assert abs(rest - (z[11] - z[4])) < 1e-5
    assert abs(bend - ((3 * np.tanh(z[11] / 3) - 3 * np.tanh(z[4] / 3)) - (z[11] - z[4]))) < 1e-5
    assert abs(bend) > 0.01


def test_a_frame_of_prompts_carries_its_columns():
    frame = pd.DataFrame(
        {
            "prompt": PROMPTS,
            "target": [11, 12, 13],
            "versus": [4, 5, 6],
            "position": [2, -1, 0],
            "template": ["a", "b", "a"],
            "n": [1.5, 2.5, 3.5],
        },
        index=[7, 8, 9],
    )
    model = tiny.proven("llama")
    df = sl.attribute(model, frame)
    check_contract(model, df, PROMPTS)
    first = df.groupby("prompt").first()
    assert first[["position", "target", "versus"]].to_numpy().tolist() == [[2, 11, 4], [3, 12, 5], [0, 13, 6]]
    assert first.template.tolist() == ["a", "b", "a"]
    assert first.n.tolist() == [1.5, 2.5, 3.5]
    assert df.groupby("template").prompt.nunique().to_dict() == {"a": 2, "b": 1}


def test_contract_on_the_default_model(smollm2):
    """The check that the README shows, on real weights and prompts of unequal length."""
    prompts = ["The Eiffel Tower is in the city of", "When Mary and John went to the store, John gave a drink to", "Water boils at"]
    df = sl.attribute(smollm2, prompts, target=[" Paris", " Mary", " a"], versus=" Rome")
    summed, logit = df.groupby(GROUP).contribution.sum(), df.groupby(GROUP).logit.first()
    size = df.groupby(GROUP).contribution.apply(lambda c: c.abs().sum())
    assert ((summed - logit).abs() <= ADDITIVITY[torch.float32] * size).all()
    check_contract(smollm2, df, [smollm2.tokenizer(p)["input_ids"] for p in prompts])
    assert df.component.value_counts().to_dict() == {"head": 810, "mlp": 90, "embed": 3}
    assert df.target_token.unique().tolist() == [" Paris", " Mary", " a"]
    apart = pd.concat([sl.attribute(smollm2, p, target=t, versus=" Rome") for p, t in zip(prompts, (" Paris", " Mary", " a"), strict=True)])
    each = df.groupby(GROUP).contribution.transform(lambda c: c.abs().sum()).to_numpy()
    assert (abs(apart.contribution.to_numpy() - df.contribution.to_numpy()) <= ADDITIVITY[torch.float32] * each).all()


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt-post-norm"])
def test_no_logits_are_made_for_named_targets(family, monkeypatch):
    model = tiny.proven(family)

    def made(hidden):
        raise AssertionError("the unembedding ran")

    monkeypatch.setattr(model.module.get_output_embeddings(), "forward", made)
    assert len(sl.attribute(model, PROMPTS, target="next", versus=[4, 5, 6], positions=[0, 1]))
    with pytest.raises(AssertionError, match="the unembedding ran"):
        sl.attribute(model, PROMPTS, target="top")


def test_top_makes_logits_only_where_they_are_read(monkeypatch):
    model, rows = tiny.proven("llama"), []
    head = model.module.lm_head
    original = head.forward
    monkeypatch.setattr(head, "forward", lambda hidden: rows.append(hidden.numel() // hidden.shape[-1]) or original(hidden))
    sl.attribute(model, PROMPTS, positions=[0, 1])
    assert sum(rows) == 6


@pytest.fixture
def strict(monkeypatch):
    """No sum of floats is within these limits; the model is proven before they hold."""
    tiny.proven("llama")
    monkeypatch.setattr(limits, "SUM", dict.fromkeys(limits.SUM, 1e-12))


def test_a_sum_beyond_the_limit_is_an_error(strict):
    with pytest.raises(
        AdditivityError, match=r"LlamaForCausalLM: contributions miss the logit by .* of sum\|parts\| .* at position \d+ of prompt \d+ \('"
    ):
        sl.attribute(tiny.proven("llama"), PROMPTS, target="next", positions="all")


def test_a_sum_beyond_the_limit_can_be_a_warning_or_nothing(strict, recwarn):
    model = tiny.proven("llama")
    with pytest.warns(UserWarning, match="contributions miss the logit"):
        df = sl.attribute(model, PROMPTS, target="next", positions="all", check="warn")
    recwarn.clear()
    silent = sl.attribute(model, PROMPTS, target="next", positions="all", check=False)
    assert not recwarn.list
    assert silent.attrs["additivity_error"] == df.attrs["additivity_error"] > 1e-12


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_full_check_compares_with_what_the_model_prints(family, monkeypatch):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target="next", positions="all", check="full")
    pd.testing.assert_frame_equal(df, sl.attribute(model, PROMPTS, target="next", positions="all"))
    original = model.module.lm_head.forward
    monkeypatch.setattr(model.module.lm_head, "forward", lambda hidden: original(hidden) + 0.01)
    with pytest.raises(AdditivityError, match="the logit misses what the model prints by"):
        sl.attribute(model, PROMPTS, target="next", positions="all", check="full")


def test_full_check_in_bf16_against_the_mean():
    model = tiny.proven("llama", torch.bfloat16)
    assert len(sl.attribute(model, PROMPTS, target=11, versus="mean", positions="all", check="full"))


def test_a_row_that_is_not_finite_is_an_error():
    module = tiny.model("llama")
    model = sl.load(module)
    with torch.no_grad():
        module.model.embed_tokens.weight[7] = float("nan")
    with pytest.raises(AdditivityError, match="contributions or the logit are not finite at position 2 of prompt 0"):
        sl.attribute(model, [[5, 7, 9]], target=11)
