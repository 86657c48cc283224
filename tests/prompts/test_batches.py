"""Every prompt stands in one batch, unchanged, within the budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlens.errors import InputError
from streamlens.prompts import batches, parse


def prompts_of(lengths):
    return parse([list(range(1, n + 1)) for n in lengths], None, max_length=None, vocab_size=100)


def test_padding_stands_on_the_right_and_outside_the_mask():
    (batch,) = batches(prompts_of([1, 3]), 6, pad_id=9)
    assert batch.index.tolist() == [1, 0]
    assert batch.ids.tolist() == [[1, 2, 3], [1, 9, 9]]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False]]


def test_like_lengths_share_a_batch_and_keep_their_order():
    found = [b.index.tolist() for b in batches(prompts_of([2, 5, 2, 5, 1]), 10)]
    assert found == [[1, 3], [0, 2, 4]]


def test_a_prompt_over_the_budget_is_a_batch_by_itself():
    assert [b.index.tolist() for b in batches(prompts_of([9, 1, 1]), 4)] == [[0], [1, 2]]


def test_equal_length_pads_nothing():
    found = batches(prompts_of([2, 3, 2, 3, 3]), 6, equal_length=True)
    assert [b.index.tolist() for b in found] == [[1, 3], [4], [0, 2]]
    assert all(b.mask.all() for b in found)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30), budget=st.integers(1, 60), equal=st.booleans())
def test_batches_hold_every_prompt_once(lengths, budget, equal):
    prompts = prompts_of(lengths)
    found = batches(prompts, budget, equal_length=equal)
    assert sorted(np.concatenate([b.index for b in found]).tolist()) == list(range(len(lengths)))
    for batch in found:
        assert batch.ids.numel() <= budget or len(batch.index) == 1
        assert not equal or batch.mask.all()
        for row, i in enumerate(batch.index):
            assert batch.ids[row][batch.mask[row]].tolist() == prompts.ids[i].tolist()
            assert batch.mask[row, : lengths[i]].all()


@pytest.mark.parametrize("budget", [0, -1, True])
def test_a_budget_is_a_whole_number_from_1(budget):
    with pytest.raises(InputError, match="max_tokens must be a whole number from 1; got"):
        batches(prompts_of([1]), budget)
