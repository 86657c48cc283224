"""A target is exactly the one token that the user meant, or an error says why it is not."""

import numpy as np
import pandas as pd
import pytest
import torch

from streamlens.errors import InputError
from streamlens.prompts import MEAN, NONE, TOP, fill_top, parse, readouts


def read(prompts, tokenizer, vocab_size=19, **asked):
    out = readouts(parse(prompts, tokenizer, max_length=None, vocab_size=vocab_size), tokenizer, **asked)
    assert all(a.dtype == np.int64 and a.shape == (len(out),) for a in (out.prompt, out.position, out.target, out.versus))
    return list(zip(*(a.tolist() for a in (out.prompt, out.position, out.target, out.versus)), strict=True))


ONE = [[2, 7, 4]]
TWO = [[2, 7, 4], [5, 3]]


def test_by_default_the_likeliest_token_at_the_last_position():
    assert read(TWO, None) == [(0, 2, TOP, NONE), (1, 1, TOP, NONE)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"target": 6}, [(0, 2, 6, NONE), (1, 1, 6, NONE)]),
        ({"target": [6, 8]}, [(0, 2, 6, NONE), (1, 1, 8, NONE)]),
        ({"target": torch.tensor([6, 8])}, [(0, 2, 6, NONE), (1, 1, 8, NONE)]),
        ({"target": [[6, 8], [1]]}, [(0, 2, 6, NONE), (0, 2, 8, NONE), (1, 1, 1, NONE)]),
        ({"target": [[6, 8], 1]}, [(0, 2, 6, NONE), (0, 2, 8, NONE), (1, 1, 1, NONE)]),
        ({"target": 6, "versus": 7}, [(0, 2, 6, 7), (1, 1, 6, 7)]),
        ({"target": 6, "versus": "mean"}, [(0, 2, 6, MEAN), (1, 1, 6, MEAN)]),
        ({"target": 6, "versus": [7, None]}, [(0, 2, 6, 7), (1, 1, 6, NONE)]),
        ({"target": [[6, 8], 1], "versus": [[1, 2], [3]]}, [(0, 2, 6, 1), (0, 2, 8, 2), (1, 1, 1, 3)]),
        ({"target": [[6, 8], 1], "versus": 3}, [(0, 2, 6, 3), (0, 2, 8, 3), (1, 1, 1, 3)]),
        ({"target": 6, "versus": [[1, 2], [3]]}, [(0, 2, 6, 1), (0, 2, 6, 2), (1, 1, 6, 3)]),
        ({"target": "top", "versus": 3}, [(0, 2, TOP, 3), (1, 1, TOP, 3)]),
        ({"target": ["top", 4]}, [(0, 2, TOP, NONE), (1, 1, 4, NONE)]),
        ({"target": "top1"}, [(0, 2, TOP, NONE), (1, 1, TOP, NONE)]),
        ({"target": "top2"}, [(0, 2, TOP, NONE), (0, 2, TOP - 1, NONE), (1, 1, TOP, NONE), (1, 1, TOP - 1, NONE)]),
        ({"target": [["top2", 6], 4]}, [(0, 2, TOP, NONE), (0, 2, TOP - 1, NONE), (0, 2, 6, NONE), (1, 1, 4, NONE)]),
        ({"target": ["top2", 4], "versus": [[1, 3], 5]}, [(0, 2, TOP, 1), (0, 2, TOP - 1, 3), (1, 1, 4, 5)]),
        ({"target": "next", "positions": "all"}, [(0, 0, 7, NONE), (0, 1, 4, NONE), (1, 0, 3, NONE)]),
        ({"target": "next", "positions": [[-2, -1], [0]]}, [(0, 1, 4, NONE), (1, 0, 3, NONE)]),
        ({"target": 6, "positions": [0, -1]}, [(0, 0, 6, NONE), (0, 2, 6, NONE), (1, 0, 6, NONE), (1, 1, 6, NONE)]),
    ],
)
def test_ids_and_keywords(asked, expected):
    assert read(TWO, None, **asked) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"target": [6, 8]}, [(0, 2, 6, NONE), (0, 2, 8, NONE)]),
        ({"target": [[6, 8]]}, [(0, 2, 6, NONE), (0, 2, 8, NONE)]),
        ({"target": [6, 8], "versus": [1, 2]}, [(0, 2, 6, 1), (0, 2, 8, 2)]),
        ({"target": [6], "versus": [1, 2]}, [(0, 2, 6, 1), (0, 2, 6, 2)]),
        (
            {"target": ["next", 6], "positions": "all"},
            [(0, 0, 7, NONE), (0, 0, 6, NONE), (0, 1, 4, NONE), (0, 1, 6, NONE), (0, 2, 6, NONE)],
        ),
    ],
)
def test_a_list_for_a_single_prompt_is_several_targets(asked, expected):
    assert read(ONE, None, **asked) == expected


