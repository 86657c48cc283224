"""Every task's answers, worked out again from its rows in the slowest way."""

import pytest
import torch

from streamlens.decoder.data import batch_of
from streamlens.decoder.tasks import BracketMatching, KeyValueRecall, ModularAddition, RepeatedTokens
from streamlens.errors import InputError

TASKS = [RepeatedTokens(), ModularAddition(p=11), BracketMatching(), KeyValueRecall()]


def rows(task, n=50):
    batch = batch_of(task, n, seed=0, step=0)
    return zip(batch.ids.tolist(), batch.scored.tolist(), strict=True)


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_what_the_task_says(task):
    batch = batch_of(task, 20, seed=0, step=0)
    assert batch.ids.shape == batch.scored.shape == (20, task.length)
    assert batch.ids.dtype == torch.int64
    assert 0 <= batch.ids.min() <= batch.ids.max() < task.n_vocab
    assert batch.scored.any(1).all()
    assert not batch.scored[:, 0].any()
    assert torch.equal(batch_of(task, 20, seed=0, step=0).ids, batch.ids)
    assert not torch.equal(batch_of(task, 20, seed=0, step=1).ids, batch.ids)


def test_repeated_tokens_are_what_followed_last_time():
    task, periods = RepeatedTokens(), set()
    for ids, scored in rows(task):
        assert ids[0] == task.first
        tokens = ids[1:]
        period = tokens.index(tokens[0], 1)
        periods.add(period)
        assert len(set(tokens[:period])) == period
        for t in range(1, len(ids)):
            before = [s for s in range(1, t - 1) if ids[s] == ids[t - 1]]
            assert scored[t] == bool(before)
            assert all(ids[s + 1] == ids[t] for s in before)
    assert min(periods) >= task.shortest
    assert max(periods) <= task.longest
    assert len(periods) > 10


def test_modular_addition_adds():
    task = ModularAddition(p=11)
    for (a, b, equals, answer), scored in rows(task):
        assert equals == 11
        assert answer == (a + b) % 11
        assert scored == [False, False, False, True]


def test_modular_additions_parts_share_no_pair():
    parts = [{tuple(pair) for pair in ModularAddition(p=11, train_share=0.3, part=part).pairs().tolist()} for part in ("train", "test")]
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 121
    assert len(parts[0]) == 36
    other = {tuple(pair) for pair in ModularAddition(p=11, train_share=0.3, seed=1).pairs().tolist()}
    assert other != parts[0]


def test_brackets_close_what_is_open():
    task, depths = BracketMatching(), set()
    for ids, scored in rows(task):
        sign = ids.index(task.close_all)
        end = ids.index(task.end)
        stack = []
        for bracket in ids[1:end]:
            if bracket == task.close_all:
                depths.add(len(stack))
            elif bracket % 2:
                assert stack.pop() == bracket // 2
            else:
                stack.append(bracket // 2)
        assert not stack
        assert all(i % 2 for i in ids[sign + 1 : end])
        assert set(ids[end:]) == {task.end}
        assert [t for t, s in enumerate(scored) if s] == list(range(sign + 1, end + 1))
    assert len(depths) > 4


def test_recall_gives_each_keys_value():
    task = KeyValueRecall(n_keys=9, n_values=5, n_pairs=4)
    for ids, scored in rows(task):
        told = dict(zip(ids[1:9:2], ids[2:9:2], strict=True))
        assert len(told) == 4
        assert dict(zip(ids[9::2], ids[10::2], strict=True)) == told
        assert [t for t, s in enumerate(scored) if s] == [10, 12, 14, 16]
        assert max(told) < 9 <= min(told.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RepeatedTokens(n_tokens=8, longest=9), "longest must be from shortest = 8 to n_tokens = 8; got 9"),
        (lambda: RepeatedTokens(length=30), "length must be a whole number, 35 or more; got 30"),
        (lambda: ModularAddition(part="all"), "part must be one of 'train', 'test'; got 'all'"),
        (lambda: ModularAddition(p=5, train_share=1.0), "train_share must leave pairs for both parts, of 25; got 1.0"),
        (lambda: BracketMatching(n_kinds=0), "n_kinds must be a whole number, 1 or more; got 0"),
        (lambda: KeyValueRecall(n_keys=3, n_pairs=4), "n_pairs must be at most n_keys = 3, since keys differ; got 4"),
    ],
)
def test_impossible_tasks_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
