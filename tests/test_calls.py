"""The calls as a user makes them: kinds of prompts, what a table says of itself, and one clear line for what is wrong."""

import json
from itertools import count

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError, NumericError, SourceError, StreamLensError, UnsupportedModelError
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]
EIFFEL = "The Eiffel Tower is in the city of"
TABLES = {"attribute": "attribution", "ablate": "ablation", "norms": "norms"}


@pytest.fixture(scope="module")
def llama():
    return tiny.proven("llama")


# -- names -----------------------------------------------------------------------------------------------------------
def test_two_models_of_one_class_are_told_apart_by_the_names_they_are_given(llama):
    tables = [sl.norms(sl.load(tiny.model("llama", seed=seed), name=name), PROMPTS) for seed, name in ((1, "one"), (2, "two"))]
    both = schema.concat(tables, "norms")
    assert list(both.model.unique()) == ["one", "two"]
    assert sl.growth_rate(both).model.tolist() == ["one", "two"]
    renamed = sl.load(llama, name="another")
    assert (renamed.name, renamed.module is llama.module, sl.load(llama) is llama) == ("another", True, True)
    for name in ("", 3):
        with pytest.raises(InputError, match=f"name must be text, or None; got {name!r}"):
            sl.load(llama, name=name)


# -- prompts ---------------------------------------------------------------------------------------------------------
def test_one_prompt_in_many_guises(smollm2):
    ids = smollm2.tokenizer(EIFFEL)["input_ids"]
    guises = [[EIFFEL], ids, torch.tensor([ids]), np.array(ids), pd.DataFrame({"prompt": [EIFFEL]}), smollm2.tokenizer(EIFFEL)]
    expected = sl.norms(smollm2, EIFFEL, sites="final")
    for guise in guises:
        pd.testing.assert_frame_equal(sl.norms(smollm2, guise, sites="final"), expected)


def test_left_padding_of_a_tokenizer_shifts_nothing(smollm2):
    prompts = [EIFFEL, "Water boils at"]
    tokenizer = smollm2.tokenizer
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    try:
        encoded = tokenizer(prompts, padding=True, return_tensors="pt")
    finally:
        tokenizer.padding_side = side
    assert not encoded["attention_mask"].all()
    pd.testing.assert_frame_equal(sl.norms(smollm2, encoded, sites="final"), sl.norms(smollm2, prompts, sites="final"))


def test_no_token_is_added_silently(smollm2):
    df = sl.norms(smollm2, EIFFEL, sites="embed", measures="l2")
    assert df.token.tolist() == ["The", " E", "iffel", " Tower", " is", " in", " the", " city", " of"]


def test_chat_messages_go_through_the_models_template(smollm2):
    messages = [{"role": "user", "content": "Hi"}]
    text = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    df = sl.attribute(smollm2, messages)
    assert df.prompt_text.unique().tolist() == [text]
    assert len(df) == 301


def test_a_model_without_a_tokenizer_takes_ids(llama):
    assert llama.tokenizer is None
    df = sl.attribute(llama, PROMPTS, target=11)
    assert df.target_token.unique().tolist() == ["11"]
    assert df.prompt_text.unique().tolist() == ["5 9 3 22 41 17 8", "30 7 7 12", "2 58 33 19 20 21"]


def test_batches_are_within_max_tokens(llama, monkeypatch):
    shapes = []
    monkeypatch.setattr(
        "streamlens.calls.norms.watched", lambda items, progress, title: shapes.extend(tuple(b.ids.shape) for b in items) or items
    )
    sl.norms(llama, PROMPTS, max_tokens=12)
    assert shapes == [(1, 7), (2, 6)]


def test_a_progress_bar_in_a_log_is_drawn_seldom(llama, capsys, monkeypatch):
    def drawn() -> int:
        sl.ablate(llama, PROMPTS, progress=True, max_tokens=1)
        return capsys.readouterr().err.count("forward passes")

    monkeypatch.setattr("tqdm.std.time", count(step=1).__next__)  # a second goes by at every look
    seldom = drawn()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert 1 < seldom < 6 < drawn()