def test_many_positions_keep_the_order_of_their_targets():
    ids, targets = [2, 7, 4, 5, 3] * 20, [9, 6, 8, 1]
    assert read([ids], None, target=targets, positions="all") == [(0, at, target, NONE) for at in range(100) for target in targets]


def test_the_whole_vocabulary_may_be_asked_for():
    assert read(ONE, None, target="top19") == [(0, 2, TOP - rank, NONE) for rank in range(19)]


def test_a_prompt_of_one_token_has_no_next_token_to_read():
    assert read([[2, 3], [4]], None, target="next", positions="all") == [(0, 0, 3, NONE)]


def test_the_columns_of_a_frame_stand_in_for_none(tiny):
    df = pd.DataFrame({"prompt": ["a b", "a"], "target": [[" c", " d"], "top"], "versus": [None, " c"], "position": [0, -1]})
    assert read(df, tiny()) == [(0, 0, 8, NONE), (0, 0, 9, NONE), (1, 0, TOP, 8)]
    assert read(df, tiny(), target=" a", versus="mean", positions="last") == [(0, 1, 6, MEAN), (1, 0, 6, MEAN)]


def test_a_column_of_targets_has_one_for_every_prompt_or_for_none(tiny):
    df = pd.DataFrame({"prompt": ["a b", "a"], "target": [None, None]})
    assert read(df, tiny()) == [(0, 1, TOP, NONE), (1, 0, TOP, NONE)]
    with pytest.raises(InputError, match=r"target must be given for every prompt or for none, .*; got none for prompt 1"):
        read(df.assign(target=[" c", None]), tiny())
    with pytest.raises(InputError, match=r"target must be text, a token id or .*; got 1.5 for prompt 0"):
        read(df.assign(target=[1.5, 2.0]), tiny())


def test_a_cell_of_a_single_row_frame_may_be_a_list(tiny):
    assert read(pd.DataFrame({"prompt": ["a b"], "target": [[" c", " d"]]}), tiny()) == [(0, 1, 8, NONE), (0, 1, 9, NONE)]


def test_a_text_is_the_token_that_it_adds(tiny):
    assert read("a b", tiny(bos=True), target=" c", versus=" d") == [(0, 2, 8, 9)]
    assert read(["a b", "a"], tiny(), target=[" c", " d"]) == [(0, 1, 8, NONE), (1, 0, 9, NONE)]


@pytest.mark.parametrize("special", [{"bos": True}, {"eos": True}, {"bos": True, "eos": True}])
def test_special_tokens_of_the_tokenizer_are_no_part_of_a_target(special, tiny):
    assert [row[2] for row in read("a b", tiny(**special), target=" c")] == [8]


def test_a_target_that_would_change_the_prompt_is_read_by_itself(tiny):
    """ "a" + "b" is the one token "ab"."""
    with pytest.warns(UserWarning, match="' b' is one token too"):
        assert read("a", tiny(), target="b") == [(0, 0, 3, NONE)]


def test_a_target_behind_ids_and_behind_a_chat(tiny):
    assert read([[2, 7]], tiny(bos=True), target=" c") == [(0, 1, 8, NONE)]
    assert read([{"role": "user", "content": "a"}], tiny(bos=True), target=" c") == [(0, 3, 8, NONE)]


def test_keywords_win_over_their_text(tiny):
    assert read("a b", tiny(), target="next", positions=0) == [(0, 0, 7, NONE)]
    assert read("a b ", tiny(), target=14, versus=13) == [(0, 2, 14, 13)]


