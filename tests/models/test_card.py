"""The card's facts on tiny random models, against numbers worked out by hand and against the products that torch counts."""

import math

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from streamlens.models.card import config_facts
from tests.models.tiny import llama

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 20}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4} | ENDS
GROUPED = SIZES | {"num_key_value_heads": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=32, **ENDS),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GROUPED | {"num_hidden_layers": 6}, head_dim=8, sliding_window=8),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss": lambda: transformers.GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=3, head_dim=8, pad_token_id=0),
    "bloom": lambda: transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=4, **ENDS),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=8, max_position_embeddings=32, **ENDS
    ),
    "falcon": lambda: transformers.FalconConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, multi_query=True, **ENDS),
    "gptj": lambda: transformers.GPTJConfig(n_embd=16, n_layer=2, n_head=4, rotary_dim=2, **ENDS),
    "xglm": lambda: transformers.XGLMConfig(d_model=16, num_layers=2, attention_heads=4, ffn_dim=24, **ENDS),
    "mamba": lambda: transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, **ENDS),
}


def model(family, **changes):
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()


def facts(family, *names, **changes):
    found = config_facts(model(family, **changes))
    return tuple(found[name] for name in names)


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "d_head", "d_mlp"),
    [
        ("llama", 4, 2, 4, 24),
        ("gpt2", 4, 4, 4, 64),
        ("neox", 4, 4, 4, 24),
        ("gemma2", 4, 2, 8, 24),
        ("mixtral", 4, 2, 4, 24),
        ("gpt-oss", 4, 2, 8, 24),
        ("bloom", 4, 4, 4, 64),
        ("opt", 4, 4, 4, 24),
        ("falcon", 4, 1, 4, 64),
        ("mamba", 0, 0, 0, 0),
    ],
)
def test_widths_come_from_the_weights(family, heads, kv_heads, d_head, d_mlp):
    names = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_mlp", "vocabulary", "varies")
    assert facts(family, *names) == (2, 16, heads, kv_heads, d_head, d_mlp, 20, "none")


def test_a_config_that_tells_another_story_is_not_believed():
    module = model("llama")
    module.config.update({"intermediate_size": 999, "num_key_value_heads": 4, "vocab_size": 7, "num_hidden_layers": 9})
    found = config_facts(module)
    assert [found[name] for name in ("d_mlp", "n_kv_heads", "vocabulary", "n_layers")] == [24, 2, 20, 2]


def test_layers_that_differ_are_named():
    module = llama(num_hidden_layers=3)
    mlp = module.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8), torch.nn.Linear(8, 16)
    found = config_facts(module)
    assert (found["d_mlp"], found["varies"]) == (24, "d_mlp")


@pytest.mark.parametrize(
    ("family", "scheme", "settings", "context"),
    [
        ("llama", "rope", "theta 10000", 2048),
        ("gpt2", "learned", "32 positions", 32),
        ("neox", "rope", "theta 10000, 50% of d_head", 2048),
        ("gemma3", "rope", "sliding_attention: theta 10000; full_attention: theta 1000000", 131072),
        ("gpt-oss", "rope", "theta 150000, scaling yarn x 32", 131072),
        ("bloom", "alibi", "none", 0),
        ("opt", "learned", "32 positions", 32),
        ("falcon", "rope", "theta 10000", 2048),
        ("gptj", "rope", "2 dimensions of a head", 2048),
        ("xglm", "sinusoidal", "none", 2048),
        ("mamba", "none", "none", 0),
    ],
)
def test_positions(family, scheme, settings, context):
    assert facts(family, "position", "position_settings", "context_length") == (scheme, settings, context)


def test_falcon_with_alibi_and_layers_without_rope():
    assert facts("falcon", "position", alibi=True) == ("alibi",)
    nope = transformers.SmolLM3Config(**GROUPED | {"num_hidden_layers": 4}, pad_token_id=0)
    found = config_facts(transformers.SmolLM3ForCausalLM(nope).eval())
    assert found["position_settings"] == "theta 2000000, on 3 of 4 layers"


@pytest.mark.parametrize(("family", "kind"), [("llama", "none"), ("gemma3", "head"), ("olmo2", "width"), ("opt", "none")])
def test_qk_norm(family, kind):
    assert facts(family, "qk_norm") == (kind,)


