"""The unembedding's own helpers: the largest logits without sorting a vocabulary, and rows in chunks."""

import pytest
import torch
from torch import nn

from streamlens.models.anatomy import LogitMap
from streamlens.stream import unembed
from streamlens.stream.unembed import Unembed, largest


@pytest.mark.parametrize("n_vocab", [5, 64, 1000, 1291, 49152])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_largest_are_those_of_a_full_sort(n_vocab, k):
    logits = torch.randn(7, n_vocab, generator=torch.Generator().manual_seed(k))
    values, ids = logits.sort(-1, descending=True)
    found = largest(logits, k)
    assert torch.equal(found[0], values[:, :k])
    assert torch.equal(found[1], ids[:, :k])


def test_of_equal_ones_the_lower_id_comes_first():
    logits = torch.zeros(2, 1291)
    logits[:, [1290, 700, 3]] = 1.0
    assert largest(logits, 3)[1].tolist() == [[3, 700, 1290]] * 2


@pytest.mark.parametrize(("elements", "rows"), [(300, [3, 3, 1]), (1, [2, 2, 2, 1])])
def test_chunks_hold_so_many_logits_or_rows(elements, rows, monkeypatch):
    monkeypatch.setattr(unembed, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(unembed, "CHUNK_ROWS", 2)
    chunks = list(Unembed(nn.Linear(4, 100), LogitMap()).chunks(7))
    assert [c.stop - c.start for c in chunks] == rows
    assert chunks[-1].stop == 7


def test_plain_logits_come_in_larger_chunks_that_stay_bounded(monkeypatch):
    monkeypatch.setattr(unembed, "CHUNK_ELEMENTS", 400)
    monkeypatch.setattr(unembed, "CHUNK_ROWS", 2)
    hidden, head = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), nn.Linear(4, 100).requires_grad_(False)
    for logit_map, rows in ((LogitMap(), [24, 24, 2]), (LogitMap(2.0, 30.0), [8] * 6 + [2])):
        read = Unembed(head, logit_map)
        found = [(chunk.stop - chunk.start, logits.clone()) for chunk, logits in read.each_logits(hidden)]
        assert [n for n, _ in found] == rows
        assert torch.allclose(torch.cat([z for _, z in found]), read.logits(hidden), atol=1e-6)
    monkeypatch.setattr(unembed, "CHUNK_ELEMENTS", 1)  # a vocabulary so large that a few rows are all that fits
    assert len(list(Unembed(head, LogitMap()).each_logits(hidden[:8]))) == 2
