"""Llama and those that kept its names: Mistral, Mixtral, Qwen2, Qwen3, Granite, OLMo 2, Gemma and Gemma 2."""

from __future__ import annotations

from typing import Any

import torch

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.convert.family import Family, State, by_layer, demand
from streamlens.decoder.convert.rope import read_rope, write_rope

_ENDS = {"embed": "model.embed_tokens", "final_norm": "model.norm", "unembed": "lm_head"}
_ATTENTION = {f"attn.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
_MLP = {f"mlp.{name}": f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
_EXPERTS = {"mlp.router": "mlp.gate"} | {f"mlp.experts.{name}": f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
_NORMS = {
    "pre": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    "reordered": {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},
    "sandwich": {
        "norm1": "input_layernorm",
        "norm1_post": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "norm2_post": "post_feedforward_layernorm",
    },
}


def _names(placement: str = "pre", mlp: dict[str, str] = _MLP) -> dict[str, str]:
    return _ENDS | by_layer("blocks.{i}", "model.layers.{i}", _ATTENTION | mlp | _NORMS[placement])


def _read(hf: Any, **changes: Any) -> DecoderConfig:
    """What all of them say by the same names; each family's own says the rest."""
    d_head = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    fields = {
        "n_vocab": hf.vocab_size,
        "d_model": hf.hidden_size,
        "n_layers": hf.num_hidden_layers,
        "n_heads": hf.num_attention_heads,
        "n_kv_heads": hf.num_key_value_heads,
        "d_head": d_head,
        "d_mlp": hf.intermediate_size,
        "max_length": hf.max_position_embeddings,
        "norm_eps": hf.rms_norm_eps,
        "tied": hf.tie_word_embeddings,
        "qkv_bias": bool(getattr(hf, "attention_bias", False)),
        "output_bias": bool(getattr(hf, "attention_bias", False)),
        "mlp_bias": bool(getattr(hf, "mlp_bias", False)),
    }
    return DecoderConfig(**fields | read_rope(hf.rope_parameters, d_head) | _windows(hf) | changes)


def _windows(hf: Any) -> dict[str, Any]:
    window = getattr(hf, "sliding_window", None)
    if window is None or getattr(hf, "use_sliding_window", True) is False:
        return {}
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    return {"window": window, "window_layers": None if len(layers) == len(kinds) else tuple(layers)} if layers else {}


def _write(c: DecoderConfig, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": c.n_vocab,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width,
        "intermediate_size": c.mlp_width,
        "max_position_embeddings": c.max_length,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp_bias,
        "rope_parameters": write_rope(c),
    } | more


def _window_types(c: DecoderConfig) -> dict[str, Any]:
    kinds = ["full_attention" if c.window_of(layer) is None else "sliding_attention" for layer in range(c.n_layers)]
    return {"sliding_window": c.window, "use_sliding_window": c.window is not None, "layer_types": kinds}


def _plain(hf: Any) -> DecoderConfig:
    demand(hf, hidden_act="silu")
    return _read(hf)


def _qwen2(hf: Any) -> DecoderConfig:
    demand(hf, hidden_act="silu")
    return _read(hf, qkv_bias=True, output_bias=False)


def _qwen3(hf: Any) -> DecoderConfig:
    demand(hf, hidden_act="silu")
    return _read(hf, qk_norm="head")


def _granite(hf: Any) -> DecoderConfig:
    demand(hf, hidden_act="silu")
    return _read(
        hf,
        embed_multiplier=hf.embedding_multiplier,
        residual_multiplier=hf.residual_multiplier,
        attention_scale=hf.attention_multiplier,
        logit_scale=1 / hf.logits_scaling,
    )


def _write_granite(c: DecoderConfig) -> dict[str, Any]:
    return _write(
        c,
        embedding_multiplier=c.embed_multiplier,
        residual_multiplier=c.residual_multiplier,
        attention_multiplier=c.scale,
        logits_scaling=1 / c.logit_scale,
    )


def _olmo2(hf: Any) -> DecoderConfig:
    demand(hf, hidden_act="silu")
    return _read(hf, placement="reordered", qk_norm="width")


def _mixtral(hf: Any) -> DecoderConfig:
    demand(hf, hidden_act="silu")
    return _read(hf, n_experts=hf.num_local_experts, n_experts_active=hf.num_experts_per_tok, aux_loss=hf.router_aux_loss_coef)


def _write_mixtral(c: DecoderConfig) -> dict[str, Any]:
    return _write(
        c,
        num_local_experts=c.n_experts,
        num_experts_per_tok=c.n_experts_active,
        router_aux_loss_coef=c.aux_loss,
        sliding_window=c.window,
    )


def _gemma(hf: Any) -> DecoderConfig:
    demand(hf, hidden_act="gelu_pytorch_tanh")
    return _read(hf, mlp="geglu", gelu="tanh", embed_multiplier=hf.hidden_size**0.5)


def _gemma2(hf: Any) -> DecoderConfig:
    demand(hf, hidden_activation="gelu_pytorch_tanh")
    return _read(
        hf,
        placement="sandwich",
        mlp="geglu",
        gelu="tanh",
        embed_multiplier=hf.hidden_size**0.5,
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        attention_softcap=hf.attn_logit_softcapping,
        logit_softcap=hf.final_logit_softcapping,
    )


def _write_gemma2(c: DecoderConfig) -> dict[str, Any]:
    return _write(
        c,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=round(c.scale**-2),
        attn_logit_softcapping=c.attention_softcap,
        final_logit_softcapping=c.logit_softcap,
        **_window_types(c),
    )


def _add_one(state: State, c: DecoderConfig) -> State:
    """Gemma's gains are 1 + weight."""
    return {key: weight + 1 if "norm" in key else weight for key, weight in state.items()}


def _take_one(state: State, c: DecoderConfig) -> State:
    return {key: weight - 1 if "norm" in key else weight for key, weight in state.items()}


def _split_experts(state: State, c: DecoderConfig) -> State:
    out = {}
    for key, weight in state.items():
        if key.endswith("gate_up_proj"):
            out[key.replace("gate_up_proj", "gate_proj")], out[key.replace("gate_up_proj", "up_proj")] = weight.chunk(2, dim=1)
        else:
            out[key] = weight
    return out


def _join_experts(state: State, c: DecoderConfig) -> State:
    out = {key: weight for key, weight in state.items() if not key.endswith(("experts.gate_proj", "experts.up_proj"))}
    for key in [key for key in state if key.endswith("experts.gate_proj")]:
        out[key.replace("gate_proj", "gate_up_proj")] = torch.cat((state[key], state[key.replace("gate_proj", "up_proj")]), dim=1)
    return out


LLAMA = Family("llama", _names(), _plain, _write)
MISTRAL = Family("mistral", _names(), _plain, lambda c: _write(c, sliding_window=c.window))
QWEN2 = Family("qwen2", _names(), _qwen2, lambda c: _write(c, **_window_types(c)))
QWEN3 = Family("qwen3", _names(), _qwen3, lambda c: _write(c, **_window_types(c)))
GRANITE = Family("granite", _names(), _granite, _write_granite)
OLMO2 = Family("olmo2", _names("reordered"), _olmo2, _write)
MIXTRAL = Family("mixtral", _names(mlp=_EXPERTS), _mixtral, _write_mixtral, _split_experts, _join_experts)
GEMMA = Family("gemma", _names(), _gemma, lambda c: _write(c, hidden_act="gelu_pytorch_tanh"), _add_one, _take_one)
GEMMA2 = Family("gemma2", _names("sandwich"), _gemma2, _write_gemma2, _add_one, _take_one)
