"""Norms of the stream at every site: by hand, without padding, and before the final norm."""

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.measure.growth import Meter
from streamlens.measure.vectors import MEASURES, Found, Reader
from streamlens.prompts import TokenBatch
from tests import byhand
from tests.models import tiny
from tests.tolerances import HAND, ROUNDING

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]
SITES = {  # sites of every layer; embed and final stand once
    "llama": {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"},
    "gpt2": {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"},
    "neox": {"resid_pre", "attn_out", "mlp_out", "resid_post"},
    "gemma2": {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"},
    "olmo2": {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"},
    "bloom": {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"},
    "opt-post-norm": {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"},
    "mixtral": {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"},
    "gemma4": {"resid_pre", "attn_out", "resid_mid", "mlp_out", "other_out", "resid_post"},
}


def test_measures_of_a_known_vector():
    found = Found(6)
    Reader().read(found, torch.tensor([[3.0, -4.0, 0.0, 0.0, 0.0, 0.0]]), MEASURES)
    assert {name: round(found[name].item(), 6) for name in MEASURES} == {
        "l2": 5.0, "rms": round((25 / 6) ** 0.5, 6), "mean": round(-1 / 6, 6), "std": round((25 / 6 - 1 / 36) ** 0.5, 6),
        "max_abs": 4.0, "max_index": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_norm_by_hand(family):
    model = tiny.proven(family)
    df = sl.norms(model, PROMPTS)
    schema.validate(df, "norms")
    for prompt, ids in enumerate(PROMPTS):
        sites = getattr(byhand, family)(model.module, ids).sites
        rows = df[df.prompt == prompt]
        assert set(zip(rows.site, rows.layer, strict=True)) == set(sites)
        for (site, layer), stream in sites.items():
            for measure, scale in (("l2", 1.0), ("rms", stream.shape[-1] ** -0.5)):
                found = rows[(rows.site == site) & (rows.layer == layer) & (rows.measure == measure)]
                assert found.position.tolist() == list(range(len(ids)))
                norm = (stream.norm(dim=-1) * scale).numpy()
                assert abs(found.value.to_numpy() - norm).max() <= HAND * norm.max(), (site, layer)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sites_are_those_of_the_architecture(family):
    model = tiny.proven(family)
    df = sl.norms(model, PROMPTS[0])
    schema.validate(df, "norms")
    for layer in range(model.n_layers):
        assert set(df[df.layer == layer].site) - {"embed"} == SITES[family]
    assert df[df.site == "embed"].layer.unique().tolist() == [0]
    assert df[df.site == "final"].layer.unique().tolist() == [model.n_layers]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_final_is_the_last_blocks_output_and_not_what_hidden_states_ends_with(family):
    model, seen = tiny.proven(family), []
    block = model.module.get_submodule(model.anatomy.block_paths[-1])
    handle = block.register_forward_hook(lambda part, args, output: seen.append(output[0] if isinstance(output, tuple) else output))
    try:
        with torch.no_grad():
            model.module(torch.tensor(PROMPTS[:1]), use_cache=False)
    finally:
        handle.remove()
    df = sl.norms(model, PROMPTS[0], sites=["final", "resid_post"], measures="l2")
    norm = seen[0][0].norm(dim=-1).double().numpy()
    for rows in (df[df.site == "final"], df[(df.site == "resid_post") & (df.layer == model.n_layers - 1)]):
        assert abs(rows.value.to_numpy() - norm).max() <= ROUNDING * norm.max()


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma4"])
def test_padding_is_no_row_and_changes_none(family):
    model = tiny.proven(family)
    together, apart = (sl.norms(model, PROMPTS, max_tokens=n) for n in (1000, 1))
    assert len(together[["prompt", "position"]].drop_duplicates()) == sum(map(len, PROMPTS))
    pd.testing.assert_frame_equal(together, apart, check_categorical=False, rtol=1e-5)


def test_rows_are_those_of_their_prompts_in_whatever_order_a_batch_holds_them():
    model, ids = tiny.proven("llama"), torch.tensor([PROMPTS[2], [4, 5, 6, 7, 8, 9]])
    meter = Meter(model.module, model.anatomy, ["resid_pre"], ["l2"])
    places = np.repeat(np.arange(2), 6), np.tile(np.arange(6), 2)
    ordered, other = (
        meter.batch(TokenBatch(np.array(index), ids[index], torch.ones_like(ids, dtype=torch.bool)), places) for index in ([0, 1], [1, 0])
    )
    np.testing.assert_allclose(other.value, ordered.value, rtol=1e-6)


def test_sites_measures_and_positions_are_chosen():
    df = sl.norms(tiny.proven("llama"), PROMPTS, positions=[0, -1], sites="resid_pre", measures="rms")
    assert set(df.site) == {"resid_pre"}
    assert set(df.measure) == {"rms"}
    assert df.groupby("prompt").position.unique().map(list).tolist() == [[0, 6], [0, 3], [0, 5]]


def test_norms_of_bf16_are_taken_in_float32():
    model = tiny.proven("llama", torch.bfloat16)
    df = sl.norms(model, PROMPTS[0], sites="embed", measures="l2")
    exact = model.module.model.embed_tokens.weight[PROMPTS[0]].double().norm(dim=-1).detach().numpy()
    assert np.allclose(df.value, exact, rtol=ROUNDING)


def test_massive_coordinates_of_bf16_at_few_positions():
    """The whole prompt decides, so all of it is read, in float32, also where one position is asked for."""
    model = sl.load(tiny.model("llama", torch.bfloat16))
    with torch.no_grad():
        model.module.model.embed_tokens.weight[5, :3] = torch.tensor([3e4, -2.5e4, 90.0])
    every, last = (sl.norms(model, [[9, 3, 22, 5]], positions=at, measures="massive", sites="embed") for at in (None, [-1]))
    assert every.value.tolist() == [0, 0, 0, 2]
    assert last.value.tolist() == [2]


MIDS = {
    "llama": "post_attention_layernorm",
    "gpt2": "ln_2",
    "bloom": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "olmo2": "mlp",
    "opt-post-norm": "self_attn_layer_norm",
}
"""Which module reads the stream between attention and the MLP, by name."""


@pytest.mark.parametrize("family", MIDS)
def test_the_stream_between_attention_and_mlp_is_the_very_tensor_that_is_read_there(family):
    model, read = tiny.proven(family), []
    blocks = [model.module.get_submodule(f"{path}.{MIDS[family]}") for path in model.anatomy.block_paths]
    handles = [
        block.register_forward_pre_hook(lambda _, args: read.append(args[0].view(1, len(PROMPTS[0]), -1).clone())) for block in blocks
    ]
    try:
        kept = sl.record(model, PROMPTS[:1], sites=["resid_mid"])
    finally:
        for handle in handles:
            handle.remove()
    assert len(read) == model.n_layers
    for layer, x in enumerate(read):
        assert torch.equal(kept[f"blocks.{layer}.hook_resid_mid"], x)


def test_where_attention_writes_next_to_nothing_the_stream_behind_it_is_still_seen():
    """As at many an initialisation: what attention and the MLP read is then the same stream."""
    module = tiny.model("llama")
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight *= 1e-20
            layer.self_attn.o_proj.bias.zero_()
    df = sl.norms(sl.load(module), PROMPTS, sites=["resid_pre", "resid_mid"], measures="l2")
    pre, mid = (df[df.site == site].value.to_numpy() for site in ("resid_pre", "resid_mid"))
    assert len(mid) == len(pre)
    assert (mid == pre).all()


def test_stream_of_the_default_model_grows(smollm2):
    df = sl.norms(smollm2, ["The Eiffel Tower is in the city of Paris.", "Water boils at a hundred degrees."])
    fit = sl.growth_rate(df, layers=(3, 27), skip_first=True)
    assert 1.0 < fit.rate.item() < 1.5
    assert fit.n_prompts.item() == 2
