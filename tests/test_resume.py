"""A sweep that is interrupted goes on where it stopped, gives the same table, and never reads what belongs to another."""

import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens.calls import running
from streamlens.errors import InputError
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]
SMALL = {"max_tokens": 8}  # one prompt a batch


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch):
    monkeypatch.setattr(running, "SHARD", 5)


@pytest.fixture
def passes(monkeypatch):
    """How often a model's forward ran."""
    ran = []
    from streamlens.stream.run import Run

    original = Run._forward
    monkeypatch.setattr(Run, "_forward", lambda run, ids, mask: (ran.append(ids.shape), original(run, ids, mask))[1])
    return ran


KINDS = {
    "head": {"unit": "head", "target": 11, "versus": 4},
    "top": {"unit": "attn", "positions": "last"},
    "mean": {"unit": "mlp", "method": "mean", "reference": PROMPTS},
    "samples": {"unit": "head", "method": "resample", "reference": [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3]], "n_samples": 2},
    "paired": {"unit": "block", "method": "resample", "reference": "paired"},
    "gradient": {"unit": "head", "method": "gradient"},
    "at": {"unit": "block", "at": -1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_that_of_an_uninterrupted_sweep(kind, tmp_path, passes):
    model = tiny.proven("llama")
    frame = pd.DataFrame({"prompt": PROMPTS, "corrupted": [ids[::-1] for ids in PROMPTS]})
    whole = sl.ablate(model, frame, **KINDS[kind], **SMALL)
    kept = sl.ablate(model, frame, **KINDS[kind], **SMALL, resume=tmp_path)
    numbers = ["clean", "ablated", "delta"]
    pd.testing.assert_frame_equal(kept, whole, rtol=1e-5, atol=1e-5)
    passes.clear()
    again = sl.ablate(model, frame, **KINDS[kind], **SMALL, resume=tmp_path)
    assert not passes
    pd.testing.assert_frame_equal(again[numbers], kept[numbers])
    assert again.attrs == whole.attrs


def test_what_is_finished_is_not_computed_again(tmp_path, monkeypatch, passes):
    model = tiny.proven("llama")
    whole = sl.ablate(model, PROMPTS, "head", "zero", **SMALL)
    done, original = [], running._measured

    def interrupted(*args):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(1)
        return original(*args)

    monkeypatch.setattr(running, "_measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sl.ablate(model, PROMPTS, "head", "zero", **SMALL, resume=tmp_path)
    monkeypatch.setattr(running, "_measured", lambda *args: (done.append(1), original(*args))[1])
    done.clear()
    df = sl.ablate(model, PROMPTS, "head", "zero", **SMALL, resume=tmp_path)
    assert len(done) == 9 - 4  # three batches of twelve heads, five a stretch
    pd.testing.assert_frame_equal(df, whole, rtol=1e-5, atol=1e-5)


def test_means_over_the_reference_are_kept(tmp_path, monkeypatch, passes):
    model, arguments = tiny.proven("llama"), {"unit": "mlp", "method": "positional_mean", "reference": PROMPTS, "min_count": 1, **SMALL}
    whole = sl.ablate(model, PROMPTS, **arguments)
    sl.ablate(model, PROMPTS, **arguments, resume=tmp_path)
    for path in tmp_path.glob("*/batch00001*"):
        path.unlink()
    passes.clear()
    again = sl.ablate(model, PROMPTS, **arguments, resume=tmp_path)
    assert {shape[1] for shape in passes} == {6}  # only the one prompt whose numbers are gone
    pd.testing.assert_frame_equal(again, whole, rtol=1e-5, atol=1e-5)


def test_another_model_prompt_or_argument_finds_nothing(tmp_path, passes):
    model = sl.load(tiny.model("llama"))
    first = sl.ablate(model, PROMPTS, resume=tmp_path, **SMALL)
    for change in ({"prompts": PROMPTS[::-1]}, {"method": "zero"}, {"at": 0}, {"metrics": "kl"}, {"max_tokens": 9}):
        passes.clear()
        sl.ablate(model, **{"prompts": PROMPTS, "resume": tmp_path, **SMALL} | change)
        assert passes, change
    with torch.no_grad():
        row = model.module.model.layers[1].mlp.up_proj.weight[0]
        row[[0, 1]] = row[[1, 0]]  # the same sum
    passes.clear()
    other = sl.ablate(model, PROMPTS, resume=tmp_path, **SMALL)
    assert passes
    assert abs(other.ablated - first.ablated).max() > 0


def test_functions_and_files_are_refused(tmp_path):
    def mine(clean, changed):
        return clean[:, 0]

    with pytest.raises(InputError, match="resume cannot tell whether a function has changed: metrics must be names; got mine"):
        sl.ablate(tiny.proven("llama"), PROMPTS, metrics=mine, resume=tmp_path)
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(InputError, match="resume must be a folder"):
        sl.ablate(tiny.proven("llama"), PROMPTS, resume=path)
