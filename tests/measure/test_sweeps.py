"""Units and methods of ablation: every number is that of a plainly hooked forward pass over one prompt."""

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

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21], [44, 6]]  # as many as the heads
REFERENCE = [[11, 25, 36, 41, 9, 8, 7, 33], [3, 3, 40], [50, 51, 52, 53, 54, 55, 56], [1, 2]]
CORRUPTED = [ids[::-1] for ids in PROMPTS]
READ = {"target": 11, "positions": "all", "metrics": "target_logit"}
UNITS = ["block", "attn", "mlp", "head"]
FAMILIES = ["gemma2", "bloom", "gemma4", "opt-post-norm"]


@pytest.mark.parametrize("family", ["llama", "olmo2", *FAMILIES])
@pytest.mark.parametrize("unit", UNITS)
def test_zero(family, unit):
    model = tiny.proven(family)
    df = sl.ablate(model, PROMPTS, unit, "zero", max_tokens=100, **READ)
    schema.validate(df, "ablation")
    sweeps.check(df, model, PROMPTS, sweeps.variants(model, unit), lambda prompt, sample: {})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("method", ["mean", "positional_mean"])
def test_means(family, unit, method):
    model, found = tiny.proven(family), sweeps.variants(tiny.proven(family), unit)
    df = sl.ablate(model, PROMPTS, unit, method, reference={"others": REFERENCE}, min_count=1, max_tokens=100, **READ)
    schema.validate(df, "ablation")
    assert df.reference.unique().tolist() == ["others"]
    values = sweeps.mean(model, sweeps.keys_of(found), REFERENCE, method == "positional_mean")
    sweeps.check(df, model, PROMPTS, found, lambda prompt, sample: values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("unit", UNITS)
def test_patching_in_what_the_corrupted_prompt_has(family, unit):
    model, found = tiny.proven(family), sweeps.variants(tiny.proven(family), unit)
    frame = pd.DataFrame({"prompt": PROMPTS, "corrupted": CORRUPTED})
    df = sl.ablate(model, frame, unit, "resample", reference="paired", max_tokens=100, **READ)
    schema.validate(df, "ablation")
    values = [hooked.values(model, sweeps.keys_of(found), ids) for ids in CORRUPTED]
    sweeps.check(df, model, PROMPTS, found, lambda prompt, sample: values[prompt])
    with torch.no_grad():
        corrupted = [model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, 11].double() for ids in CORRUPTED]
    other = df.apply(lambda row: float(corrupted[row.prompt][row.position]), axis=1)
    pd.testing.assert_series_equal(df.recovered, (df.ablated - other) / (df.clean - other), rtol=1e-2, atol=1e-3, check_names=False)


@pytest.mark.parametrize("unit", UNITS)
def test_resampling_is_seeded_and_takes_other_prompts(unit):
    model, found = tiny.proven("llama"), sweeps.variants(tiny.proven("llama"), unit)
    pool = [*REFERENCE, PROMPTS[0], [9, 9, 8, 7, 6, 5, 4]]
    df = sl.ablate(model, PROMPTS[:2], unit, "resample", reference=pool, n_samples=2, seed=3, max_tokens=100, **READ)
    schema.validate(df, "ablation")
    again = sl.ablate(model, PROMPTS[:2], unit, "resample", reference=pool, n_samples=2, seed=3, max_tokens=1, **READ)
    assert abs(again.ablated - df.ablated).max() < REPLAY * abs(df.ablated).max()
    assert df["sample"].unique().tolist() == [0, 1]
    assert df.seed.unique().tolist() == [3]
    runs = [hooked.values(model, sweeps.keys_of(found), ids) for ids in pool]
    for _, rows in df.groupby("sample"):
        for prompt in (0, 1):  # which prompt was drawn shows at its first layer; then everything must fit it
            mine = rows[rows.prompt == prompt]
            fits = [
                donor
                for donor, run in enumerate(runs)
                if len(pool[donor]) >= len(PROMPTS[prompt]) and _fits(model, mine, found, run, prompt)
            ]
            assert len(fits) == 1
            assert pool[fits[0]][: len(PROMPTS[prompt])] != PROMPTS[prompt]


