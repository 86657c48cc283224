"""Families with LayerNorms and biases: GPT-2, GPT-NeoX (Pythia), BLOOM and OPT."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.convert.family import Family, State, by_layer, demand, join_qkv, split_qkv
from streamlens.decoder.convert.rope import read_rope, write_rope

_BIASED = {"norm": "layernorm", "norm_bias": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True}

# -- GPT-2 -----------------------------------------------------------------------------------------------------------
_GPT2_NAMES = {"embed": "transformer.wte", "pos_embed": "transformer.wpe", "final_norm": "transformer.ln_f", "unembed": "lm_head"}
_GPT2_NAMES |= by_layer(
    "blocks.{i}",
    "transformer.h.{i}",
    {
        "norm1": "ln_1",
        "attn.qkv_proj": "attn.c_attn",
        "attn.o_proj": "attn.c_proj",
        "norm2": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
)


def _read_gpt2(hf: Any) -> DecoderConfig:
    demand(hf, activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    return DecoderConfig(
        hf.vocab_size, hf.n_embd, hf.n_layer, hf.n_head,
        max_length=hf.n_positions, positions="learned", mlp="gelu", gelu="tanh", d_mlp=hf.n_inner or 4 * hf.n_embd,
        norm_eps=hf.layer_norm_epsilon, tied=hf.tie_word_embeddings, **_BIASED,
    )  # fmt: skip


def _write_gpt2(c: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.n_vocab,
        "n_embd": c.d_model,
        "n_layer": c.n_layers,
        "n_head": c.n_heads,
        "n_positions": c.max_length,
        "n_inner": c.mlp_width,
        "layer_norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tied,
    }


def _turned(state: State) -> State:
    """GPT-2 keeps the matrices of its blocks `[in, out]`."""
    return {key: weight.T.contiguous() if re.search(r"_proj\.weight$", key) else weight for key, weight in state.items()}


# -- GPT-NeoX --------------------------------------------------------------------------------------------------------
_DENSE = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
_NEOX_NAMES = {"embed": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "unembed": "lm_head"}
_NEOX_NAMES |= by_layer(
    "blocks.{i}",
    "gpt_neox.layers.{i}",
    _DENSE
    | {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attn.qkv_proj": "attention.query_key_value",
        "attn.o_proj": "attention.dense",
    },
)


def _read_neox(hf: Any) -> DecoderConfig:
    demand(hf, hidden_act="gelu")
    biased = _BIASED | {"qkv_bias": hf.attention_bias, "output_bias": hf.attention_bias}
    parallel = {"placement": "parallel", "parallel_norms": 2} if hf.use_parallel_residual else {}
    return DecoderConfig(
        hf.vocab_size, hf.hidden_size, hf.num_hidden_layers, hf.num_attention_heads,
        max_length=hf.max_position_embeddings, mlp="gelu", d_mlp=hf.intermediate_size, norm_eps=hf.layer_norm_eps,
        tied=hf.tie_word_embeddings, **biased, **parallel,
        **read_rope(hf.rope_parameters, hf.hidden_size // hf.num_attention_heads),
    )  # fmt: skip


def _write_neox(c: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.n_vocab,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "intermediate_size": c.mlp_width,
        "max_position_embeddings": c.max_length,
        "layer_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "attention_bias": c.qkv_bias,
        "use_parallel_residual": c.placement == "parallel",
        "rope_parameters": {"partial_rotary_factor": 1.0} | write_rope(c),
    }


# -- BLOOM -----------------------------------------------------------------------------------------------------------
_BLOOM_NAMES = {
    "embed": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f",
    "unembed": "lm_head",
}
_BLOOM_NAMES |= by_layer(
    "blocks.{i}",
    "transformer.h.{i}",
    _DENSE
    | {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attn.qkv_proj": "self_attention.query_key_value",
        "attn.o_proj": "self_attention.dense",
    },
)


def _read_bloom(hf: Any) -> DecoderConfig:
    demand(hf, apply_residual_connection_post_layernorm=False)
    return DecoderConfig(
        hf.vocab_size, hf.hidden_size, hf.n_layer, hf.n_head,
        positions="alibi", mlp="gelu", gelu="tanh", d_mlp=4 * hf.hidden_size, embed_norm=True,
        norm_eps=hf.layer_norm_epsilon, tied=hf.tie_word_embeddings, **_BIASED,
    )  # fmt: skip


def _write_bloom(c: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.n_vocab,
        "hidden_size": c.d_model,
        "n_layer": c.n_layers,
        "n_head": c.n_heads,
        "layer_norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tied,
    }


# -- OPT -------------------------------------------------------------------------------------------------------------
_OPT_PADDING_ROWS = 2
_OPT_NAMES = {
    "embed": "model.decoder.embed_tokens",
    "pos_embed": "model.decoder.embed_positions",
    "final_norm": "model.decoder.final_layer_norm",
    "unembed": "lm_head",
}
_OPT_NAMES |= by_layer(
    "blocks.{i}",
    "model.decoder.layers.{i}",
    {f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"}
    | {
        "attn.o_proj": "self_attn.out_proj",
        "norm1": "self_attn_layer_norm",
        "norm2": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    },
)


def _read_opt(hf: Any) -> DecoderConfig:
    demand(hf, activation_function="relu", word_embed_proj_dim=hf.hidden_size, layer_norm_elementwise_affine=True)
    biased = _BIASED | dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), hf.enable_bias)
    return DecoderConfig(
        hf.vocab_size, hf.hidden_size, hf.num_hidden_layers, hf.num_attention_heads,
        max_length=hf.max_position_embeddings, positions="learned", mlp="relu", d_mlp=hf.ffn_dim, tied=hf.tie_word_embeddings,
        placement="pre" if hf.do_layer_norm_before else "post",
        final_norm=hf.do_layer_norm_before and not hf._remove_final_layer_norm, **biased,
    )  # fmt: skip


def _write_opt(c: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.n_vocab,
        "hidden_size": c.d_model,
        "word_embed_proj_dim": c.d_model,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "ffn_dim": c.mlp_width,
        "max_position_embeddings": c.max_length,
        "tie_word_embeddings": c.tied,
        "enable_bias": c.qkv_bias,
        "do_layer_norm_before": c.placement == "pre",
        "_remove_final_layer_norm": c.placement == "pre" and not c.has_final_norm,
    }


def _without_padding_rows(state: State, c: DecoderConfig) -> State:
    return {key: weight[_OPT_PADDING_ROWS:] if key.startswith("pos_embed") else weight for key, weight in state.items()}


def _with_padding_rows(state: State, c: DecoderConfig) -> State:
    rows = state["pos_embed.weight"]
    padding = rows.new_zeros(_OPT_PADDING_ROWS, rows.shape[1])
    return state | {"pos_embed.weight": torch.cat((padding, rows))}


GPT2 = Family(
    "gpt2",
    _GPT2_NAMES,
    _read_gpt2,
    _write_gpt2,
    lambda state, c: split_qkv(_turned(state), c, by_head=False),
    lambda state, c: _turned(join_qkv(state, c, by_head=False)),
)
GPT_NEOX = Family("gpt_neox", _NEOX_NAMES, _read_neox, _write_neox, partial(split_qkv, by_head=True), partial(join_qkv, by_head=True))
BLOOM = Family("bloom", _BLOOM_NAMES, _read_bloom, _write_bloom, partial(split_qkv, by_head=True), partial(join_qkv, by_head=True))
OPT = Family("opt", _OPT_NAMES, _read_opt, _write_opt, _without_padding_rows, _with_padding_rows)
