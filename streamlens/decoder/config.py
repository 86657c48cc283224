"""Every choice of a decoder as one field: what each may be, and which do not go together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from streamlens.decoder.combinations import refuse_impossible
from streamlens.decoder.names import TransformersNames
from streamlens.decoder.settle import settle
from streamlens.errors import InputError, choice

LEGAL = {
    "positions": ("rope", "learned", "sinusoidal", "alibi", "none"),
    "rope_pairs": ("half", "interleaved"),
    "rope_scaling": ("none", "linear", "ntk", "dynamic", "yarn", "llama3"),
    "norm": ("rmsnorm", "layernorm"),
    "placement": ("pre", "post", "deepnorm", "sandwich", "reordered", "parallel", "mix-ln", "layernorm-scaling"),
    "qk_norm": ("none", "head", "width"),
    "mlp": ("swiglu", "geglu", "gelu", "relu", "none"),
    "gelu": ("exact", "tanh"),
    "init": ("plain", "gpt2", "deepnorm", "xavier", "mup"),
}
"""The fields that are a word, and the words."""


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder. The defaults are today's: pre-norm RMSNorm, rotary positions, SwiGLU, no biases.

    Raises :class:`InputError` for a value that is not legal, and for two that do not go together, naming both.
    """

    n_vocab: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None  # None: as many as heads; fewer are shared (GQA), 1 is MQA
    d_head: int | None = None  # None: d_model / n_heads
    max_length: int = 2048  # tokens; the rows of learned positions, and the length that rope was trained on

    positions: str = "rope"
    rope_pairs: str = "half"  # which coordinates turn together: (i, i + r/2), or (2i, 2i + 1)
    rope_base: float = 10000.0
    rotary_dims: int | None = None  # r, the first coordinates of a head that turn; None: all
    rope_scaling: str = "none"
    rope_factor: float = 1.0  # how many times longer than trained
    rope_original_length: int | None = None  # the length trained on (dynamic, yarn, llama3); None: max_length
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    rope_attention_factor: float | None = None  # None: yarn's own, else 1
    llama3_low_freq_factor: float = 1.0
    llama3_high_freq_factor: float = 4.0

    norm: str = "rmsnorm"
    norm_parameters: bool = True  # a learned gain
    norm_bias: bool = False
    norm_eps: float = 1e-5
    placement: str = "pre"
    mix_share: float = 0.25  # mix-ln: the share of the blocks that are post-norm, the first ones
    parallel_norms: int = 1  # parallel: one norm for both sublayers (GPT-J), or two (GPT-NeoX)
    final_norm: bool | None = None  # None: yes, unless the last block ends with a norm on the stream
    embed_norm: bool = False  # a norm on the embedding (BLOOM)

    qk_norm: str = "none"
    attention_softcap: float | None = None
    attention_scale: float | None = None  # None: 1 / sqrt(d_head)
    window: int | None = None  # tokens that a query sees, itself included
    window_layers: tuple[int, ...] | None = None  # None: all layers
    sink: bool = False  # a learned logit a head that takes attention away from every token
    qkv_bias: bool = False
    output_bias: bool = False

    mlp: str = "swiglu"
    gelu: str = "exact"
    d_mlp: int | None = None  # None: 4 d_model, or 8/3 d_model of a gated one, rounded up to d_mlp_multiple
    d_mlp_multiple: int = 32
    mlp_bias: bool = False
    n_experts: int = 0  # routed experts, each of width d_mlp; 0: one dense MLP
    n_experts_active: int = 2
    n_shared_experts: int = 0
    expert_weights_sum_to_one: bool = True  # the chosen experts' weights, renormalised after the softmax over all
    aux_loss: float = 0.01  # weight of the load-balancing loss in training

    tied: bool = False
    unembed_bias: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    embed_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what each sublayer adds

    init: str = "plain"
    init_std: float = 0.02
    mup_base_width: int = 64  # the width at which muP is the plain initialisation

    def __post_init__(self) -> None:
        for name, legal in LEGAL.items():
            choice(name, getattr(self, name), legal)
        refuse_impossible(self)

    # -- what follows from the fields ------------------------------------------------------------------------------
    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def rotary_width(self) -> int:
        return self.head_width if self.rotary_dims is None else self.rotary_dims

    @property
    def original_length(self) -> int:
        return self.max_length if self.rope_original_length is None else self.rope_original_length

    @property
    def mlp_width(self) -> int:
        if self.d_mlp is not None:
            return self.d_mlp
        wide = 8 * self.d_model / 3 if self.gated else 4 * self.d_model
        return math.ceil(wide / self.d_mlp_multiple) * self.d_mlp_multiple

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")

    @property
    def has_final_norm(self) -> bool:
        return self.placement not in ("post", "deepnorm") if self.final_norm is None else self.final_norm

    @property
    def scale(self) -> float:
        """What a query's products with keys are multiplied with."""
        return self.head_width**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def n_post_norm(self) -> int:
        """The first blocks that are post-norm."""
        n = {"post": 1.0, "deepnorm": 1.0, "mix-ln": self.mix_share}.get(self.placement, 0.0)
        return math.floor(n * self.n_layers)

    @property
    def deepnorm_alpha(self) -> float:
        """What DeepNorm multiplies the stream with (Wang et al. 2022, decoder-only)."""
        return (2 * self.n_layers) ** 0.25

    @property
    def deepnorm_beta(self) -> float:
        """The gain of DeepNorm's initialisation."""
        return (8 * self.n_layers) ** -0.25

    def window_of(self, layer: int) -> int | None:
        """The window of a layer, None where it sees everything before it."""
        return self.window if self.window_layers is None or layer in self.window_layers else None

    def keeping(self, layers: Sequence[int]) -> DecoderConfig:
        """The config of these layers alone, in this order; what depends on their number (DeepNorm's alpha) follows the new one."""
        changes: dict = {"n_layers": len(layers)}
        windowed = tuple(i for i, layer in enumerate(layers) if self.window_of(layer) is not None)
        if self.window_layers is not None:
            changes |= {"window_layers": windowed or None, "window": self.window if windowed else None}
        if self.placement == "mix-ln":
            n_post = sum(layer < self.n_post_norm for layer in layers)
            kind = "pre" if n_post == 0 else "post" if n_post == len(layers) else "mix-ln"
            changes |= {"placement": kind, "mix_share": (n_post + 0.5) / len(layers), "final_norm": self.has_final_norm}
        return replace(self, **changes)

    def settled(self) -> DecoderConfig:
        """The same model with every None that has a value filled in, and fields without effect at their defaults: equal if alike."""
        return settle(self)

    # -- other shapes of it ----------------------------------------------------------------------------------------
    def to_dict(self) -> dict:
        """Plain values by field, for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict) -> DecoderConfig:
        """The config of :meth:`to_dict`. Raises :class:`InputError` that names an unknown or a missing field."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(values.keys() - set(known))
        if unknown:
            raise InputError(f"config must hold fields of DecoderConfig only; got {unknown[0]!r}")
        missing = [name for name in known[:4] if name not in values]
        if missing:
            raise InputError(f"config must hold {', '.join(known[:4])}; {missing[0]} is missing")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    def get_text_config(self) -> TransformersNames:
        """The same facts by transformers' names, for what reads those."""
        return TransformersNames.of(self)