def test_the_split_of_several_tokens_is_shown(smol):
    message = r"target must be one token; got ' Paris,', which is 2: \[' Paris', ','\], behind prompt 0; its first piece, id 7042, is one"
    with pytest.raises(InputError, match=message):
        read("The Eiffel Tower is in the city of", smol, smol.vocab_size, target=" Paris,")


def test_one_warning_names_the_forgotten_space(smol):
    with pytest.warns(
        UserWarning, match=r"target 'Paris' \(and 1 more\) continues prompt 0 without a space; ' Paris' is one token"
    ) as seen:
        rows = read("The Eiffel Tower is in the city of", smol, smol.vocab_size, target=["Paris", "Rome", " Berlin"])
    assert len(seen) == 1
    assert [row[2] for row in rows] == [smol(text)["input_ids"][0] for text in ("Paris", "Rome", " Berlin")]


def test_the_warning_names_the_first_of_several_prompts(smol):
    with pytest.warns(UserWarning, match="target 'Paris' continues prompt 1 without a space"):
        read(["Paris\n", "The capital is", "The city is"], smol, smol.vocab_size, target="Paris")


def test_no_warning_where_a_space_changes_nothing(tiny):
    class Spacing(tiny):
        """Puts a space before every text, as SentencePiece does; behind "a" a "b" would make the token "ab", so it is read by itself."""

        def __call__(self, text, add_special_tokens=True):
            return super().__call__(text if text.startswith(" ") else f" {text}", add_special_tokens)

    assert read("c,a", Spacing(), target="b") == [(0, 2, 7, NONE)]


@pytest.mark.parametrize("prompt", ["Paris\n", "Paris ", '"', "(", "well-"])
def test_no_warning_where_a_word_needs_no_space(prompt, smol):
    assert len(read(prompt, smol, smol.vocab_size, target="Paris")) == 1


def test_no_warning_for_punctuation(smol):
    assert len(read("In Paris", smol, smol.vocab_size, target=",")) == 1


@pytest.mark.parametrize(
    ("prompts", "asked", "message"),
    [
        ("a b", {"target": " c,"}, r"target must be one token; got ' c,', which is 2: \[' c', ','\], behind prompt 0"),
        ("a b", {"target": " c", "versus": "dc"}, "versus must be one token; got 'dc', which is 2"),
        ("a b", {"target": ""}, "got '', which is none"),
        ("a b", {"target": " c", "versus": " c"}, "versus must differ from target; got token 8 as both at prompt 0, position 1"),
        ("a b", {"target": "next", "versus": " b", "positions": "all"}, "versus must differ from target; got token 7"),
        (TWO, {"target": "next"}, "before the last token for target 'next'; got 'last' for prompt 0"),
        (TWO, {"target": "next", "positions": -1}, "before the last token for target 'next'; got -1 for prompt 0"),
        (TWO, {"target": ["top", "next"], "positions": ["all", [1]]}, r"got \[1\] for prompt 1"),
        ([[3], [4]], {"target": "next", "positions": "all"}, "prompts of a single token only"),
        (TWO, {"target": 19}, "target must be a token id from 0 on, below the vocabulary's 19; got 19 for prompt 0"),
        (TWO, {"target": 1, "versus": -1}, "versus must be a token id .* got -1"),
        (TWO, {"target": True}, "target must be text, a token id or 'top' or 'next' or 'top5' and the like; got True for prompt 0"),
        (TWO, {"target": "top20"}, "target 'top20' must not be more than the vocabulary's 19 tokens; got it for prompt 0"),
        (TWO, {"target": ["top2", 1], "versus": [[1, 2, 3], 4]}, "as many as the 2 targets of prompt 0; got 3"),
        (TWO, {"target": [["top2", "top"], 1]}, "name each token once for one versus; got a repeated one for prompt 0"),
        (TWO, {"target": 1.5}, "target must be text, .* got 1.5"),
        (TWO, {"target": [1, 2, 3]}, "target must be one for all prompts or a list .* each of 2; got a list of 3"),
        (TWO, {"target": []}, "target must be at least one token; got an empty list"),
        (TWO, {"target": [[1], []]}, "got an empty list for prompt 1"),
        (TWO, {"target": [[1, 2], [3, 4]], "versus": [[5, 6, 7], [5, 6]]}, "as many as the 2 targets of prompt 0; got 3"),
        ("a b ", {"target": "mean"}, "target 'mean' is a keyword of versus alone: give the id .* got it for prompt 0"),
        ("a b ", {"target": 1, "versus": "next"}, "versus 'next' is a keyword of target alone"),
        ("a b ", {"target": 1, "versus": [2, "top"]}, "versus 'top' is a keyword of target alone"),
        (TWO, {"target": 1, "versus": [2, "top5"]}, "versus 'top5' is a keyword of target alone.* got it for prompt 1"),
        (ONE, {"target": [1, 1]}, "name each token once for one versus; got a repeated one for prompt 0"),
    ],
)
def test_what_is_no_target_is_named(prompts, asked, message, tiny):
    with pytest.raises(InputError, match=message):
        read(prompts, tiny(), **asked)


