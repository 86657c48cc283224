"""Several logits of one position: lists of targets, the likeliest tokens, and logits centred over the vocabulary."""

import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError
from tests.models import tiny
from tests.tolerances import ADDITIVITY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]


def printed(model, ids):
    with torch.no_grad():
        return model.module(torch.tensor([ids]), use_cache=False).logits[0].double()


def logits_of(df):
    """{(prompt, position): {target: logit}} of a table whose rows sum to their logit."""
    schema.validate(df, "attribution")
    groups = df.groupby(["prompt", "position", "target"])
    error = (groups.contribution.sum() - groups.logit.first()).abs() / groups.contribution.agg(lambda x: x.abs().sum())
    assert error.max() <= ADDITIVITY[torch.float32]
    return groups.logit.first()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_likeliest_tokens_each_have_rows_of_their_own(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target="top3", positions="all")
    logits = logits_of(df)
    for prompt, ids in enumerate(PROMPTS):
        values, top = printed(model, ids).topk(3)
        rows = df[df.prompt == prompt].drop_duplicates(["position", "target"])
        assert rows.target.to_numpy().reshape(-1, 3).tolist() == top.tolist()
        for position, three in enumerate(top.tolist()):
            assert logits[prompt, position][three].to_list() == pytest.approx(values[position].tolist(), rel=1e-5)


def test_a_list_of_lists_gives_each_prompt_its_own_number_of_targets():
    model = tiny.proven("llama")
    logits = logits_of(sl.attribute(model, PROMPTS, target=[[11, "top2"], 4]))
    first = printed(model, PROMPTS[0])[-1]
    assert set(logits[0, 6].index) == {11, *first.topk(2)[1].tolist()}
    assert set(logits[1, 3].index) == {4}


def test_the_likeliest_tokens_against_one_of_them():
    model = tiny.proven("llama")
    top = printed(model, PROMPTS[0])[-1].topk(3)[1].tolist()
    df = sl.attribute(model, PROMPTS[0], target="top3", versus=top[1])
    assert df.target.unique().tolist() == [top[0], top[2]]
    with pytest.raises(InputError, match="versus must differ from target"):
        sl.attribute(model, PROMPTS[0], target="top1", versus=top[0])


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt-post-norm"])
def test_the_mean_of_the_vocabulary_is_subtracted(family):
    model = tiny.proven(family)
    df = sl.attribute(model, PROMPTS, target=[[11, 4], ["top2"]], versus="mean", positions="all")
    for (prompt, position, target), value in logits_of(df).items():
        logits = printed(model, PROMPTS[prompt])[position]
        assert value == pytest.approx(float(logits[target] - logits.mean()), rel=1e-5, abs=1e-5)


def test_removal_reads_the_likeliest_tokens_too():
    model = tiny.proven("llama")
    df = sl.ablate(model, PROMPTS[0], target="top2", metrics="target_logit", layers=1)
    assert df.target.tolist() == printed(model, PROMPTS[0])[-1].topk(2)[1].tolist()
