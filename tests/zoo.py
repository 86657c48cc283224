"""Tiny random decoders of every architecture that transformers builds from a config, for tests of exactness.

One row a variant: its name, the class of its config, and what differs from the shared sizes. Norm gains, every bias and
every other vector are random, and matrices are scaled so that each sublayer writes about as much as the stream holds:
ones, zeros and tiny weights hide bugs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import streamlens as sl

D_MODEL, N_LAYERS, N_HEADS, N_KV_HEADS, D_MLP, N_VOCAB, N_POSITIONS = 48, 3, 4, 2, 64, 100, 64

_SIZES: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width", "embedding_dim", "word_embed_proj_dim"), D_MODEL)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), N_LAYERS)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads", "swa_num_attention_heads"), N_HEADS)
    | dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), N_KV_HEADS)
    | dict.fromkeys(
        ("intermediate_size", "ffn_dim", "dff", "dim_ff", "ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), D_MLP
    )
    | dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), N_VOCAB)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length"), N_POSITIONS)
    | dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "kv_channels"), 16)
    | dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "attention_chunk_size"), 4)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2)
    | dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1)
    | dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1)
    | dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
        ),
        32,
    )
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "kv_lora_rank": 8, "q_lora_rank": 8, "o_lora_rank": 8}
    | {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4, "index_block_size": 4, "index_topk_blocks": 1}
    | {
        "state_size": 4,
        "ssm_state_size": 4,
        "mamba_d_state": 4,
        "time_step_rank": 4,
        "mamba_dt_rank": 4,
        "chunk_size": 8,
        "mamba_chunk_size": 8,
    }
    | {
        "mamba_n_heads": 4,
        "mamba_num_heads": 4,
        "mamba_d_head": 24,
        "mamba_head_dim": 24,
        "mamba_headdim": 24,
        "mamba_n_groups": 2,
        "n_groups": 2,
    }
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_head_dim": 8}
    | {"linear_num_heads": 4, "rotary_dim": 8, "laurel_rank": 4, "hidden_size_per_layer_input": 8, "gated_norm_rank": 4, "adapter_rank": 4}
    | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "cls_token_id": None, "sep_token_id": None, "eod_token_id": None}
)
"""What a config gets where it has a field of that name."""

_SLIDE, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_ALTERNATING = {"layer_types": [_SLIDE, _FULL, _SLIDE]}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, "attention_multiplier": 0.2}
_SHARED_KV = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [_SLIDE, _FULL, _SLIDE, _FULL]}
_HYBRID = {"layer_types": [_LINEAR, _FULL, _LINEAR]}
_MLA = {"num_key_value_heads": N_HEADS}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HALF_ROTARY = {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
_FALCON_H1 = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "attention_out_multiplier": 0.7,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.8],
}
_BLT_PART = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
_BLT = {"global_config": _BLT_PART, "patcher_config": _BLT_PART | {"vocab_size": 100}, "encoder_hash_byte_group_vocab": 50} | {
    f"{part}_config": _BLT_PART | {"vocab_size": 100, "hidden_size_global": 48} for part in ("encoder", "decoder")
}
_DOTS3_SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 12,
}
_COMPRESSED = {
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "index_topk": 1,
}
_QWEN4_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4, "indexer_compress_ratio": 2}
_PERSIMMON = {
    "model_type": "persimmon",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
_TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "crop_size": 28,
}
_TINY_AUDIO = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16,
    "nemo_conv_channels": 16,
}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_MINIMAX = dict.fromkeys(("full_attn_alpha_factor", "linear_attn_beta_factor", "mlp_alpha_factor"), 0.9) | dict.fromkeys(
    ("full_attn_beta_factor", "linear_attn_alpha_factor", "mlp_beta_factor"), 1.1
)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # learned, sinusoidal and no positions; GPT-like blocks
    "gpt2": ("GPT2Config", {}),
    "gpt2_untied": ("GPT2Config", {"tie_word_embeddings": False}),
    "gpt_neo": ("GPTNeoConfig", {"attention_types": [[["global", "local", "global"], 1]]}),
    "gptj": ("GPTJConfig", {}),
    "codegen": ("CodeGenConfig", {}),
    "gpt_bigcode": ("GPTBigCodeConfig", {}),
    "gpt_bigcode_mha": ("GPTBigCodeConfig", {"multi_query": False}),
    "gpt_neox": ("GPTNeoXConfig", _HALF_ROTARY),
    "gpt_neox_sequential": ("GPTNeoXConfig", {"use_parallel_residual": False, "attention_bias": False} | _HALF_ROTARY),
    "gpt_neox_tied": ("GPTNeoXConfig", {"tie_word_embeddings": True} | _HALF_ROTARY),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", {}),
    "openai_gpt": ("OpenAIGPTConfig", {}),
    "ctrl": ("CTRLConfig", {}),
    "opt": ("OPTConfig", {}),
    "opt_projected": ("OPTConfig", {"word_embed_proj_dim": 24}),
    "opt_post_norm": ("OPTConfig", {"do_layer_norm_before": False}),
    "opt_350m": ("OPTConfig", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt_no_bias": ("OPTConfig", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt_untied": ("OPTConfig", {"tie_word_embeddings": False}),
    "xglm": ("XGLMConfig", {}),
    "xglm_unscaled": ("XGLMConfig", {"scale_embedding": False}),
    "biogpt": ("BioGptConfig", {}),
    "bloom": ("BloomConfig", {}),
    "bloom_post_norm_residual": ("BloomConfig", {"apply_residual_connection_post_layernorm": True}),
    "mpt": ("MptConfig", {}),
    "falcon_7b": ("FalconConfig", {}),
    "falcon_7b_bias": ("FalconConfig", {"bias": True}),
    "falcon_40b": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_40b_no_multi_query": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": False}),
    "falcon_11b": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon_rw": ("FalconConfig", {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
    "falcon_alibi_parallel": ("FalconConfig", {"alibi": True, "bias": True, "multi_query": False}),
    "persimmon": ("PersimmonConfig", _HALF_ROTARY),
    "persimmon_no_qk_norm": ("PersimmonConfig", {"qk_layernorm": False} | _HALF_ROTARY),
    "cpmant": ("CpmAntConfig", {}),
    "git": ("GitConfig", {"vision_config": _TINY_VISION}),
    "reformer": (
        "ReformerConfig",
        {
            "is_decoder": True,
            "axial_pos_shape": [8, 8],
            "axial_pos_embds_dim": [24, 24],
            "num_hidden_layers": 2,
            "attn_layers": ["local", "local"],
        },
    ),
    "blt": ("BltConfig", _BLT),
    # Llama and its close relatives
    "llama": ("LlamaConfig", {}),
    "llama_tied_bias": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_mha": ("LlamaConfig", {"num_key_value_heads": 4, "head_dim": None}),
    "mistral": ("MistralConfig", {}),
    "ministral": ("MinistralConfig", _ALTERNATING),
    "ministral3": ("Ministral3Config", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_sliding_tied": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "phi": ("PhiConfig", _HALF_ROTARY),
    "phi_qk_norm": ("PhiConfig", {"qk_layernorm": True} | _HALF_ROTARY),
    "phi3": ("Phi3Config", {}),
    "phi4_multimodal": ("Phi4MultimodalConfig", {"vision_config": _TINY_VISION, "audio_config": _TINY_AUDIO}),
    "stablelm": ("StableLmConfig", _HALF_ROTARY),
    "stablelm_qkv_bias": ("StableLmConfig", {"use_qkv_bias": True} | _HALF_ROTARY),
    "stablelm_parallel_qk_norm": ("StableLmConfig", {"use_parallel_residual": True, "qk_layernorm": True} | _HALF_ROTARY),
    "starcoder2": ("Starcoder2Config", {}),
    "starcoder2_untied": ("Starcoder2Config", {"tie_word_embeddings": False}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "arcee": ("ArceeConfig", {}),
    "apertus": ("ApertusConfig", {}),
    "apertus1p5": ("Apertus1p5TextConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"use_bias": True}),
    "ernie4_5_untied": ("Ernie4_5Config", {"tie_word_embeddings": False}),
    "seed_oss": ("SeedOssConfig", {"attention_out_bias": True}),
    "helium": ("HeliumConfig", {"head_dim": 12}),
    "hunyuan_dense": ("HunYuanDenseV1Config", {}),
    "jais2": ("Jais2Config", {}),
    "cwm": ("CwmConfig", {"bos_token_id": 0}),
    "bitnet": ("BitNetConfig", {}),
    "diffllama": ("DiffLlamaConfig", {}),
    "doge": ("DogeConfig", {}),
    "doge_moe": ("DogeConfig", {"is_moe": True}),
    "nemotron": ("NemotronConfig", _HALF_ROTARY),
    "emu3": ("Emu3TextConfig", dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)),
    "fuyu": ("FuyuConfig", {"text_config": _PERSIMMON, "patch_size": 4}),
    "moshi": ("MoshiConfig", {}),
    "mllama": ("MllamaTextConfig", {"bos_token_id": 0, "eos_token_id": 0, "cross_attention_layers": []}),
    "glm": ("GlmConfig", _HALF_ROTARY),
    "nanochat": ("NanoChatConfig", {}),
    "modernbert_decoder": ("ModernBertDecoderConfig", {"local_attention": 4} | dict.fromkeys(_TOKEN_IDS, 0)),
    # sandwich and reordered norms, caps, multipliers
    "glm4": ("Glm4Config", _HALF_ROTARY),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", _ALTERNATING),
    "gemma2_untied": ("Gemma2Config", {"tie_word_embeddings": False} | _ALTERNATING),
    "gemma2_no_cap": ("Gemma2Config", {"final_logit_softcapping": None, "attn_logit_softcapping": None} | _ALTERNATING),
    "gemma3": ("Gemma3TextConfig", _ALTERNATING),
    "gemma3_capped": ("Gemma3TextConfig", {"final_logit_softcapping": 8.0} | _ALTERNATING),
    "vaultgemma": ("VaultGemmaConfig", {}),
    "gemma3n": ("Gemma3nTextConfig", _SHARED_KV | {"activation_sparsity_pattern": [0.0] * 4, "num_kv_shared_layers": 0}),
    "gemma3n_shared_kv": ("Gemma3nTextConfig", _SHARED_KV | {"activation_sparsity_pattern": [0.0] * 4}),
    "gemma3n_sparse": ("Gemma3nTextConfig", _SHARED_KV | {"activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0]}),
    "gemma4": ("Gemma4TextConfig", _SHARED_KV | {"num_kv_shared_layers": 0, "global_head_dim": 16}),
    "gemma4_shared_kv": ("Gemma4TextConfig", _SHARED_KV | {"global_head_dim": 16, "final_logit_softcapping": 8.0}),
    "gemma4_wide_heads": ("Gemma4TextConfig", _SHARED_KV | {"num_kv_shared_layers": 0, "global_head_dim": 32}),
    "gemma4_no_per_layer_input": ("Gemma4TextConfig", _ALTERNATING | {"global_head_dim": 16, "hidden_size_per_layer_input": 0}),
    "gemma4_k_is_v": (
        "Gemma4TextConfig",
        _ALTERNATING | {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
    ),
    "gemma4_wide_mlp": ("Gemma4TextConfig", _SHARED_KV | {"global_head_dim": 16, "use_double_wide_mlp": True}),
    "gemma4_moe": ("Gemma4TextConfig", _SHARED_KV | {"global_head_dim": 16, "enable_moe_block": True, "top_k_experts": 2}),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", _ALTERNATING | {"global_head_dim": 16}),
    "olmo": ("OlmoConfig", {}),
    "olmo_clip": ("OlmoConfig", {"clip_qkv": 1.0}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", _ALTERNATING),
    "exaone4": ("Exaone4Config", _ALTERNATING),
    "hyperclovax": ("HyperCLOVAXConfig", _MULTIPLIERS),
    "hyperclovax_no_post_norm": ("HyperCLOVAXConfig", {"use_post_norm": False} | _MULTIPLIERS),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "cohere_qk_norm": ("CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25} | _ALTERNATING),
    "cohere_compass": ("CohereCompassTextConfig", _ALTERNATING | {"rope_parameters": {_FULL: _ROPE, _SLIDE: _ROPE}}),
    "granite": ("GraniteConfig", _MULTIPLIERS),
    "granite_plain": ("GraniteConfig", {}),
    "granite_swa": ("GraniteSWAConfig", _MULTIPLIERS),
    "minicpm3": ("MiniCPM3Config", _MLA | {"scale_emb": 3, "dim_model_base": 16}),
    "lfm3": ("Lfm3Config", {"layer_types": ["conv", _FULL, _SLIDE]}),
    "dory": (
        "DoryConfig",
        {
            "ngpt_alpha_init": 0.5,
            "n_input_layers": 1,
            "n_recurrent_layers": 1,
            "n_output_layers": 1,
            "layer_types": [_SLIDE, _FULL, _SLIDE],
        },
    ),
    "hrm_text": ("HrmTextConfig", {"num_hidden_layers": 2, "L_cycles": 2, "L_bp_cycles": [2, 2], "embedding_scale": 3.0}),
    "hrm_text_cut_gradients": ("HrmTextConfig", {"num_hidden_layers": 2, "L_cycles": 2, "L_bp_cycles": [1, 1], "embedding_scale": 3.0}),
    # mixtures of experts
    "mixtral": ("MixtralConfig", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {}),
    "qwen2_moe_mixed": ("Qwen2MoeConfig", {"mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3MoeConfig", {}),
    "phimoe": ("PhimoeConfig", {}),
    "phimoe_bias": ("PhimoeConfig", {"attention_bias": True, "lm_head_bias": True}),
    "olmoe": ("OlmoeConfig", {}),
    "flex_olmo": ("FlexOlmoConfig", {}),
    "granitemoe": ("GraniteMoeConfig", _MULTIPLIERS),
    "granitemoe_swa": ("GraniteMoeSWAConfig", _MULTIPLIERS),
    "granitemoeshared": ("GraniteMoeSharedConfig", _MULTIPLIERS),
    "gpt_oss": ("GptOssConfig", {}),
    "jetmoe": ("JetMoeConfig", {}),
    "dbrx": (
        "DbrxConfig",
        {
            "rope_parameters": _ROPE,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 32, "moe_top_k": 2},
        },
    ),
    "minimax": ("MiniMaxConfig", _MINIMAX),
    "minimax_m2": ("MiniMaxM2Config", {}),
    "minimax_m3": ("MiniMaxM3VLTextConfig", _SPARSE),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {}),
    "ernie4_5_moe_bias": ("Ernie4_5_MoeConfig", {"use_bias": True}),
    "hunyuan_moe": ("HunYuanMoEV1Config", {}),
    "llama4": ("Llama4TextConfig", {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2}),
    "glm4_moe": ("Glm4MoeConfig", _HALF_ROTARY),
    "dots1": ("Dots1Config", _ALTERNATING | {"first_k_dense_replace": 1}),
    "afmoe": ("AfmoeConfig", _ALTERNATING | {"mup_enabled": True}),
    "exaone_moe": ("ExaoneMoeConfig", _ALTERNATING | _SPARSE),
    "laguna": ("LagunaConfig", _ALTERNATING),
    "laguna_uneven_heads": ("LagunaConfig", _ALTERNATING | {"num_attention_heads_per_layer": [4, 8, 4]}),
    "mellum": ("MellumConfig", _ALTERNATING),
    "solar_open": ("SolarOpenConfig", {}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", {}),
    "cohere2_moe": ("Cohere2MoeConfig", _ALTERNATING | {"logit_scale": 0.25, "num_shared_experts": 1}),
    "aria_text": ("AriaTextConfig", {}),
    "hy_v3": ("HYV3Config", {}),
    "hy_v4": ("HYV4Config", _MLA),
    "beam": ("BeamConfig", _ALTERNATING | _SPARSE),
    "flint": ("FlintConfig", _ALTERNATING | {"mlp_only_layers": [0]}),
    "kolibri1": ("Kolibri1Config", _ALTERNATING),
    "inkling": (
        "InklingTextConfig",
        {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "logits_mup_width_multiplier": 2.0} | _SPARSE,
    ),
    "inkling2": ("Inkling2TextConfig", {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}),
    "inkling2_loop": ("Inkling2LoopTextConfig", {}),
    # multi-head latent attention
    "deepseek_v2": ("DeepseekV2Config", _MLA | {"first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3Config", _MLA | {"first_k_dense_replace": 1}),
    "deepseek_v32": ("DeepseekV32Config", _MLA | {"first_k_dense_replace": 1}),
    "deepseek_v4": ("DeepseekV4Config", {}),
    "deepseek_v4_compressed": ("DeepseekV4Config", _COMPRESSED),
    "youtu": ("YoutuConfig", _MLA),
    "longcat_flash": ("LongcatFlashConfig", _MLA | {"num_layers": 2, "zero_expert_num": 2, "head_dim": 4}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _MLA),
    "glm_moe_dsa": ("GlmMoeDsaConfig", _MLA | {"first_k_dense_replace": 1}),
    "axk1": ("AXK1Config", _MLA),
    "axk2": ("AXK2Config", _MLA),
    "dots3_note": ("Dots3NoteTextConfig", _MLA | {"layer_types": ["indexed_attention", _SLIDE, _FULL]} | _DOTS3_SLIDING),
    "sarvam_mla": ("SarvamMLAConfig", _MLA),
    # recurrent, hybrid and state-space models
    "mamba": ("MambaConfig", {}),
    "mamba2": ("Mamba2Config", {"head_dim": 24}),
    "falcon_mamba": ("FalconMambaConfig", {}),
    "rwkv": ("RwkvConfig", {"rescale_every": 2, "num_hidden_layers": 4}),
    "rwkv_unscaled": ("RwkvConfig", {"rescale_every": 0}),
    "xlstm": ("xLSTMConfig", {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0}),
    "jamba": ("JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1]}),
    "zamba": (
        "ZambaConfig",
        {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"], "num_key_value_heads": 4},
    ),
    "zamba2": (
        "Zamba2Config",
        {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"], "num_key_value_heads": 4, "n_mamba_heads": 4},
    ),
    "falcon_h1": ("FalconH1Config", {"mamba_d_ssm": 96} | _FALCON_H1),
    "recurrent_gemma": ("RecurrentGemmaConfig", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", _FULL, "conv"], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2MoeConfig", {"layer_types": ["conv", _FULL, "conv"], "num_dense_layers": 1}),
    "qwen3_next": ("Qwen3NextConfig", _HYBRID),
    "qwen3_5": ("Qwen3_5TextConfig", _HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _HYBRID),
    "qwen4_exp": ("Qwen4ExpTextConfig", _HYBRID | {"hc_lowrank": 4} | _QWEN4_INDEXER),
    "granitemoehybrid": ("GraniteMoeHybridConfig", _MULTIPLIERS | _HYBRID),
    "nemotron_h": ("NemotronHConfig", {}),
    "olmo_hybrid": ("OlmoHybridConfig", _HYBRID),
    "kimi_linear": ("KimiLinearConfig", _MLA | _HYBRID | _SPARSE | {"q_lora_rank": None}),
    "bailing_hybrid": ("BailingHybridConfig", _MLA | _HYBRID | _SPARSE | {"num_mtp_layers": 0}),
    "lara_mini": ("LaraMiniConfig", {"layer_types": [_LINEAR, _SLIDE, _LINEAR]}),
    "zaya": ("ZayaConfig", {"num_experts_per_tok": 1, "router_hidden_size": 8}),
    "zaya_sliding": (
        "ZayaConfig",
        {"num_experts_per_tok": 1, "router_hidden_size": 8, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"]},
    ),
}
"""A variant's name, the class of its config, and what differs from the shared sizes."""

