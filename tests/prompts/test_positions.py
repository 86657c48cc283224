"""Positions count over a prompt's own tokens."""

import numpy as np
import pandas as pd
import pytest
import torch

from streamlens.errors import InputError
from streamlens.prompts import parse, positions


@pytest.fixture
def prompts():
    """Two prompts, of three tokens and of one."""
    return parse([[2, 3, 4], [5]], None, max_length=None, vocab_size=9)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [[2], [0]]),
        ("last", [[2], [0]]),
        ("all", [[0, 1, 2], [0]]),
        (0, [[0], [0]]),
        (-1, [[2], [0]]),
        (np.int64(0), [[0], [0]]),
        ([0, -1], [[0, 2], [0]]),  # one position named twice is read once
        (torch.tensor([-1, 0]), [[0, 2], [0]]),
        (range(1), [[0], [0]]),
        ([[1, 0], [0]], [[0, 1], [0]]),
        ([[-3], [-1]], [[0], [0]]),
        (["all", [0]], [[0, 1, 2], [0]]),
    ],
)
def test_positions(prompts, given, expected):
    read = positions(prompts, given)
    assert [p.tolist() for p in read] == expected
    assert all(p.dtype == np.int64 for p in read)


def test_the_column_of_a_frame_stands_in_for_none(tiny):
    df = pd.DataFrame({"prompt": ["a b c", "a b"], "position": [1, [0, -1]]})
    prompts = parse(df, tiny(), max_length=None, vocab_size=19)
    assert [p.tolist() for p in positions(prompts)] == [[1], [0, 1]]
    assert [p.tolist() for p in positions(prompts, "last")] == [[2], [1]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1, "from -1 to 0 for prompt 1, which has 1 tokens; got 1"),
        ([0, -2], "from -1 to 0 for prompt 1, .* got -2"),
        ([[3], [0]], "from -3 to 2 for prompt 0, .* got 3"),
        ([[0]], r"got a list of 1 for 2 prompts"),
        ([], r"got a list of 0 for 2 prompts"),
        ([[0], []], r"got \[\] for prompt 1"),
        ("first", "got 'first' for prompt 0"),
        (True, "got True for prompt 0"),
        (0.0, r"got 0\.0 for prompt 0"),
        ([[0], None], "got None for prompt 1"),
    ],
)
def test_what_is_no_position_is_named(prompts, given, message):
    with pytest.raises(InputError, match=f"positions must be .*{message}"):
        positions(prompts, given)
