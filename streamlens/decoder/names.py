"""The facts of a decoder's config by the names that transformers' configs have, for what reads those."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TransformersNames:
    """A read-only view; None where the decoder has nothing of the kind."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int | None
    max_position_embeddings: int
    alibi: bool
    rope_parameters: dict | None
    sliding_window: int | None
    layer_types: tuple[str, ...] | None
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    logit_scale: float
    num_experts_per_tok: int | None
    model_type: str = "streamlens-decoder"

    @classmethod
    def of(cls, c) -> TransformersNames:
        windows = [c.window_of(layer) for layer in range(c.n_layers)]
        rope = {"rope_type": "default" if c.rope_scaling == "none" else c.rope_scaling, "rope_theta": c.rope_base, "factor": c.rope_factor}
        rope["partial_rotary_factor"] = c.rotary_width / c.head_width
        return cls(
            vocab_size=c.n_vocab,
            hidden_size=c.d_model,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_width,
            intermediate_size=None if c.mlp == "none" else c.mlp_width,
            max_position_embeddings=c.max_length,
            alibi=c.positions == "alibi",
            rope_parameters=rope if c.positions == "rope" else None,
            sliding_window=c.window,
            layer_types=tuple("full_attention" if w is None else "sliding_attention" for w in windows),
            attn_logit_softcapping=c.attention_softcap,
            final_logit_softcapping=c.logit_softcap,
            logit_scale=c.logit_scale,
            num_experts_per_tok=c.n_experts_active if c.n_experts else None,
        )

    def to_dict(self) -> dict:
        return asdict(self)
