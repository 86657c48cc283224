"""Against TransformerLens' own small model (`boot_native`), where its features and ours meet: logits, and every hook of one name."""

import pytest
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources.native import boot

from tests.decoder.configs import decoder, tokens

ROPE = {"positional_embedding_type": "rotary"}
GATED = ROPE | {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu"}
ATTENTION = {"qkv_bias": True, "output_bias": True, "rope_pairs": "interleaved"}  # theirs always has biases, and turns neighbours
LAYERNORM = {"norm": "layernorm", "norm_bias": True, "mlp": "gelu", "mlp_bias": True}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8}

MEETING = {
    "llama-like": ({}, GATED),
    "gqa and softcaps": (
        {"n_kv_heads": 2, "attention_softcap": 2.0, "logit_softcap": 3.0},
        GATED | {"n_key_value_heads": 2, "attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
    ),
    "gpt2-like": (
        LAYERNORM | {"positions": "learned", "gelu": "tanh", "rope_pairs": "half"},
        {"positional_embedding_type": "standard", "normalization_type": "LN", "act_fn": "gelu_new"},
    ),
    "attention only": (LAYERNORM | {"mlp": "none", "mlp_bias": False}, ROPE | {"normalization_type": "LN", "attn_only": True}),
    "relu, norms without parameters": (
        {"norm": "layernorm", "norm_parameters": False, "mlp": "relu", "mlp_bias": True},
        ROPE | {"normalization_type": "LNPre", "act_fn": "relu"},
    ),
    "partial rotary": ({"rotary_dims": 4}, GATED | {"rotary_dim": 4}),
    "linear": ({"rope_scaling": "linear", "rope_factor": 4.0}, GATED | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "ntk": ({"rope_scaling": "ntk", "rope_factor": 4.0}, GATED | {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}),
    "llama3": ({"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_length": 8}, GATED | {"rope_scaling": LLAMA3}),
}
NAMES = {
    "embed": "tok_embed",
    "pos_embed": "pos",
    "final_norm": "ln_out",
    "unembed": "head",
    "blocks": "layers",
    "norm1": "ln1",
    "norm2": "ln2",
}
NAMES |= {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate"}
LIMIT = 1e-5
"""Of the largest value, in float32."""


def theirs(module, settings):
    """A bridge around their model with the decoder's weights."""
    c = module.config
    sizes = {"n_layers": c.n_layers, "d_model": c.d_model, "n_ctx": c.max_length, "d_head": c.head_width, "n_heads": c.n_heads}
    sizes |= {"d_mlp": c.mlp_width, "d_vocab": c.n_vocab, "eps": c.norm_eps, "seed": 0}
    config = TransformerBridgeConfig.from_dict(sizes | settings)
    config.rope_scaling = settings.get("rope_scaling")  # which from_dict drops
    bridge = boot(config)
    mlp = {"up_proj": "in", "down_proj": "out"} if c.gated else {"up_proj": "fc_in", "down_proj": "fc_out"}
    names = NAMES | mlp
    ours = {".".join(names.get(part, part) for part in key.split(".")): weight for key, weight in module.state_dict().items()}
    copied = set()
    with torch.no_grad():
        for key, weight in bridge.original_model.state_dict().items():
            plain = key.replace("_original_component.", "")
            if plain in ours:
                weight.copy_(ours[plain])
                copied.add(plain)
    assert copied == set(ours)
    return bridge


def near(a, b):
    assert float((a.flatten() - b.flatten()).abs().max()) <= LIMIT * float(b.abs().max())


@pytest.mark.parametrize(("changes", "settings"), MEETING.values(), ids=MEETING)
def test_logits_and_hooks_are_theirs(changes, settings):
    module = decoder(torch.float32, **ATTENTION | changes)
    bridge, ids = theirs(module, settings), tokens()
    with torch.no_grad():
        logits, cache = module.hooked().run_with_cache(ids)
        their_logits, their_cache = bridge.run_with_cache(ids)
    near(logits, their_logits)
    # Their hook_attn_scores sees the pattern.
    shared = [name for name in cache if name in their_cache and not name.endswith("attn_scores")]
    block = [name for name in shared if name.startswith("blocks.1.")]
    assert len(block) >= (9 if module.config.mlp == "none" else 13)
    for name in shared:
        near(cache[name], their_cache[name])
