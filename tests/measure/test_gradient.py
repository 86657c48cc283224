"""The gradient estimate: the slope of the exact ablation at the clean run, by small exact steps."""

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

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]
CORRUPTED = [ids[::-1] for ids in PROMPTS]
STEP = 1e-3


def stepped(model, variant, ids, values):
    """How target logits, losses and target log-probabilities change a step towards `values` (absent: zero), by small exact steps."""
    old = hooked.values(model, variant.keys, ids)
    towards = {key: old[key] + STEP * (values.get(key, 0.0) - old[key]) for key in variant.keys}
    ids = torch.tensor([ids])
    away = {key: old[key] - STEP * (values.get(key, 0.0) - old[key]) for key in variant.keys}
    runs = [hooked.logits(model, sweeps.changes(variant, v, ids.shape[1]), ids)[0] for v in (towards, away)]
    logit = [run[:, 11] for run in runs]
    loss = [-run[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0] for run in runs]
    logprob = [run.log_softmax(-1)[:, 11] for run in runs]
    return [((a - b) / (2 * STEP)).numpy() for a, b in (logit, loss, logprob)]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("unit", ["block", "attn", "mlp", "head"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "opt-post-norm"])
def test_estimates_are_the_slope_of_the_exact_ablation(family, unit, paired):
    model = sl.load(tiny.model(family, torch.float64))
    frame = pd.DataFrame({"prompt": PROMPTS, "corrupted": CORRUPTED})
    read = {"target": 11, "positions": "all", "metrics": ["target_logit", "loss", "target_logprob"]}
    df = sl.ablate(model, frame, unit, "gradient", reference="paired" if paired else None, **read)
    schema.validate(df, "ablation")
    found, worst, size = sweeps.variants(model, unit), 0.0, 0.0
    for i, ids in enumerate(PROMPTS[:2]):
        values = hooked.values(model, sweeps.keys_of(found), CORRUPTED[i]) if paired else {}
        for variant in found:
            rows = df[(df.prompt == i) & (df.layer == variant.layer) & (df.sublayer == variant.sublayer) & (df["head"] == variant.head)]
            for metric, expected in zip(read["metrics"], stepped(model, variant, ids, values), strict=True):
                delta = rows[rows.metric == metric].sort_values("position").delta.to_numpy()
                worst, size = max(worst, abs(delta - expected).max()), max(size, abs(expected).max())
    assert worst < 5e-3 * size  # steps in a model whose RMSNorms round to float32
    assert size > 0.1


def test_it_says_where_and_of_what_like_the_exact_sweep():
    model = tiny.proven("llama")
    exact, estimate = (
        sl.ablate(model, PROMPTS, "head", method, target=11, versus=4, metrics="logit_diff") for method in ("zero", "gradient")
    )
    same = ["prompt", "position", "target", "versus", "unit", "layer", "sublayer", "head", "metric", "clean"]
    pd.testing.assert_frame_equal(exact[same], estimate[same], check_categorical=False)
    agreement = sl.stats.rank_agreement(exact, estimate, metric="logit_diff")
    assert agreement.measure.tolist() == ["gradient"]
    assert agreement.n_units.tolist() == [12]


def test_at_and_spans_add_up():
    model = tiny.proven("llama")
    read = {"target": 11, "metrics": "target_logit"}
    whole = sl.ablate(model, PROMPTS[:1], "block", "gradient", span=[1, 2], **read)
    each = sl.ablate(model, PROMPTS[:1], "block", "gradient", at="each", **read)
    one = whole[whole.span == 1].set_index("layer").delta
    assert np.allclose(each.groupby("layer").delta.sum(), one, atol=1e-5)
    assert whole[(whole.span == 2) & (whole.layer == 0)].delta.item() == pytest.approx(one[0] + one[1], abs=1e-5)


def test_metrics_without_a_slope_are_refused():
    with pytest.raises(InputError, match=r"metrics must be among loss, .* a gradient says nothing of others; got 'kl'"):
        sl.ablate(tiny.proven("llama"), PROMPTS, method="gradient", metrics=["loss", "kl"])


def test_the_model_comes_back_as_it_was():
    model = tiny.proven("llama")
    flags = [p.requires_grad for p in model.module.parameters()]
    with torch.no_grad():
        sl.ablate(model, PROMPTS, method="gradient")
    assert [p.requires_grad for p in model.module.parameters()] == flags
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules())


def test_estimates_at_single_positions_sum_to_that_at_all_of_them():
    whole, parts = (
        [sl.ablate(tiny.proven("llama"), PROMPTS[0], "mlp", "gradient", at=at, metrics="loss", positions="all") for at in where]
        for where in ([None], range(len(PROMPTS[0])))
    )
    assert np.allclose(sum(df.delta.to_numpy() for df in parts), whole[0].delta, rtol=1e-4, atol=1e-6)