UNBUILDABLE = {
    "gemma4_assistant": "a draft model that reads the hidden states of another model",
    "gemma4_unified_assistant": "a draft model that reads the hidden states of another model",
}
"""Architectures of AutoModelForCausalLM, by model type, that make no logits from token ids alone."""

_MULTIMODAL = "gemma3 gemma3n gemma4 gemma4_unified got_ocr2 moss_transcribe_diarize"
_ENCODERS = (
    "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer "
    "xlm xlm-roberta xlm-roberta-xl xlnet xmod"
)
_ENCODER_DECODERS = (
    "bart bert-generation bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart "
    "prophetnet trocr whisper"
)
NOT_IN_THE_ZOO = (
    UNBUILDABLE
    | dict.fromkeys(_MULTIMODAL.split(), "wraps a text decoder that has a row of its own")
    | dict.fromkeys(_ENCODERS.split(), "an encoder with a causal head as an option")
    | dict.fromkeys(_ENCODER_DECODERS.split(), "half of an encoder-decoder")
)
"""Every other model type of AutoModelForCausalLM, and why it has no row."""

_CLASSES = {"Emu3TextConfig": "Emu3ForCausalLM", "MllamaTextConfig": "MllamaForCausalLM"}
"""Where AutoModelForCausalLM does not know the config of the text decoder."""


