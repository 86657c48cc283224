"""Tiny random models and a tokenizer of six words.

`llama` is for tests that only need something to open; `model` gives every family of the contract, with gains and biases drawn at random,
since ones and zeros hide mistakes.
"""

from functools import cache

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import streamlens as sl

WORDS = ["<unk>", "the", "cat", "sat", "on", "mat"]


def llama(**changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 12,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{"vocab_size": 12} | sizes | changes, bos_token_id=1, eos_token_id=2)
    ).eval()


def words():
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


ENDS = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 60}
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64, **ENDS}
GQA = {"num_key_value_heads": 2, "intermediate_size": 48}
WINDOWED = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SHARED = {  # the last two layers read keys and values that earlier ones made
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 60,
    "pad_token_id": 0,
}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL | GQA | {"attention_bias": True, "mlp_bias": True}),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, **ENDS),
    "neox": lambda: transformers.GPTNeoXConfig(**SMALL, intermediate_size=48, rotary_pct=0.5, use_parallel_residual=True),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL | GQA | WINDOWED, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL | GQA, pad_token_id=0),
    "bloom": lambda: transformers.BloomConfig(hidden_size=32, n_layer=3, n_head=4, **ENDS),
    "opt-post-norm": lambda: transformers.OPTConfig(
        **SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "pad_token_id": 0}
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL | GQA, num_local_experts=4, num_experts_per_tok=2),
    "gemma4": lambda: transformers.Gemma4TextConfig(**SMALL | GQA | WINDOWED | SHARED),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **SMALL | GQA | WINDOWED | SHARED, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4
    ),
}


def model(family, dtype=torch.float32, seed=0, **changes):
    """A tiny model of the family whose every gain and bias is drawn at random, in eval mode."""
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(module, seed)
    return module.to(dtype)


FAMILIES = tuple(family for family in CONFIGS if family != "gemma3n")
"""Those that are served; Gemma-3n adds a low-rank write inside its own averages, and is refused."""


@cache
def proven(family, dtype=torch.float32):
    """The family's model, opened and proven once for all tests, which must leave it as it was."""
    return sl.load(model(family, dtype))


@torch.no_grad()
def randomise(module, seed=0):
    """Every gain about 1 and every bias about 0, both wide; matrices a little larger than at initialisation."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        draw = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.copy_(draw * 0.3 + (0.0 if name.endswith("bias") else 1.0))
        else:
            weight.copy_(draw * (0.5 if "emb" in name or "wte" in name else weight.shape[-1] ** -0.5))