def test_an_error_does_not_hint_at_a_space_that_does_not_help(tiny):
    with pytest.raises(InputError, match=r"got 'bc', which is 2: .*, behind prompt 0; its first piece, id \d+, is one$"):
        read("a", tiny(), target="bc")


def test_there_are_no_zero_likeliest_tokens_and_none_to_subtract(smol):
    with pytest.raises(InputError, match="target must be one token; got 'top0', which is 2"):
        read("The capital is", smol, smol.vocab_size, target="top0")
    with pytest.raises(InputError, match="versus 'top5' is a keyword of target alone"):
        read("The capital is", smol, smol.vocab_size, target=" Tokyo", versus="top5")


def test_an_error_hints_at_the_leading_space(smol):
    with pytest.raises(InputError, match="with a leading space, ' Tokyo', it is one"):
        read("The capital is", smol, smol.vocab_size, target="Tokyo")


def test_text_needs_a_tokenizer():
    with pytest.raises(InputError, match=r"target is text but there is no tokenizer.*got ' a'"):
        read(TWO, None, target=" a")


def asked_of(prompts, **asked):
    return readouts(parse(prompts, None, max_length=None, vocab_size=19), None, **asked)


def test_fill_top_replaces_the_likeliest_token_only():
    asked = asked_of(TWO, target=["top", 4], versus=9)
    filled = fill_top(asked, np.array([11, 12]))
    assert filled.target.tolist() == [11, 4]
    assert asked.target.tolist() == [TOP, 4]
    assert filled.versus.tolist() == [9, 9]


def test_fill_top_keeps_the_order_in_which_targets_were_asked():
    filled = fill_top(asked_of(ONE, target=[8, "top", 4, 6]), np.array([-1, 5, -1, -1]))
    assert filled.target.tolist() == [8, 5, 4, 6]


def test_fill_top_leaves_out_a_row_that_it_would_repeat():
    filled = fill_top(asked_of(ONE, target=[4, "top"], positions=[0, 1]), np.array([-1, 4, -1, 5]))
    assert filled.position.tolist() == [0, 1, 1]
    assert filled.target.tolist() == [4, 4, 5]


def test_fill_top_refuses_a_versus_that_is_the_likeliest_token():
    with pytest.raises(InputError, match="versus must differ from target; got token 9 as both at prompt 1, position 1"):
        fill_top(asked_of(TWO, versus=9), np.array([3, 9]))


def test_fill_top_fills_in_each_rank():
    filled = fill_top(asked_of(TWO, target="top2"), np.array([11, 12, 13, 14]))
    assert filled.target.tolist() == [11, 12, 13, 14]


def test_one_of_several_likeliest_tokens_that_is_its_own_versus_has_no_row():
    filled = fill_top(asked_of(TWO, target="top2", versus=9), np.array([11, 9, 9, 14]))
    assert (filled.prompt.tolist(), filled.target.tolist()) == ([0, 1], [11, 14])
    with pytest.raises(InputError, match="versus must differ from target; got token 9 as both at prompt 1, position 1"):
        fill_top(asked_of(TWO, target=["top2", "top"], versus=9), np.array([11, 9, 9]))


def test_take_chooses_rows():
    chosen = asked_of(TWO, target=6, positions="all").take(np.array([False, True, False, False, True]))
    assert list(zip(chosen.prompt.tolist(), chosen.position.tolist(), strict=True)) == [(0, 1), (1, 1)]
