"""Every kind of prompt becomes the ids that it stands for, and nothing else does."""

import numpy as np
import pandas as pd
import pytest
import torch

from streamlens import schema
from streamlens.errors import InputError
from streamlens.prompts import Prompts, parse
from streamlens.prompts.parse import TABLE_COLUMNS


def read(prompts, tokenizer=None, max_length=None, vocab_size=19):
    return parse(prompts, tokenizer, max_length=max_length, vocab_size=vocab_size)


def ids_of(prompts: Prompts):
    return [ids.tolist() for ids in prompts.ids]


def test_one_text_and_several(tiny):
    one, several = read("a b", tiny()), read(["a b", "c"], tiny())
    assert ids_of(one) == [[2, 7]]
    assert ids_of(several) == [[2, 7], [4]]
    assert several.texts == ("a b", "c")
    assert several.lengths.tolist() == [2, 1]
    assert len(several) == 2
    assert all(ids.dtype == np.int64 for ids in several.ids)


def test_bos_only_where_the_tokenizer_adds_it(tiny):
    assert ids_of(read("a", tiny(bos=True))) == [[0, 2]]
    assert ids_of(read("a", tiny(bos=False))) == [[2]]
    assert ids_of(read([[2, 3]], tiny(bos=True))) == [[2, 3]]


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([[2, 7], [4, 5]]),
        np.array([[2, 7], [4, 5]]),
        [[2, 7], [4, 5]],
        [torch.tensor([2, 7]), np.array([4, 5])],
        ((2, 7), (4, 5)),
    ],
)
def test_token_ids(given, tiny):
    prompts = read(given, tiny())
    assert ids_of(prompts) == [[2, 7], [4, 5]]
    assert prompts.texts == ("a b", "cd")


@pytest.mark.parametrize("given", [torch.tensor([2, 7, 4]), np.array([2, 7, 4]), [2, 7, 4], [np.int64(2), 7, torch.tensor(4)]])
def test_a_flat_sequence_of_ids_is_one_prompt(given):
    assert ids_of(read(given)) == [[2, 7, 4]]


def test_unequal_lengths_and_the_text_of_ids_without_a_tokenizer():
    prompts = read([[12, 7, 9], [1]])
    assert ids_of(prompts) == [[12, 7, 9], [1]]
    assert prompts.texts == ("12 7 9", "1")


@pytest.mark.parametrize("make", [torch.tensor, np.array, list])
def test_an_encoding_keeps_what_its_mask_keeps(make):
    encoding = {"input_ids": make([[0, 0, 5], [6, 7, 8], [9, 9, 0]]), "attention_mask": make([[0, 0, 1], [1, 1, 1], [1, 1, 0]])}
    assert ids_of(read(encoding)) == [[5], [6, 7, 8], [9, 9]]


def test_an_encoding_of_one_text_and_without_a_mask():
    assert ids_of(read({"input_ids": [3, 4], "attention_mask": [0, 1]})) == [[4]]
    assert ids_of(read({"input_ids": [[3, 4]]})) == [[3, 4]]


def test_left_padding_of_a_real_tokenizer_is_stripped(smol):
    texts = ["The capital of France is", "Hello"]
    side, smol.padding_side = smol.padding_side, "left"
    smol.pad_token, pad = smol.eos_token, smol.pad_token
    try:
        padded = smol(texts, return_tensors="pt", padding=True)
    finally:
        smol.padding_side, smol.pad_token = side, pad
    assert padded["attention_mask"][1, 0] == 0
    from_encoding, from_text = (parse(p, smol, max_length=None, vocab_size=smol.vocab_size) for p in (padded, texts))
    assert ids_of(from_encoding) == ids_of(from_text)
    assert from_encoding.texts == from_text.texts == tuple(texts)


@pytest.mark.parametrize("several", [False, True])
def test_chat_goes_through_the_template_with_the_generation_prompt(tiny, several):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompts = read([chat, chat] if several else chat, tiny(bos=True))
    assert ids_of(prompts) == [[0, 2, 16, 3, 16, 17]] * (2 if several else 1)  # the template's own <s>, no second one
    assert prompts.texts[0] == "<s>a<x>b<x>e"


def test_chat_of_a_real_tokenizer(smol):
    prompts = parse([{"role": "user", "content": "Hi"}], smol, max_length=None, vocab_size=smol.vocab_size)
    expected = smol.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False)
    assert ids_of(prompts) == [expected]
    assert prompts.texts[0].endswith("<|im_start|>assistant\n")


def test_a_frame_gives_its_reserved_columns_and_carries_the_others(tiny):
    df = pd.DataFrame(
        {
            "prompt": ["a b", [4, 5], "c"],
            "target": [" c", None, 3],
            "versus": [5.0, np.nan, 6.0],
            "position": ["last", 0, [0, -1]],
            "corrupted": ["b", "c", "d"],
            "template": ["x", "y", "x"],
            "size": [1, 2, 3],
        },
        index=[7, 8, 9],
    )
    prompts = read(df, tiny())
    assert ids_of(prompts) == [[2, 7], [4, 5], [4]]
    assert prompts.texts == ("a b", "cd", "c")
    assert prompts.targets == (" c", None, 3)
    assert prompts.versus == (5, None, 6)
    assert prompts.positions == ("last", 0, [0, -1])
    assert prompts.corrupted == ("b", "c", "d")
    assert prompts.columns == {"template": ("x", "y", "x"), "size": (1, 2, 3)}


