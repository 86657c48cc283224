"""Sets of units that are changed together, as circuits are knocked out: every number is that of a plainly hooked forward pass."""

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError
from tests import hooked
from tests.measure import sweeps
from tests.models import tiny
from tests.tolerances import REPLAY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21], [44, 6]]
REFERENCE = [[11, 25, 36, 41, 9, 8, 7, 33], [3, 3, 40], [50, 51, 52, 53, 54, 55, 56], [1, 2]]
READ = {"target": 11, "positions": "all", "metrics": "target_logit", "max_tokens": 100}
CIRCUIT = [(0, 1), (1, 0), (1, 3), (2, 2)]
SETS = {"circuit": CIRCUIT, "all but": [(layer, head) for layer in range(3) for head in range(4) if (layer, head) not in CIRCUIT]}


def check(df, model, name, found, values_of):
    """The rows of one set against all its changes in one hooked pass."""
    rows = df[df["together"] == name]
    assert set(zip(rows.layer, rows.sublayer, rows["head"], rows.span, strict=True)) == {(-1, -1, -1, 1)}
    for i, ids in enumerate(PROMPTS):
        made = [change for variant in found for change in sweeps.changes(variant, values_of(i), len(ids))]
        truth = hooked.logits(model, made, torch.tensor([ids]))[0].double()
        mine = rows[rows.prompt == i]
        assert mine.position.tolist() == list(range(len(ids)))
        assert abs(mine.ablated.to_numpy() - truth[:, 11].numpy()).max() <= REPLAY * float(truth.abs().max())
    assert abs(rows.delta).max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "gemma4", "opt-post-norm"])
@pytest.mark.parametrize("method", ["zero", "mean", "resample"])
def test_a_circuit_of_heads_and_all_but_it(family, method):
    model = tiny.proven(family)
    every = sweeps.variants(model, "head")
    reference = {"mean": REFERENCE, "resample": "paired"}.get(method)
    frame = pd.DataFrame({"prompt": PROMPTS, "corrupted": [ids[::-1] for ids in PROMPTS]})
    df = sl.ablate(model, frame, "head", method, heads=SETS, reference=reference, **READ)
    schema.validate(df, "ablation")
    keys = sweeps.keys_of(every)
    means = sweeps.mean(model, keys, REFERENCE) if method == "mean" else {}
    paired = [hooked.values(model, keys, ids[::-1]) for ids in PROMPTS] if method == "resample" else None
    for name, pairs in SETS.items():
        found = [v for v in every if (v.layer, v.head) in pairs]
        assert len(found) == len(pairs)
        check(df, model, name, found, lambda prompt: paired[prompt] if paired else means)


def test_by_the_weights_of_the_output_projection():
    model = sl.load(tiny.model("llama"))
    df = sl.ablate(model, PROMPTS, "head", "zero", heads={"circuit": CIRCUIT}, **READ)
    with torch.no_grad():
        for layer, head in CIRCUIT:
            weight = model.module.model.layers[layer].self_attn.o_proj.weight
            width = weight.shape[1] // 4
            weight[:, head * width : (head + 1) * width] = 0
        truth = torch.cat([model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, 11] for ids in PROMPTS])
    assert abs(df.ablated.to_numpy() - truth.double().numpy()).max() < 1e-5


@pytest.mark.parametrize("unit", ["block", "attn", "mlp", "head"])
def test_layers_by_name_go_together(unit):
    model, sets = tiny.proven("gemma2"), {"ends": [0, 2], "middle": 1}
    df = sl.ablate(model, PROMPTS, unit, "zero", layers=sets, **READ)
    for name, layers in {"ends": [0, 2], "middle": [1]}.items():
        check(df, model, name, [v for v in sweeps.variants(model, unit) if v.layer in layers], lambda prompt: {})
    if unit != "head":
        alone = sl.ablate(model, PROMPTS, unit, "zero", layers=1, **READ)
        assert abs(df[df["together"] == "middle"].ablated.to_numpy() - alone.ablated.to_numpy()).max() < 1e-5


