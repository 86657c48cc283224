"""Kept tensors come back as they went in, and what is beyond the limit lies on disk."""

import torch

from streamlens.stream.kept import Keep, Kept


def test_a_narrower_dtype_rounds_and_is_widened_again():
    value = torch.tensor([1.0, 1.0 + 2.0**-12])
    kept = Kept(Keep(dtype=torch.bfloat16))
    kept.put("a", value)
    assert kept.get("a").dtype == torch.float32
    assert kept.get("a").tolist() == [1.0, 1.0]


def test_the_limit_is_of_all_that_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    values = [torch.randn(4, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    kept = Kept(Keep(limit=40))  # two of 16 bytes each; the third would make 48
    files = []
    for n, value in enumerate(values):
        kept.put(n, value)
        files.append(len(list(tmp_path.rglob("*.pt"))))
    assert files == [0, 0, 1, 2]
    assert all(torch.equal(kept.get(n), value) for n, value in enumerate(values))
    kept.clear()
    assert list(tmp_path.iterdir()) == []
    kept.put(0, values[0])  # the memory is free again
    assert list(tmp_path.iterdir()) == []