def test_progress_goes_to_stderr(llama, capsys):
    sl.attribute(llama, PROMPTS, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "attribute: 100%" in captured.err
    sl.attribute(llama, PROMPTS)
    assert capsys.readouterr().err == ""


# -- tables ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", TABLES)
def test_a_table_says_where_it_comes_from_also_in_parquet(call, llama, tmp_path):
    df = getattr(sl, call)(llama, PROMPTS, positions=[0, 1])
    schema.validate(df, TABLES[call])
    assert df.attrs["model"] == "LlamaForCausalLM"
    assert df.attrs["source"] == "LlamaForCausalLM in memory"
    assert df.attrs["dtype"] == "float32"
    assert df.attrs["revision"] is None
    assert df.attrs["versions"]["torch"] == torch.__version__.split("+")[0] or df.attrs["versions"]["torch"] == torch.__version__
    assert set(df.attrs["versions"]) == {"python", "streamlens", "torch", "transformers", "numpy", "pandas"}
    assert df.attrs["arguments"]["positions"] == [0, 1]
    assert json.loads(json.dumps(df.attrs)) == df.attrs
    path = schema.write_parquet(df, tmp_path / "table.parquet")
    back = schema.read_parquet(path, TABLES[call])
    pd.testing.assert_frame_equal(back, df, check_categorical=False)
    assert back.attrs == df.attrs


@pytest.mark.parametrize("call", TABLES)
def test_the_same_call_gives_the_same_table(call, llama):
    pd.testing.assert_frame_equal(getattr(sl, call)(llama, PROMPTS), getattr(sl, call)(llama, PROMPTS))


def test_a_loaded_model_may_be_loaded_again(llama):
    assert sl.load(llama) is llama


def test_model_facts(llama):
    assert (llama.n_layers, llama.max_length, llama.dtype) == (3, 64, torch.float32)
    assert "LlamaForCausalLM" in repr(llama)
    assert len(repr(llama)) < 200


# -- what is wrong ---------------------------------------------------------------------------------------------------
WRONG = {
    "prompts must hold at least one prompt": lambda m: sl.attribute(m, []),
    r"prompts\[0\] must have at least one token; got an empty prompt": lambda m: sl.attribute(m, [[]]),
    r"prompts\[1\] must have at most 64 tokens, the model's context; got 65": lambda m: sl.attribute(m, [[1], [1] * 65]),
    r"prompts\[0\] must have token ids from 0 to 59; got 60 at position 1": lambda m: sl.norms(m, [[1, 60]]),
    r"prompts\[0\] is text but there is no tokenizer": lambda m: sl.ablate(m, "the cat"),
    "target is text but there is no tokenizer": lambda m: sl.attribute(m, PROMPTS, target=" Paris"),
    "target must be a token id from 0 on, below the vocabulary's 60; got 60": lambda m: sl.attribute(m, PROMPTS, target=60),
    "target must be a token id from 0 on, below the vocabulary's 60; got -1": lambda m: sl.ablate(m, PROMPTS, target=-1),
    "target must be one for all prompts or a list with one .* for each of 3; got a list of 2": lambda m: sl.attribute(
        m, PROMPTS, target=[1, 2]
    ),
    "versus must differ from target; got token 11 as both at prompt 0, position 6": lambda m: sl.attribute(
        m, PROMPTS, target=11, versus=11
    ),
    "versus must differ from target; got token 7 .* prompt 1": lambda m: sl.attribute(
        m, PROMPTS, target="next", versus=7, positions=[0, 1]
    ),
    "positions must be from -4 to 3 for prompt 1, which has 4 tokens; got 4": lambda m: sl.attribute(m, PROMPTS, positions=4),
    "positions must be from -4 to 3 for prompt 1, which has 4 tokens; got -5": lambda m: sl.norms(m, PROMPTS, positions=[-5]),
    "positions must be from -6 to 5 for prompt 2, which has 6 tokens; got 6": lambda m: sl.record(m, PROMPTS, "z", [[0], [0], [6]]),
    "positions must hold one before the last token for target 'next'": lambda m: sl.attribute(m, PROMPTS, target="next", positions="last"),
    "positions must be 'last', 'all'.*; got 'first'": lambda m: sl.attribute(m, PROMPTS, positions="first"),
    "layers must be indices from 0 to 2; got 3": lambda m: sl.ablate(m, PROMPTS, layers=[0, 3]),
    "layers must be indices from 0 to 2; got -1": lambda m: sl.ablate(m, PROMPTS, layers=-1),
    "layers must be indices from 0 to 2; got True": lambda m: sl.ablate(m, PROMPTS, layers=[True]),
    "layers must name at least one layer; got none": lambda m: sl.ablate(m, PROMPTS, layers=[]),
    "unit must be one of 'block', 'attn', 'mlp'.*; got 'layer'": lambda m: sl.ablate(m, PROMPTS, unit="layer"),
    "method must be one of 'remove'.*; got 'delete'": lambda m: sl.ablate(m, PROMPTS, method="delete"),
    "metrics must be one of 'loss', .*; got 'perplexity'": lambda m: sl.ablate(m, PROMPTS, metrics=["loss", "perplexity"]),
    "metrics must name at least one of loss, .*; got none": lambda m: sl.ablate(m, PROMPTS, metrics=[]),
    "sites must be one of 'embed', .*; got 'resid'": lambda m: sl.norms(m, PROMPTS, sites="resid"),
    "measures must be one of 'l2', 'rms', .*; got 'l1'": lambda m: sl.norms(m, PROMPTS, measures="l1"),
    "check must be one of True, False, 'warn', 'full'; got 'no'": lambda m: sl.attribute(m, PROMPTS, check="no"),
    "max_tokens must be a whole number from 1; got 0": lambda m: sl.attribute(m, PROMPTS, max_tokens=0),
    "must not carry a column named like one of the result; rename 'layer'": lambda m: sl.attribute(
        m, pd.DataFrame({"prompt": PROMPTS, "layer": 0})
    ),
    "prompts as a DataFrame must have the column 'prompt'": lambda m: sl.norms(m, pd.DataFrame({"text": ["a"]})),
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_input_gets_one_clear_line(message, llama):
    with pytest.raises(InputError, match=message) as caught:
        WRONG[message](llama)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", ["attribute", "ablate"])
def test_versus_that_turns_out_to_be_the_top_is_refused(call, llama):
    top = int(sl.attribute(llama, PROMPTS[0]).target.iloc[0])
    with pytest.raises(InputError, match=f"versus must differ from target; got token {top} as both"):
        getattr(sl, call)(llama, PROMPTS[0], target="top", versus=top)


@pytest.mark.parametrize("call", ["attribute", "ablate"])
def test_a_target_of_several_tokens_shows_its_split(call, smollm2):
    with pytest.raises(InputError, match=r"target must be one token; got ' Antananarivo', which is \d: \[' Ant', .*\], behind prompt 0"):
        getattr(sl, call)(smollm2, "The capital of Madagascar is", target=" Antananarivo")


def test_a_forgotten_space_is_named_once(smollm2):
    with pytest.warns(UserWarning, match="target 'Paris' .*without a space; ' Paris' is one token too") as caught:
        sl.attribute(smollm2, EIFFEL, target="Paris")
    assert len(caught) == 1


def test_growth_rate_of_layers_out_of_range(llama):
    df = sl.norms(llama, PROMPTS)
    with pytest.raises(InputError, match=r"layers .*9"):
        sl.growth_rate(df, layers=(0, 9))


def test_versus_mean_with_a_softcap_is_the_centred_printed_logit():
    model = tiny.proven("gemma2")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    df = sl.attribute(model, ids, target=11, versus="mean", check="full")
    with torch.no_grad():
        printed = model.module(ids).logits[0, -1].double()
    assert df.logit.iloc[0] == pytest.approx(float(printed[11] - printed.mean()), abs=1e-4)
    assert df.contribution.sum() == pytest.approx(df.logit.iloc[0], abs=1e-4)
    assert (df.component == "softcap").sum() == 1


@pytest.mark.parametrize("call", ["attribute", "ablate", "norms", "record"])
def test_check_is_one_of_its_values(call):
    model = tiny.proven("llama")
    arguments = {"sites": ["z"]} if call == "record" else {}
    with pytest.raises(InputError, match="check must be one of True, False, 'warn', 'full'; got 'nonsense'"):
        getattr(sl, call)(model, [[5, 6, 7]], check="nonsense", **arguments)


def test_a_removal_that_a_replay_gets_wrong_is_refused_by_the_full_check(monkeypatch):
    model = tiny.proven("llama")
    monkeypatch.setattr("streamlens.stream.replay.Replay.changed", lambda replay, *made: replay.each([made])[0] + 1)
    sl.ablate(model, [[5, 6, 7]])
    with pytest.raises(NumericError, match="the change at layer 1 by replay misses the hooked pass by"):
        sl.ablate(model, [[5, 6, 7]], check="full")


def test_norms_that_are_not_finite_are_refused():
    model = sl.load(tiny.model("llama"))
    with torch.no_grad():
        model.module.get_input_embeddings().weight.mul_(1e38)
    with pytest.raises(NumericError, match="a norm is not finite in"):
        sl.norms(model, [[5, 6, 7]], measures="l2")
    with pytest.warns(UserWarning, match="a norm is not finite in"):
        sl.norms(model, [[5, 6, 7]], measures="l2", check="warn")
    sl.norms(model, [[5, 6, 7]], measures="l2", check=False)


def test_a_unit_that_the_layers_do_not_have_is_refused():
    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=60, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = sl.load(transformers.MambaForCausalLM(config).eval())
    with pytest.raises(InputError, match="unit='attn': none of the chosen layers of MambaForCausalLM has one"):
        sl.ablate(model, PROMPTS, unit="attn")


def test_models_that_cannot_be_served_are_named():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    with pytest.raises(
        UnsupportedModelError, match="BertForMaskedLM is an encoder-only model; streamlens reads decoder-only language models"
    ):
        sl.load(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))
    broken = tiny.model("llama")
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"weights that are not finite: model.layers.1.mlp.up_proj.weight holds 1 NaN"):
        sl.load(broken)