def test_all_experts_are_the_mlp():
    model = sl.load(tiny.model("mixtral"))
    together = sl.ablate(model, PROMPTS, "expert", "zero", layers={"second": 1}, **READ)
    whole = sl.ablate(model, PROMPTS, "mlp", "zero", layers=1, **READ)
    assert abs(together.ablated - whole.ablated).max() < 1e-5
    assert set(together.expert) == {-1}


def test_where_they_are_made_what_is_foreseen_and_what_is_kept(tmp_path, monkeypatch):
    model, arguments = tiny.proven("llama"), {"unit": "head", "method": "zero", "heads": SETS, **READ}
    each = sl.ablate(model, PROMPTS, at="each", **arguments)
    one = sl.ablate(model, PROMPTS, at=1, **arguments)
    mine = each[each["at"] == 1].reset_index(drop=True)
    assert abs(mine.ablated - one.ablated).max() < 1e-5
    schema.validate(each, "ablation")
    counted = []
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "update", lambda bar, n=1: counted.append(n))
    planned = sl.plan(sl.ablate, model, PROMPTS, **arguments).iloc[0]
    df = sl.ablate(model, PROMPTS, **arguments, resume=tmp_path)
    assert (planned.rows, planned.variants) == (len(df), 2)
    assert sum(counted) == pytest.approx(planned.forward_passes) == pytest.approx(3)
    pd.testing.assert_frame_equal(sl.ablate(model, PROMPTS, **arguments, resume=tmp_path), df)
    assert sl.plan(sl.ablate, model, PROMPTS, layers={"ends": [0, 2]}).forward_passes.item() == pytest.approx(1 + 1 / 3)
    assert sl.plan(sl.ablate, model, PROMPTS, unit="mlp", layers={"last": [2]}).forward_passes.item() == pytest.approx(1 + 1 / 3)


def test_an_estimate_of_a_set_is_the_sum_of_its_units():
    model, arguments = tiny.proven("llama"), {"unit": "head", "method": "gradient", "target": 11, "metrics": "target_logit"}
    together = sl.ablate(model, PROMPTS, heads={"circuit": CIRCUIT}, **arguments)
    apart = sl.ablate(model, PROMPTS, heads=CIRCUIT, **arguments)
    np.testing.assert_allclose(together.delta, apart.groupby("prompt").delta.sum(), atol=1e-6)


BAD = {
    "layers and heads must not both be": {"layers": {"a": [1]}, "heads": {"b": [1]}, "unit": "head"},
    "heads must name each set by a text": {"heads": {1: [1]}, "unit": "head"},
    "layers must name each set by a text, .*; got none": {"layers": {}},
    "span must be 1 for sets, which are changed as they are; got 2": {"layers": {"a": [0, 1]}, "span": 2},
    "layers must say what is in the set 'a'": {"layers": {"a": None}},
    "heads must name at least one head": {"heads": {"a": []}, "unit": "head"},
    "heads must be heads of": {"heads": {"a": [(0, 9)]}, "unit": "head"},
    r"heads must lie in the chosen layers; got \(2, 1\)": {"heads": [(0, 1), (2, 1)], "layers": [0, 1], "unit": "head"},
}  # fmt: skip


def test_the_bundled_prompts_own_sets_are_carried_beside():
    frame = pd.DataFrame({"prompt": [[5, 9, 3]], "set": ["facts"]})
    df = sl.ablate(tiny.proven("llama"), frame, layers={"a": [0, 1]})
    assert (set(df["together"]), set(df["set"])) == ({"a"}, {"facts"})


@pytest.mark.parametrize("says", BAD)
def test_bad_sets_get_one_line(says):
    with pytest.raises(InputError, match=says):
        sl.ablate(tiny.proven("llama"), PROMPTS, **BAD[says])