def test_settings_of_attention_and_logits():
    names = ("sliding_window", "sliding_window_layers", "attention_softcap", "logit_softcap", "tied", "dtype")
    assert facts("gemma2", *names) == (8, 1, 50.0, 30.0, True, "float32")
    window, layers, cap, logit_cap, tied, _ = facts("llama", *names)
    assert (window, layers, tied) == (0, 0, False)
    assert math.isnan(cap)
    assert math.isnan(logit_cap)
    assert facts("gemma3", "sliding_window", "sliding_window_layers") == (8, 5)


def test_two_dtypes_are_both_named():
    module = model("llama").bfloat16()
    module.model.norm.float()
    module.lm_head.float()
    assert config_facts(module)["dtype"] == "bfloat16 and float32"


def test_experts_and_active_parameters():
    # A layer: attention 16*16 + 2*16*8 + 16*16, router 4*16, two norms; an expert: 3 * 16*24. Embedding, unembedding, final norm.
    shared, expert = 2 * (768 + 64 + 32) + 2 * 20 * 16 + 16, 3 * 16 * 24
    names = ("n_experts", "n_experts_active", "d_expert", "parameters", "parameters_active")
    assert facts("mixtral", *names) == (4, 2, 24, shared + 2 * 4 * expert, shared + 2 * 2 * expert)
    assert facts("llama", *names) == (0, 0, 0, 4560, 4560)


def test_a_shared_expert_is_always_active():
    sizes = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}
    module = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**sizes)).eval()
    found = config_facts(module)
    assert (found["n_experts"], found["n_experts_active"], found["d_expert"]) == (4, 2, 8)
    assert found["parameters"] - found["parameters_active"] == 2 * 2 * 3 * 16 * 8


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox", "gemma2", "olmo2", "mixtral", "bloom", "opt", "falcon", "gptj", "xglm"])
def test_multiply_adds_are_those_that_torch_counts(family):
    module, tokens = model(family), 6
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.arange(tokens)[None] + 1, use_cache=False)
    counted = {str(kind): flops for kind, flops in counter.get_flop_counts()["Global"].items()}
    with_weights = counted.get("aten.mm", 0) + counted.get("aten.addmm", 0)
    assert config_facts(module)["multiply_adds_per_token"] * tokens == with_weights // 2


def test_blocks_that_run_several_times_cost_several_times():
    module = model("llama")
    once = config_facts(module)["multiply_adds_per_token"]
    twice = config_facts(module, {"model.layers.1": 2})["multiply_adds_per_token"]
    assert twice - once == 768 + 3 * 16 * 24


def test_attention_cost_counts_every_query_head():
    # Two layers, four heads: a score with d_head and a sum over d_head.
    assert facts("llama", "multiply_adds_per_source") == (2 * 4 * (4 + 4),)
    assert facts("mamba", "multiply_adds_per_source") == (0,)


@pytest.mark.parametrize(
    ("family", "numbers"),
    [("llama", 2 * 2 * 2 * 4), ("gpt2", 2 * 2 * 4 * 4), ("falcon", 2 * 2 * 1 * 4), ("gemma2", 2 * 2 * 2 * 8), ("mamba", 0)],
)
def test_cache_is_measured(family, numbers):
    assert facts(family, "kv_cache_bytes_per_token") == (4 * numbers,)
    assert config_facts(model(family).bfloat16())["kv_cache_bytes_per_token"] == 2 * numbers


def test_layers_that_share_keys_and_values_keep_them_once():
    sizes = GROUPED | {"num_hidden_layers": 4, "intermediate_size": [24] * 4, "head_dim": 8, "laurel_rank": 2}
    sizes |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 20, "activation_sparsity_pattern": [0.0] * 4}
    config = transformers.Gemma3nTextConfig(**sizes, num_kv_shared_layers=2, layer_types=["full_attention"] * 4)
    module = transformers.Gemma3nForCausalLM(config).eval()
    found = config_facts(module)
    assert found["kv_cache_bytes_per_token"] == 4 * 2 * 2 * 2 * 8  # bytes, layers, keys and values, heads, d_head
    assert found["multiply_adds_per_source"] == 4 * 4 * (8 + 8)


def test_the_model_comes_back_as_it_was():
    module = model("gpt2").train()
    config_facts(module)
    assert all(part.training for part in module.modules())
    assert all(weight.requires_grad for weight in module.parameters())
