"""The block, once for every place that a norm can have: read the stream, add to it, attention first and then the MLP."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from streamlens.decoder.attention import Attention
from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.context import Context
from streamlens.decoder.hookable import Hookable
from streamlens.decoder.moe import make_mlp
from streamlens.decoder.norms import make_norm

Stream = Float[Tensor, "batch pos d_model"]


class Block(Hookable):
    """What all placements have: attention, perhaps an MLP, and how much of what they write is added."""

    PLACES = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.multiplier = config.residual_multiplier
        self.norm1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.mlp = make_mlp(config)
        if self.mlp is None:
            self.without_places("hook_resid_mid", "hook_mlp_out")

    def attn_out(self, out: Stream) -> Stream:
        """What attention adds."""
        return self.hook_attn_out(times(out, self.multiplier))

    def mlp_out(self, out: Stream) -> Stream:
        """What the MLP adds."""
        return self.hook_mlp_out(times(out, self.multiplier))


class PreNorm(Block):
    """x = x + attn(norm(x)); x = x + mlp(norm(x)).

    LayerNorm Scaling (Sun et al. 2025) divides what both read by the square root of the layer's number, from 1.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__(config, layer)
        self.scale = 1 / math.sqrt(layer + 1) if config.placement == "layernorm-scaling" else 1.0
        self.norm2 = make_norm(config) if self.mlp is not None else None

    def forward(self, x: Stream, context: Context) -> Stream:
        x = self.hook_resid_pre(x)
        x = x + self.attn_out(self.attn(times(self.norm1(x), self.scale), context))
        if self.mlp is not None:
            x = self.hook_resid_mid(x)
            x = x + self.mlp_out(self.mlp(times(self.norm2(x), self.scale)))
        return self.hook_resid_post(x)


class PostNorm(Block):
    """x = norm(x + attn(x)); x = norm(x + mlp(x)).

    DeepNorm (Wang et al. 2022) multiplies the stream with alpha before each addition.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__(config, layer)
        self.alpha = config.deepnorm_alpha if config.placement == "deepnorm" else 1.0
        self.norm2 = make_norm(config) if self.mlp is not None else None

    def forward(self, x: Stream, context: Context) -> Stream:
        x = self.hook_resid_pre(x)
        x = times(x, self.alpha) + self.attn_out(self.attn(x, context))
        x = self.norm1(x if self.mlp is None else self.hook_resid_mid(x))
        if self.mlp is not None:
            x = self.norm2(times(x, self.alpha) + self.mlp_out(self.mlp(x)))
        return self.hook_resid_post(x)


class Sandwich(Block):
    """x = x + norm(attn(norm(x))); x = x + norm(mlp(norm(x))): what is read and what is written are normed (Gemma 2, Peri-LN)."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__(config, layer)
        self.norm1_post = make_norm(config)
        self.norm2, self.norm2_post = (make_norm(config), make_norm(config)) if self.mlp is not None else (None, None)

    def forward(self, x: Stream, context: Context) -> Stream:
        x = self.hook_resid_pre(x)
        x = x + self.attn_out(self.norm1_post(self.attn(self.norm1(x), context)))
        if self.mlp is not None:
            x = self.hook_resid_mid(x)
            x = x + self.mlp_out(self.norm2_post(self.mlp(self.norm2(x))))
        return self.hook_resid_post(x)


class Reordered(Block):
    """x = x + norm(attn(x)); x = x + norm(mlp(x)): only what is written is normed (OLMo 2)."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__(config, layer)
        self.norm2 = make_norm(config) if self.mlp is not None else None

    def forward(self, x: Stream, context: Context) -> Stream:
        x = self.hook_resid_pre(x)
        x = x + self.attn_out(self.norm1(self.attn(x, context)))
        if self.mlp is not None:
            x = self.hook_resid_mid(x)
            x = x + self.mlp_out(self.norm2(self.mlp(x)))
        return self.hook_resid_post(x)


class Parallel(Block):
    """x = x + attn(norm(x)) + mlp(norm(x)): both read the same stream, through one norm (GPT-J) or two (GPT-NeoX)."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__(config, layer)
        self.norm2 = make_norm(config) if config.parallel_norms == 2 else None
        self.without_places("hook_resid_mid")

    def forward(self, x: Stream, context: Context) -> Stream:
        x = self.hook_resid_pre(x)
        read = self.norm1(x)
        attn_out = self.attn_out(self.attn(read, context))
        mlp_out = self.mlp_out(self.mlp(read if self.norm2 is None else self.norm2(x)))
        return self.hook_resid_post(x + attn_out + mlp_out)


PLACEMENTS = {"sandwich": Sandwich, "reordered": Reordered, "parallel": Parallel}


def make_block(config: DecoderConfig, layer: int) -> Block:
    """The block of a layer: of mix-ln (Li et al. 2024), the first are post-norm and the rest pre-norm."""
    kind = PostNorm if layer < config.n_post_norm else PLACEMENTS.get(config.placement, PreNorm)
    return kind(config, layer)


def times(x: Tensor, factor: float) -> Tensor:
    """`x * factor`, and `x` itself where that is 1."""
    return x if factor == 1.0 else x * factor