def _fits(model, rows, found, values, prompt):
    ids = PROMPTS[prompt]
    for variant in found:
        logits = hooked.logits(model, sweeps.changes(variant, values, len(ids)), torch.tensor([ids]))[0, :, 11].double()
        mine = rows[(rows.layer == variant.layer) & (rows.sublayer == variant.sublayer) & (rows["head"] == variant.head)]
        if abs(mine.ablated.to_numpy() - logits.numpy()).max() > 1e-4:
            return False
    return True


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_spans(family):
    model = tiny.proven(family)
    df = sl.ablate(model, PROMPTS, span="all", max_tokens=100, **READ)
    schema.validate(df, "ablation")
    found = sweeps.variants(model, "block", range(1, model.n_layers + 1))
    assert len(found) == model.n_layers * (model.n_layers + 1) // 2
    sweeps.check(df, model, PROMPTS, found, lambda prompt, sample: {})
    two = sl.ablate(model, PROMPTS, span=2, layers=[0, 2], **READ)
    assert set(zip(two.layer, two.span, strict=True)) <= {(0, 2), (2, 2)}


def test_experts_are_gone_as_if_their_weights_were_zero():
    model = sl.load(tiny.model("mixtral"))
    df = sl.ablate(model, PROMPTS, "expert", "zero", max_tokens=100, **READ)
    schema.validate(df, "ablation")
    assert sorted(df.expert.unique()) == [0, 1, 2, 3]
    for layer in range(3):
        experts = model.module.get_submodule(f"model.layers.{layer}.mlp.experts")
        for expert in range(4):
            kept = experts.down_proj.detach().clone()
            with torch.no_grad():
                experts.down_proj[expert] = 0
                truth = [model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, 11] for ids in PROMPTS]
                experts.down_proj.copy_(kept)
            rows = df[(df.layer == layer) & (df.expert == expert)].sort_values(["prompt", "position"])
            assert abs(rows.ablated.to_numpy() - torch.cat(truth).double().numpy()).max() < 1e-5 * 5


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom", "neox"])
def test_zero_on_a_head_is_zero_in_its_columns_of_the_output_projection(family):
    model = sl.load(tiny.model(family))
    df = sl.ablate(model, PROMPTS, "head", "zero", **READ)
    for layer, write in ((i, w) for i, w in model.anatomy.writes() if w.n_heads):
        weight = model.module.get_submodule(write.leaf).weight
        columns = weight if type(model.module.get_submodule(write.leaf)).__name__ == "Conv1D" else weight.T  # [z, d_model]
        for head in range(write.n_heads):
            part = slice(head * write.d_head, (head + 1) * write.d_head)
            with torch.no_grad():
                kept = columns[part].clone()
                columns[part] = 0
                truth = [model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, 11].double() for ids in PROMPTS]
                columns[part] = kept
            rows = df[(df.layer == layer) & (df["head"] == head)].sort_values(["prompt", "position"])
            gap = abs(rows.ablated.to_numpy() - torch.cat(truth).numpy()).max()
            assert gap <= REPLAY * max(float(t.abs().max()) for t in truth)


@pytest.mark.parametrize(("family", "same"), [("llama", True), ("gpt2", True), ("neox", True), ("gemma2", True), ("opt-post-norm", False)])
def test_attention_and_mlp_together_are_the_block_but_for_norms_on_the_stream(family, same):
    model = tiny.proven(family)
    found = {unit: sweeps.variants(model, unit) for unit in ("attn", "mlp")}
    df = sl.ablate(model, PROMPTS, **READ)
    gaps = []
    for layer in range(model.n_layers):
        both = [c for unit in found for v in found[unit] if v.layer == layer for c in sweeps.changes(v, {}, 0)]
        for i, ids in enumerate(PROMPTS):
            logits = hooked.logits(model, both, torch.tensor([ids]))[0, :, 11].double().numpy()
            gaps.append(abs(df[(df.layer == layer) & (df.prompt == i)].ablated.to_numpy() - logits).max())
    assert (max(gaps) < 1e-4) if same else (min(gaps) > 1e-3)


@pytest.mark.parametrize("unit", UNITS)
def test_the_positional_mean_of_one_prompt_on_itself_changes_nothing(unit):
    df = sl.ablate(tiny.proven("gemma2"), PROMPTS[0], unit, "positional_mean", reference=[PROMPTS[0]], min_count=1, **READ)
    assert abs(df.delta).max() < 1e-5


def test_a_mean_over_two_batches_is_the_mean_over_their_union():
    model = tiny.proven("llama")
    together, apart = (sl.ablate(model, PROMPTS, "mlp", "mean", reference=REFERENCE, max_tokens=n, **READ) for n in (1000, 1))
    assert abs(together.ablated - apart.ablated).max() < 1e-5
    assert together.attrs["arguments"]["reference"] == REFERENCE