def class_of(name: str) -> str:
    """The name of a variant's model class."""
    kind = VARIANTS[name][0]
    return _CLASSES.get(kind) or modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[getattr(transformers, kind).model_type]


def config_of(name: str) -> transformers.PreTrainedConfig:
    """The config of a variant."""
    kind, overrides = VARIANTS[name]
    cls = getattr(transformers, kind)
    known = {f.name for f in dataclasses.fields(cls)}
    return cls(**{k: v for k, v in _SIZES.items() if k in known} | overrides)


def build(name: str) -> nn.Module:
    """A tiny random model of a variant, in eval mode; the same one at each call."""
    torch.manual_seed(0)
    module = getattr(transformers, class_of(name))(config_of(name)).eval()
    randomise(module)
    return module


@functools.cache
def opened(name: str) -> sl.Model:
    """A variant, opened and proven once for all tests, which must leave it as it was."""
    return sl.load(build(name))


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Random vectors in place of ones and zeros, and matrices whose outputs are as large as their inputs."""
    generator = torch.Generator().manual_seed(1)
    linear = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() < 2 or p.unique().numel() == 1:
            p.add_(0.3 * noise * _constant(p))
        elif id(p) in linear or float(p.std()) < 0.1:
            p.copy_(noise / math.sqrt(p.shape[-1]))
    for name, b in module.named_buffers():
        if name.endswith(_LEARNED_BUFFERS):
            b.add_(0.1 * torch.randn(b.shape, generator=generator))
    head, embed = module.get_output_embeddings(), module.get_input_embeddings()
    for table in (head.weight, embed.weight):  # one and the same where they are tied
        table.copy_(0.3 * torch.randn(table.shape, generator=generator))


_LEARNED_BUFFERS = ("layer_scalar", "e_score_correction_bias", "expert_bias", "balancing_biases")


def _constant(p: torch.Tensor) -> float:
    """The size of a vector that is all one number, 1 for zeros and for all other vectors."""
    first = float(p.flatten()[0].abs())
    return first if first and p.unique().numel() == 1 else 1.0