def test_models_that_are_not_there_are_named(tmp_path):
    with pytest.raises(SourceError, match=r"no such folder: .*nothing"):
        sl.load(tmp_path / "nothing")
    with pytest.raises(SourceError, match="no-such-owner/no-such-model"):
        sl.load("no-such-owner/no-such-model")
    assert issubclass(SourceError, StreamLensError)


@pytest.mark.parametrize("positions", [-1, ["last", "last", "last"], np.array([-1])])
def test_the_last_token_has_no_next_one_however_it_is_named(llama, positions):
    expected = sl.ablate(llama, PROMPTS, positions="last")
    pd.testing.assert_frame_equal(sl.ablate(llama, PROMPTS, positions=positions), expected)


def test_layers_come_as_any_whole_numbers(llama):
    expected = sl.ablate(llama, PROMPTS, layers=1)
    for layers in (np.int64(1), [1], torch.tensor([1]), range(1, 2)):
        pd.testing.assert_frame_equal(sl.ablate(llama, PROMPTS, layers=layers), expected)
    with pytest.raises(InputError, match=r"layers must be indices from 0 to 2; got 1\.5"):
        sl.ablate(llama, PROMPTS, layers=1.5)


@pytest.mark.parametrize(("call", "arguments"), [("ablate", {"metrics": 5}), ("norms", {"sites": 3}), ("record", {"sites": None})])
def test_what_is_no_list_of_words_is_named(llama, call, arguments):
    with pytest.raises(InputError, match=f"{next(iter(arguments))} must be"):
        getattr(sl, call)(llama, PROMPTS, **arguments)


def test_a_prompt_without_its_target_is_named(llama):
    with pytest.raises(InputError, match=r"target must be given for every prompt or for none, .*; got none for prompt 1"):
        sl.attribute(llama, pd.DataFrame({"prompt": PROMPTS[:2], "target": [5, None]}))


def test_half_a_surrogate_pair_is_no_text(smollm2):
    with pytest.raises(InputError, match="text must be whole characters"):
        sl.attribute(smollm2, "a \ud800")
