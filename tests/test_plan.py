"""What a plan foretells is what the sweep then does."""

import numpy as np
import pandas as pd
import pytest

import streamlens as sl
from streamlens.errors import InputError
from tests.models import tiny

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]
REFERENCE = [[11, 25, 36, 41, 9, 8, 7, 33], [50, 51, 52, 53, 54, 55, 56]]

CASES = {
    "blocks": (sl.ablate, {}),
    "spans": (sl.ablate, {"span": "all", "metrics": ["loss", "kl"]}),
    "heads": (sl.ablate, {"unit": "head", "target": 11, "versus": 4, "at": "each"}),
    "mean": (sl.ablate, {"unit": "mlp", "method": "mean", "reference": REFERENCE}),
    "samples": (sl.ablate, {"unit": "attn", "method": "resample", "reference": REFERENCE, "n_samples": 2}),
    "paired": (sl.ablate, {"unit": "head", "method": "resample", "reference": "paired", "positions": "last"}),
    "gradient": (sl.ablate, {"unit": "head", "method": "gradient", "target": 11, "metrics": "target_logit"}),
    "orders": (sl.rearrange, {"order": {"a": [0, 2, 1], "b": [0, (1, 2)]}}),
    "pruned": (sl.prune, {"order": ["greedy", "shortgpt", "random"], "n_samples": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_and_passes_are_those_of_the_call(case, monkeypatch):
    (call, arguments), model = CASES[case], tiny.proven("llama")
    frame = pd.DataFrame({"prompt": PROMPTS, "corrupted": [ids[::-1] for ids in PROMPTS]})
    planned = sl.plan(call, model, frame, **arguments).iloc[0]
    counted = []
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "update", lambda bar, n=1: counted.append(n))
    assert planned.rows == len(call(model, frame, **arguments))
    assert planned["call"] == call.__name__
    if call is sl.prune:
        assert 0.6 * planned.forward_passes < sum(counted) <= planned.forward_passes + 1e-9
    else:
        assert sum(counted) == pytest.approx(planned.forward_passes)
    assert planned.memory > 0
    assert planned.disk == 0


COUNTED = CASES | {
    "few for a mean": (sl.ablate, {"unit": "mlp", "method": "positional_mean", "reference": REFERENCE * 20}),
    "own order": (sl.prune, {"order": {"mine": [1, 0]}}),
    "random": (sl.prune, {"order": "random", "n_samples": 3, "seed": 1}),
    "found": (sl.prune, {"order": ["greedy", "shortgpt", "angular"]}),
}
del COUNTED["gradient"]  # whose backward passes count too


@pytest.mark.parametrize("max_tokens", [2048, 4])
@pytest.mark.parametrize("case", COUNTED)
def test_passes_are_the_blocks_that_run(case, max_tokens):
    (call, arguments), model = COUNTED[case], tiny.proven("llama")
    frame = pd.DataFrame({"prompt": [ids[:4] for ids in PROMPTS], "corrupted": [ids[3::-1] for ids in PROMPTS]})
    planned = sl.plan(call, model, frame, **arguments, max_tokens=max_tokens).iloc[0]
    tokens, seen = [], lambda norm, args: tokens.append(args[0][..., 0].numel())
    handles = [block.input_layernorm.register_forward_pre_hook(seen) for block in model.module.model.layers]
    try:
        call(model, frame, **arguments, max_tokens=max_tokens)
    finally:
        for handle in handles:
            handle.remove()
    ran = sum(tokens) / (3 * 12)  # blocks, tokens of all prompts
    if case in ("pruned", "found"):  # orders that are still to be found
        assert 0.6 * planned.forward_passes < ran <= planned.forward_passes + 1e-9
    elif case == "random" and max_tokens > 4:  # where sets of blocks share a pass, it runs what any of them needs
        assert planned.forward_passes < ran < 1.2 * planned.forward_passes
    else:  # where few rows are read, one block more proves that the last MLP may run at these alone
        assert ran == pytest.approx(planned.forward_passes + (case in ("heads", "paired")) / 3)


def test_the_passes_of_a_block_sweep_are_the_blocks_that_run():
    model = tiny.proven("llama")
    assert sl.plan(sl.ablate, model, PROMPTS).forward_passes.item() == pytest.approx(1 + (2 + 1 + 0) / 3)
    assert sl.plan(sl.ablate, model, PROMPTS, unit="mlp").forward_passes.item() == pytest.approx(1 + (3 + 2 + 1) / 3)


def test_disk_is_about_what_resume_keeps(tmp_path):
    model = tiny.proven("llama")
    arguments = {"unit": "head", "target": 11, "versus": 4, "positions": "all", "resume": tmp_path}
    prompts = np.random.default_rng(0).integers(0, 60, (60, 7)).tolist()
    planned = sl.plan(sl.ablate, model, prompts, **arguments).disk.item()
    assert not list(tmp_path.iterdir())
    sl.ablate(model, prompts, **arguments)
    kept = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    assert 0.3 * planned < kept < 1.2 * planned


def test_bad_input_gets_the_line_of_the_call():
    model = tiny.proven("llama")
    with pytest.raises(InputError, match=r"call must be sl\.ablate, sl\.rearrange or sl\.prune; got 'norms'"):
        sl.plan(sl.norms, model, PROMPTS)
    with pytest.raises(InputError, match=r"arguments do not fit sl\.ablate: got an unexpected keyword argument 'layer'"):
        sl.plan(sl.ablate, model, PROMPTS, layer=1)
    with pytest.raises(InputError, match="span must be a number of blocks"):
        sl.plan(sl.ablate, model, PROMPTS, span=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"order": "worst"}, "order must be one of"),
        ({"order": {"mine": [1]}, "steps": 2}, "order 'mine' must name steps=2"),
        ({"cost": "l2"}, "cost"),
    ],
)
def test_a_pruning_is_checked_before_it_is_planned(wrong, message):
    with pytest.raises(InputError, match=message):
        sl.plan(sl.prune, tiny.proven("llama"), [[5, 9, 3]], **wrong)