@pytest.mark.parametrize(("name", "meant"), [("targt", "target"), ("Targets", "target"), ("corupted", "corrupted"), (" versus", "versus")])
def test_a_column_that_is_nearly_a_reserved_one_is_asked_about(name, meant, tiny):
    df = pd.DataFrame({"prompt": ["a"], name: ["b"]})
    with pytest.warns(UserWarning, match=f"column '{name}', which is carried along unread; did you mean '{meant}'"):
        assert read(df, tiny()).columns == {name: ("b",)}
    read(df.assign(**{meant: "c"}), tiny())  # both are there: this one is meant as it is
    read(df.rename(columns={name: "version"}), tiny())


@pytest.mark.parametrize("dtype", ["Int64", "float64", "object"])
def test_missing_cells_of_any_dtype_are_none(dtype, tiny):
    cells = pd.Series([3, None], dtype=dtype)
    prompts = read(pd.DataFrame({"prompt": ["a", "b"], "target": cells, "position": cells}), tiny())
    assert (prompts.targets, prompts.positions) == ((3, None), (3, None))


def test_a_frame_without_reserved_columns_has_none(tiny):
    prompts = read(pd.DataFrame({"prompt": ["a"]}), tiny())
    assert (prompts.targets, prompts.versus, prompts.positions, prompts.corrupted, dict(prompts.columns)) == (None, None, None, None, {})


def test_a_series_is_a_list(tiny):
    assert ids_of(read(pd.Series(["a", "b"]), tiny())) == [[2], [3]]


def test_the_columns_of_all_tables_that_carry_the_users_own_are_known():
    tables = [{column.name for column in table.columns} for table in schema.TABLES.values()]
    every = set().union({"model"}, *(columns for columns in tables if "prompt" in columns))
    assert every == TABLE_COLUMNS


@pytest.mark.parametrize("name", ["contribution", "layer", "model", "logit"])
def test_a_carried_column_may_not_hide_one_of_the_result(name, tiny):
    with pytest.raises(InputError, match=f"rename '{name}'"):
        read(pd.DataFrame({"prompt": ["a"], name: [1]}), tiny())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", r"prompts\[0\] must have at least one token; got an empty prompt"),
        (["a", ""], r"prompts\[1\] must have at least one token"),
        ([], "at least one prompt .* got none"),
        ([[2], []], r"prompts\[1\] must have at least one token"),
        (torch.zeros(0, 3, dtype=torch.long), "at least one prompt"),
        (pd.DataFrame({"prompt": []}), "at least one prompt"),
        ({"input_ids": [[3, 4]], "attention_mask": [[0, 0]]}, r"prompts\[0\] must have at least one token"),
        ([2, 3, 4, 5, 6], r"prompts\[0\] must have at most 4 tokens, the model's context; got 5"),
        (["a", "a a a a a"], r"prompts\[1\] must have at most 4 tokens"),
        ([[2], [3, 19]], r"prompts\[1\] must have token ids from 0 to 18; got 19 at position 1"),
        ([[-1]], "got -1 at position 0"),
        ([[10**20]], "got 100000000000000000000 at position 0"),
        (torch.tensor([[0.5]]), r"prompts\[0\] must be text, whole-number token ids .* got \[0.5\]"),
        ([True, False], r"prompts\[0\] must be text, .* got True"),
        ([None], "got None"),
        (7, "got int"),
        (None, "got NoneType"),
        (torch.tensor(7), "got Tensor"),
        (torch.zeros(1, 1, 1, dtype=torch.long), r"got \[\[0\]\]"),
        ({"ids": [1]}, "must have 'input_ids'; got the keys 'ids'"),
        ({"input_ids": "a"}, "must hold lists, arrays or tensors; got str"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, r"'attention_mask'\]\[0\] must keep one run"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, "must have the shape"),
        ([{"content": "a"}], "messages with 'role' and 'content'; got the keys 'content'"),
        ([{"role": "tool", "content": "a"}], "does not fit the tokenizer's chat template: the first message must be the user's"),
        (pd.DataFrame({"text": ["a"]}), "must have the column 'prompt'; got 'text'"),
        (pd.DataFrame({"prompt": ["a"], 3: [1]}), "must have text as column names, each once; got 3"),
        (pd.DataFrame([["a", 1, 2]], columns=["prompt", "x", "x"]), "each once; got 'x'"),
        (pd.DataFrame({"prompt": ["a", None]}), r"prompts\[1\] must be text"),
    ],
)
def test_what_cannot_be_read_is_named(given, message, tiny):
    with pytest.raises(InputError, match=message):
        read(given, tiny(), max_length=4)


def test_text_needs_a_tokenizer():
    with pytest.raises(InputError, match=r"prompts\[0\] is text but there is no tokenizer.*got 'a b'"):
        read("a b")


@pytest.mark.parametrize("tokenizer", [None, "without template"])
def test_chat_needs_a_template(tokenizer, tiny):
    with pytest.raises(InputError, match="has no chat template"):
        read([{"role": "user", "content": "a"}], tokenizer and tiny(chat_template=None))
