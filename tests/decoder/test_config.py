"""Every choice is one field; what is not legal, and what does not go together, is refused in words that name it."""

import json
from dataclasses import replace

import pytest

import streamlens as sl
from streamlens.decoder.config import LEGAL
from tests.decoder.configs import CASES, SIZES


def config(**changes):
    return sl.DecoderConfig(**SIZES | changes)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_json_gives_the_config_back(changes):
    made = config(**changes)
    assert sl.DecoderConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize("field", LEGAL)
def test_a_word_that_is_not_legal_is_named_with_the_legal_ones(field):
    with pytest.raises(sl.errors.InputError, match=rf"^{field} must be one of '.*{LEGAL[field][-1]}'.*; got 'neither'$"):
        config(**{field: "neither"})


NUMBERS = [
    ("n_layers", 0, "n_layers must be a whole number of at least 1; got 0"),
    ("n_heads", True, "n_heads must be a whole number of at least 1; got True"),
    ("window", 0, "window must be a whole number of at least 1 or None; got 0"),
    ("n_experts", -1, "n_experts must be a whole number of at least 0; got -1"),
    ("rope_base", 0.0, "rope_base must be a number above 0; got 0.0"),
    ("logit_softcap", -1.0, "logit_softcap must be a number above 0 or None; got -1.0"),
    ("residual_multiplier", float("nan"), "residual_multiplier must be a number above 0; got nan"),
    ("parallel_norms", 3, "parallel_norms must be 1 or 2; got 3"),
]


@pytest.mark.parametrize(("field", "value", "message"), NUMBERS, ids=[field for field, _, _ in NUMBERS])
def test_a_number_out_of_range_is_named(field, value, message):
    with pytest.raises(sl.errors.InputError, match=f"^{message}$"):
        config(**{field: value})


PAIRS = [
    ({"n_heads": 5}, "d_model", "n_heads"),
    ({"n_kv_heads": 3}, "n_heads", "n_kv_heads"),
    ({"positions": "sinusoidal", "d_model": 25, "d_head": 6}, "positions", "d_model"),
    ({"positions": "alibi", "rope_scaling": "yarn"}, "rope_scaling", "positions"),
    ({"positions": "learned", "rotary_dims": 4}, "rotary_dims", "positions"),
    ({"rope_factor": 2.0}, "rope_factor", "rope_scaling"),
    ({"rope_scaling": "linear", "rope_factor": 0.5}, "rope_scaling", "rope_factor"),
    ({"rope_scaling": "llama3", "llama3_low_freq_factor": 8.0}, "llama3_high_freq_factor", "llama3_low_freq_factor"),
    ({"rotary_dims": 8}, "d_head", "rotary_dims"),
    ({"rotary_dims": 3}, "positions", "rotary_dims"),
    ({"d_head": 7}, "positions", "d_head"),
    ({"rope_scaling": "ntk", "rope_factor": 2.0, "rotary_dims": 2}, "rope_scaling", "rotary_dims"),
    ({"norm_bias": True}, "norm_bias", "norm"),
    ({"norm": "layernorm", "norm_bias": True, "norm_parameters": False}, "norm_bias", "norm_parameters"),
    ({"parallel_norms": 2}, "parallel_norms", "placement"),
    ({"placement": "parallel", "mlp": "none"}, "placement", "mlp"),
    ({"placement": "mix-ln"}, "placement", "n_layers"),
    ({"init": "mup", "tied": True}, "init", "tied"),
    ({"window_layers": (0,)}, "window_layers", "window"),
    ({"window": 3, "window_layers": (3,)}, "window_layers", "n_layers"),
    ({"mlp": "none", "d_mlp": 8}, "d_mlp", "mlp"),
    ({"mlp": "none", "mlp_bias": True}, "mlp_bias", "mlp"),
    ({"mlp": "none", "n_experts": 2}, "n_experts", "mlp"),
    ({"n_experts": 2, "mlp_bias": True}, "n_experts", "mlp_bias"),
    ({"n_experts": 2, "n_experts_active": 3}, "n_experts", "n_experts_active"),
    ({"n_shared_experts": 1}, "n_shared_experts", "n_experts"),
]


@pytest.mark.parametrize(("changes", "first", "second"), PAIRS, ids=[f"{first}-{second}" for _, first, second in PAIRS])
def test_two_choices_that_do_not_go_together_are_both_named(changes, first, second):
    with pytest.raises(sl.errors.InputError, match=rf"\b{first}\b.*; got {second} ") as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(sl.errors.InputError, match="got 'n_head'"):
        sl.DecoderConfig.from_dict(SIZES | {"n_head": 4})
    with pytest.raises(sl.errors.InputError, match="n_vocab is missing"):
        sl.DecoderConfig.from_dict({k: v for k, v in SIZES.items() if k != "n_vocab"})


@pytest.mark.parametrize(("mlp", "width"), [("swiglu", 352), ("geglu", 352), ("gelu", 512), ("relu", 512)])
def test_width_of_the_mlp(mlp, width):
    """4 d_model, or 8/3 d_model rounded up: 341.3 to the next multiple of 32."""
    assert sl.DecoderConfig(50, 128, 2, 4, mlp=mlp).mlp_width == width


def test_deepnorm_has_the_paper_s_numbers():
    """Wang et al. 2022, decoder-only, of 12 and 48 layers."""
    for layers, alpha, beta in ((12, 2.2134, 0.3195), (48, 3.1302, 0.2259)):
        made = config(n_layers=layers, placement="deepnorm")
        assert (round(made.deepnorm_alpha, 4), round(made.deepnorm_beta, 4)) == (alpha, beta)


def test_settled_forms_are_equal_where_the_models_are():
    made = config()
    same = replace(made, n_kv_heads=4, d_head=6, attention_scale=6**-0.5, final_norm=True, gelu="tanh", init="xavier", rotary_dims=6)
    assert same.settled() == made.settled()
    assert replace(made, rope_base=5e5).settled() != made.settled()
    assert made.settled().settled() == made.settled()


def test_the_config_of_some_layers_keeps_what_each_of_them_has():
    made = config(n_layers=5, window=3, window_layers=(1, 4)).keeping([0, 4, 2])
    assert (made.n_layers, made.window_layers) == (3, (1,))
    assert config(n_layers=3, window=3, window_layers=(1,)).keeping([0, 2]).window is None
    mixed = config(n_layers=6, placement="mix-ln", mix_share=0.5)
    assert [mixed.keeping(kept).n_post_norm for kept in ([0, 1, 3], [0, 3, 4], [3, 4], [0, 1])] == [2, 1, 0, 2]
    assert mixed.keeping([0, 1]).has_final_norm