@pytest.mark.parametrize("unit", ["block", "attn", "head"])
def test_changes_are_made_where_at_says(unit):
    model, found = tiny.proven("gemma2"), sweeps.variants(tiny.proven("gemma2"), unit)
    df = sl.ablate(model, PROMPTS, unit, "zero", at=slice(1, None), **READ)
    assert df["at"].unique().tolist() == [-2, 1]  # the shortest prompt has one such position
    sweeps.check(df, model, PROMPTS, found, lambda prompt, sample: {}, at=lambda n: torch.arange(n)[None] > 0)
    early = sl.ablate(model, PROMPTS[:1], unit, "zero", at=[0, 1, 2], positions=[1, 2, 3, 6], target=11, metrics="target_logit")
    assert early["at"].unique().tolist() == [-2]
    last = sl.ablate(model, PROMPTS, unit, "zero", at=-1, **READ)
    assert last.groupby("prompt")["at"].first().tolist() == [6, 3, 5, 1]
    assert last.groupby("prompt")["at_token"].first().tolist() == ["8", "12", "21", "6"]
    assert early["at_token"].unique().tolist() == [""]
    assert last[last.position < last["at"]].delta.abs().max() < 1e-5


def test_each_position_in_turn():
    model = tiny.proven("llama")
    df = sl.ablate(model, PROMPTS, "block", "zero", at="each", max_tokens=100, **READ)
    schema.validate(df, "ablation")
    assert df.groupby("prompt")["at"].nunique().tolist() == [7, 4, 6, 2]
    one = sl.ablate(model, PROMPTS, "block", "zero", at=1, **READ)
    mine = df[df["at"] == 1].reset_index(drop=True)
    assert abs(mine.ablated - one.ablated).max() < 1e-5


def test_layers_and_heads_are_chosen():
    model = tiny.proven("llama")
    assert set(sl.ablate(model, PROMPTS, "head", "zero", heads=[1, 3], layers=2, **READ)["head"]) == {1, 3}
    pairs = sl.ablate(model, PROMPTS, "head", "zero", heads=[(0, 1), (2, 3)], **READ)
    assert set(zip(pairs.layer, pairs["head"], strict=True)) == {(0, 1), (2, 3)}


def test_mixers():
    from tests import zoo

    model = sl.load(zoo.build("jamba"))
    df = sl.ablate(model, PROMPTS, "mixer", "zero", **READ)
    sweeps.check(df, model, PROMPTS, sweeps.variants(model, "mixer"), lambda prompt, sample: {})


def kl(clean, changed):
    """A metric of one's own under the name of ours."""
    return clean[:, 0]


BAD = {
    "reference must be given for method='mean'": {"method": "mean"},
    "reference goes with the methods mean": {"reference": REFERENCE},
    "reference='paired' goes with": {"method": "mean", "reference": "paired"},
    "needs prompts as a DataFrame with a `corrupted`": {"method": "resample", "reference": "paired"},
    "reference must hold n_samples=1 prompts other than prompt 0 and no shorter than its 7 tokens; got 0": {
        "method": "resample", "reference": [[1, 2]],
    },
    "reference must reach every changed position min_count=2 times; got 1 at position 3": {
        "method": "positional_mean", "reference": [REFERENCE[0], REFERENCE[1]],
    },
    "reference must hold a prompt of two tokens or more": {"method": "mean", "reference": [[1], [2]]},
    "span must be a number of blocks from 1 to 3, a list of them, or 'all'; got 4": {"span": 4},
    "span counts blocks: unit must be 'block' for spans; got 'attn'": {"span": 2, "unit": "attn"},
    "heads goes with unit='head'; got unit='block'": {"heads": 1},
    r"heads must be heads of .*, 0 to 3, or a list of \(layer, head\) pairs; got 4": {"heads": 4, "unit": "head"},
    "method must be 'remove' or 'zero' for experts": {"unit": "expert", "method": "mean", "reference": REFERENCE},
    "unit='expert': none of the chosen layers": {"unit": "expert"},
    "at must leave a position of every prompt": {"at": slice(5, None)},
    "n_samples must be a whole number, 1 or more; got 0": {"n_samples": 0},
    "metrics as functions must each have a name of their own; got 'kl'": {"metrics": ["loss", kl]},
}  # fmt: skip


@pytest.mark.parametrize("says", BAD)
def test_bad_input_gets_one_line(says):
    with pytest.raises(InputError, match=says):
        sl.ablate(tiny.proven("llama"), PROMPTS, **BAD[says])


def test_a_pair_of_unequal_length_is_named():
    frame = pd.DataFrame({"prompt": PROMPTS[:2], "corrupted": [PROMPTS[0], [1, 2, 3]]})
    with pytest.raises(InputError, match="corrupted must have as many tokens as its prompt; got 3 for the 4 of prompt 1"):
        sl.ablate(tiny.proven("llama"), frame, "head", "resample", reference="paired")
