"""Every measure on the native decoder: the contract at 1e-12 in float64, for every choice by itself and for random ones together."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import streamlens as sl
from tests.decoder.configs import CASES, PLACEMENTS, POSITIONS, SIZES, decoder, proven, tokens
from tests.models.tiny import randomise

EXACT = 1e-12
COMMON = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
FEW = settings(max_examples=15, phases=[Phase.generate], **COMMON)
MANY = settings(max_examples=250, **COMMON)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 8, 9, 1]]


def misses(df):
    """|sum - logit| over sum|parts|, at every prompt and position: written out again."""
    rows = df.groupby(["prompt", "position"])
    return ((rows.contribution.sum() - rows.logit.first()).abs() / rows.contribution.agg(lambda c: c.abs().sum())).max()


def printed(module, prompt, target, versus):
    with torch.no_grad():
        logits = module(torch.tensor([prompt])).logits[0]
    return (logits[:, target] - logits[:, versus]).numpy(), float(logits.abs().max())


def demand_contract(model, prompts, target=3, versus=5):
    df = sl.attribute(model, prompts, target=target, versus=versus, positions="all", check="full")
    assert misses(df) <= EXACT
    for number, prompt in enumerate(prompts):
        logit, largest = printed(model.module, prompt, target, versus)
        ours = df[df.prompt == number].groupby("position").logit.first().to_numpy()
        assert np.abs(ours - logit).max() <= EXACT * largest


@pytest.mark.parametrize("name", CASES)
def test_attribution_adds_up_to_the_printed_logit(name):
    model = proven(name)
    demand_contract(model, PROMPTS)
    assert model.proof.additivity <= EXACT
    assert model.proof.replay <= EXACT


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_removing_a_layer_is_running_without_it(placement):
    """Against the blocks themselves, called one by one."""
    module, ids = decoder(placement=placement, mix_share=0.5, n_layers=4), tokens(1)
    df = sl.ablate(sl.load(module), ids, target=3, positions="all", unit="block")
    with torch.no_grad():
        context = module._context(0, ids.shape[1], None)
        for layer in range(4):
            x = module.embed(ids)
            for number, block in enumerate(module.blocks):
                x = x if number == layer else block(x, context)
            logits = module._logits(x if module.final_norm is None else module.final_norm(x))[0]
            row = df[(df.layer == layer) & (df.metric == "target_logit")]
            assert np.abs(row.sort_values("position").ablated - logits[:, 3].numpy()).max() <= EXACT * float(logits.abs().max())


def test_norms_are_those_of_the_stream():
    module, ids = decoder(placement="sandwich"), tokens(1)
    df = sl.norms(sl.load(module), ids)
    with torch.no_grad():
        _, cache = module.hooked().run_with_cache(ids)
    for layer in range(3):
        row = df[(df.site == "resid_post") & (df.measure == "l2") & (df.layer == layer)].sort_values("position")
        assert np.allclose(row.value, cache[f"blocks.{layer}.hook_resid_post"][0].norm(dim=-1), rtol=1e-6)


def test_sources_of_a_head_sum_to_the_head():
    model = sl.load(decoder(sink=True, n_kv_heads=2, placement="sandwich"))
    whole, split = (sl.attribute(model, PROMPTS, target=3, positions="last", **by) for by in ({}, {"by": "source"}))
    keys = ["prompt", "layer", "head"]
    heads = whole[whole.component == "head"].set_index(keys).contribution
    sums = split[split["component"] == "head"].groupby(keys).contribution.sum()
    assert (heads - sums.reindex(heads.index)).abs().max() <= EXACT * heads.abs().max()


SPLIT = {
    "neuron": ("gqa", "positions alibi", "deepnorm, layernorm and biases", "sandwich", "multipliers and deepnorm"),
    "expert": ("experts", "experts, shared ones too", "plain experts"),
    "token": ("sink, softcap and window", "positions dynamic", "post"),
}


@pytest.mark.parametrize(("by", "name"), [(by, name) for by, names in SPLIT.items() for name in names])
def test_finer_rows_add_up_as_well(by, name):
    df = sl.attribute(proven(name), PROMPTS, target=3, versus=5, positions="last", by=by)
    assert misses(df) <= EXACT
    assert df.attrs["additivity_error"] <= EXACT


@pytest.mark.parametrize("name", ["gqa", "experts", "post", "pre, attention only", "positions dynamic"])
def test_every_other_call_takes_it(name):
    model = proven(name)
    for call in (sl.lens, sl.effects, sl.similarity, sl.norm_summary, sl.depth_use, sl.gradient_norms):
        assert len(call(model, PROMPTS))
    assert len(sl.promotes(model, PROMPTS, component=("head", 1, 1)))
    assert len(sl.rearrange(model, PROMPTS, order=[0, 2, 1]))
    for unit in ("attn", "head"):
        assert len(sl.ablate(model, PROMPTS, target=3, unit=unit, method="mean", reference=[[3, 1, 4, 1, 5]]))


@pytest.mark.parametrize("name", ["gqa", "experts", "window on some layers", "positions learned", "tied", "mix-ln", "post"])
def test_a_decoder_without_blocks_is_one_that_generates_and_saves(name, tmp_path):
    module, ids = decoder(**CASES[name], n_layers=4), tokens(1)
    shorter = sl.without_blocks(sl.load(module), [1])
    with torch.no_grad():
        context = module._context(0, ids.shape[1], None)
        x = module._embedded(ids, 0, ids.shape[1])
        for number in (0, 2, 3):
            x = module.blocks[number](x, context)
        logits = module._logits(x if module.final_norm is None else module.final_norm(x))
        assert float((shorter(ids).logits - logits).abs().max()) <= EXACT * float(logits.abs().max())
    assert torch.equal(shorter.generate(ids, 6), shorter.generate(ids, 6, use_cache=False))
    shorter.save(tmp_path)
    assert torch.equal(sl.load(tmp_path).module(ids).logits, shorter(ids).logits)


@pytest.mark.parametrize("placement", ["deepnorm", "layernorm-scaling"])
def test_a_decoder_whose_blocks_know_their_number_cannot_lose_one(placement):
    with pytest.raises(sl.errors.UnsupportedModelError, match="its config makes another model"):
        sl.without_blocks(sl.load(decoder(placement=placement)), [1])


FACTS = {
    "deepnorm": {"norm_placement": "post", "final_norm": False, "stream_multiplier": 6**0.25},
    "sandwich": {"norm_placement": "sandwich", "norm": "rmsnorm"},
    "reordered": {"norm_placement": "reordered"},
    "parallel, two norms": {"norm_placement": "pre", "parallel": True},
    "layernorms without parameters": {"norm": "layernorm without gain"},
    "multipliers": {"embedding_multiplier": 3.3, "residual_multiplier": 0.223457, "logit_multiplier": 0.3},
    "mqa, wide heads": {"n_heads": 4, "n_kv_heads": 1, "d_head": 10, "d_model": 24},
    "window on some layers": {"sliding_window": 3, "sliding_window_layers": 2},
    "softcap": {"attention_softcap": 2.0},
    "softcap of logits": {"logit_softcap": 3.0},
    "qk norm by head": {"qk_norm": "head"},
    "qk norm of the width": {"qk_norm": "width"},
    "experts, shared ones too": {"n_experts": 4, "n_experts_active": 2, "d_expert": 64},
    "tied": {"tied": True, "vocabulary": 40},
    "positions alibi": {"position": "alibi"},
    "positions sinusoidal": {"position": "sinusoidal"},
    "positions learned": {"position": "learned", "position_settings": "64 positions", "context_length": 64},
    "positions none": {"position": "none"},
    "positions yarn": {"position": "rope", "position_settings": "theta 10000, scaling yarn x 4"},
    "positions rope interleaved, partial": {"position_settings": "theta 10000, 67% of d_head"},
}


@pytest.mark.parametrize("name", FACTS)
def test_card_says_what_the_config_says(name):
    card = sl.card(proven(name)).iloc[0]
    for fact, value in FACTS[name].items():
        assert card[fact] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value), fact
    config = proven(name).module.config
    assert card.kv_cache_bytes_per_token <= 3 * 2 * 8 * config.kv_heads * config.head_width


def test_prompts_of_other_lengths_wait_for_their_own_batch_with_dynamic_positions():
    assert proven("positions dynamic").equal_lengths
    assert not proven("pre").equal_lengths


@st.composite
def changes(draw):
    """A random choice of everything at once."""
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    placement, layernorm, mlp = one_of(*PLACEMENTS), draw(st.booleans()), one_of("swiglu", "geglu", "gelu", "relu", "none")
    n_kv_heads, group = one_of(1, 2), one_of(1, 2, 3)
    experts = one_of(0, 0, 3) if mlp != "none" else 0
    window = one_of(None, None, 1, 3)
    fields = {
        "placement": placement,
        "mix_share": 0.5,
        "n_layers": one_of(2, 3) if placement == "mix-ln" else one_of(1, 2, 3),
        "n_kv_heads": n_kv_heads,
        "n_heads": n_kv_heads * group,
        "d_head": one_of(4, 6),
        "d_model": one_of(12, 20),
        "norm": "layernorm" if layernorm else "rmsnorm",
        "norm_parameters": one_of(True, True, False),
        "qk_norm": one_of("none", "head", "width"),
        "mlp": mlp,
        "n_experts": experts,
        "n_shared_experts": one_of(0, 1) if experts else 0,
        "qkv_bias": draw(st.booleans()),
        "output_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()) if mlp != "none" and not experts else False,
        "unembed_bias": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "embed_norm": draw(st.booleans()),
        "final_norm": one_of(None, True, False),
        "sink": draw(st.booleans()),
        "window": window,
        "window_layers": one_of(None, (0,)) if window else None,
        "attention_softcap": one_of(None, 2.0),
        "logit_softcap": one_of(None, 5.0),
        "logit_scale": one_of(1.0, 0.37),
        "embed_multiplier": one_of(1.0, 2.7),
        "residual_multiplier": one_of(1.0, 0.2234567),
        "parallel_norms": one_of(1, 2) if placement == "parallel" else 1,
        "max_length": 32,
    } | draw(st.sampled_from([*POSITIONS.values()]))
    fields["norm_bias"] = draw(st.booleans()) if layernorm and fields["norm_parameters"] else False
    return fields | {"n_heads": n_kv_heads * group}


def every_config_keeps_the_contract(data):
    fields = data.draw(changes())
    assume(not (fields["placement"] == "parallel" and fields["mlp"] == "none"))
    module = sl.Decoder(sl.DecoderConfig(**SIZES | fields), seed=1).eval()
    randomise(module, data.draw(st.integers(0, 99)))
    token = st.integers(0, SIZES["n_vocab"] - 1)
    prompts = data.draw(st.lists(st.lists(token, min_size=2, max_size=9), min_size=1, max_size=2))
    demand_contract(sl.load(module.double()), prompts)


@FEW
@given(data=st.data())
def test_random_configs_keep_the_contract(data):
    every_config_keeps_the_contract(data)


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_many_random_configs_keep_the_contract(data):
    every_config_keeps_the_contract(data)


def test_a_float64_decoder_whose_norm_rounds_as_those_of_transformers_is_refused():
    """The native limit is what is held: 1e-8 would pass theirs."""
    module = decoder(norm="layernorm")

    def rounds(x):
        return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], module.final_norm.weight.float(), None, 1e-5).double()

    module.final_norm.forward = rounds
    with pytest.raises(sl.errors.UnsupportedModelError, match=r"contributions miss the logit by .*e-0[78] of sum\|parts\| \(limit 1e-12\)"):
        sl.load(module)
