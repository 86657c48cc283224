"""The bundled sets are long enough, balanced, and made of single tokens for a real tokenizer."""

import numpy as np
import pytest

from streamlens.errors import InputError
from streamlens.prompts import all_bundled, bundled, bundled_names, parse, readouts

COLUMNS = ["set", "template", "kind", "prompt", "target", "versus"]


@pytest.mark.parametrize("name", bundled_names())
def test_each_set_has_at_least_10_prompts_that_read_as_they_are(name, smol):
    df, left_out = bundled(name, smol)
    assert left_out == 0
    assert len(df) >= 10
    assert list(df.columns) == COLUMNS
    assert set(df["set"]) == {name}
    assert df["prompt"].map(str).is_unique
    found = readouts(parse(df, smol, max_length=2048, vocab_size=smol.vocab_size), smol)
    assert len(found) == len(df)
    assert (found.target >= 0).all()
    assert (found.versus >= 0).all()


def test_texts_end_where_a_target_with_its_space_follows(smol):
    df, _ = all_bundled(smol)
    texts = df[df["set"] != "repeated"]
    assert texts["prompt"].str.fullmatch(r"[A-Z][A-Za-z ,]*[a-z]").all()
    for side in ("target", "versus"):
        assert texts[side].str.fullmatch(" [A-Za-z]+").all()


def test_indirect_objects_come_in_both_orders(smol):
    df, _ = bundled("indirect_objects", smol)
    for _, pair in df.groupby(["template", "target"]):
        assert sorted(pair["kind"]) == ["ABBA", "BABA"]
    for row in df.itertuples():
        target, versus = row.target.strip(), row.versus.strip()
        assert (row.prompt.count(target), row.prompt.count(versus)) == (1, 2)  # the versus is the one who acts
        assert (row.kind == "ABBA") == (row.prompt.index(target) < row.prompt.index(versus))


def test_agreement_is_balanced(smol):
    df, _ = bundled("agreement", smol)
    assert df["kind"].value_counts().to_dict() == {"singular": 12, "plural": 12}
    assert set(df.loc[df["kind"] == "singular", "target"]) == {" is", " was"}
    assert (df.loc[df["kind"] == "plural", "target"].isin([" are", " were"])).all()
    assert (df["template"].str.endswith("past") == df["target"].isin([" was", " were"])).all()


def test_repeated_blocks_end_one_token_early(smol):
    df, _ = bundled("repeated", smol)
    for row in df.itertuples():
        n = (len(row.prompt) + 1) // 2
        block = row.prompt[:n]
        assert row.kind == f"{n} tokens"
        assert [*row.prompt, row.target] == block * 2
        assert len(set(block)) == n
        assert row.versus in block
        assert row.versus != row.target
        assert all(smol.decode([i]).strip().isalpha() for i in block)


def test_repeated_blocks_follow_their_seed(smol):
    first, again, other = (bundled("repeated", smol, seed=seed)[0]["prompt"].tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_what_is_not_one_token_is_left_out_and_counted(smol):
    class Splits:
        """SmolLM2's tokenizer without the token " Paris"."""

        vocab_size, decode, convert_ids_to_tokens = smol.vocab_size, smol.decode, smol.convert_ids_to_tokens

        def __call__(self, text, **options):
            pieces = text.replace(" Paris", " Par|is").split("|")
            return {"input_ids": np.concatenate([smol(p, **options)["input_ids"] for p in pieces]).astype(int).tolist()}

    facts, left_out = bundled("facts", Splits())
    whole, _ = bundled("facts", smol)
    gone = whole[(whole["target"] == " Paris") | (whole["versus"] == " Paris")]
    assert left_out == len(gone) > 0
    assert len(facts) == len(whole) - left_out
    assert all_bundled(Splits())[1] == left_out


def test_all_sets_stand_under_one_another(smol):
    df, left_out = all_bundled(smol)
    assert left_out == 0
    assert list(df.columns) == COLUMNS
    assert tuple(df["set"].unique()) == bundled_names()
    assert df.index.tolist() == list(range(len(df)))


def test_repeated_blocks_start_with_the_bos_that_a_tokenizer_adds(tiny):
    letters = [f" {a}{b}" for a in "abcde" for b in "abcdef"]

    class Bos(type(tiny())):
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [99] * add_special_tokens + [1]}

        def convert_ids_to_tokens(self, ids):
            return [letters[i].replace(" ", "\u2581") for i in ids]

    tokenizer = Bos()
    tokenizer.vocab_size = len(letters)
    df, _ = bundled("repeated", tokenizer)
    assert all(row.prompt[0] == 99 and 99 not in row.prompt[1:] for row in df.itertuples())


def test_a_vocabulary_with_too_few_words_is_refused(tiny):
    with pytest.raises(InputError, match="must have 24 tokens with letters for the prompt set 'repeated'"):
        bundled("repeated", tiny())


def test_an_unknown_set_and_no_tokenizer(smol):
    with pytest.raises(InputError, match="name must be one of 'indirect_objects', 'facts', 'agreement', 'repeated'; got 'poems'"):
        bundled("poems", smol)
    with pytest.raises(InputError, match="tokenizer must be given"):
        bundled("facts", None)
