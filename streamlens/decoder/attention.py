"""Causal attention: heads that share keys and values or not, with every choice of the config in its place.

softmax(cap(q k^T * scale) + mask) v, head by head, then the output projection of the concatenated heads. Attention runs in
one fused call; it is written out where a softcap or a sink needs it, or where somebody looks at scores or patterns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.context import Context, added_to_scores
from streamlens.decoder.hookable import Hookable, passed
from streamlens.decoder.norms import make_norm
from streamlens.decoder.rope import rotate


class Attention(Hookable):
    """One layer's attention. `attend(function, module, q, k, v, mask)`, where set, is called in the function's place."""

    PLACES = ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k", "hook_attn_scores", "hook_pattern", "hook_z")

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        c, self.config, self.layer = config, config, layer
        self.window = c.window_of(layer)
        self.attend = None
        width, kv_width = c.n_heads * c.head_width, c.kv_heads * c.head_width
        self.q_proj = nn.Linear(c.d_model, width, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.d_model, kv_width, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.d_model, kv_width, bias=c.qkv_bias)
        self.o_proj = nn.Linear(width, c.d_model, bias=c.output_bias)
        if c.qk_norm != "none":
            self.q_norm = make_norm(c, c.head_width if c.qk_norm == "head" else width)
            self.k_norm = make_norm(c, c.head_width if c.qk_norm == "head" else kv_width)
        if c.positions != "rope":
            self.without_places("hook_rot_q", "hook_rot_k")
        self.sinks = nn.Parameter(torch.empty(c.n_heads)) if c.sink else None

    def forward(self, x: Float[Tensor, "batch pos d_model"], context: Context) -> Float[Tensor, "batch pos d_model"]:
        q, k, v = self._projected(x)
        q, k, v = self._placed(q, k, v, context)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        z = self._written_out(q, k, v, context) if self._is_watched else self._fused(q, k, v, context)
        return self.o_proj(self.hook_z(z).flatten(-2))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[batch, pos, head, d_head]`, normed where the config says so."""
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if self.config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.config.qk_norm == "width":
            q, k = self._heads(self.q_norm(q.flatten(-2))), self._heads(self.k_norm(k.flatten(-2)))
        return q, k, v

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_width))

    def _placed(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys turned by their positions, and the keys and values of earlier tokens before the new ones."""
        if context.turns is not None:
            pairs = self.config.rope_pairs
            q, k = self.hook_rot_q(rotate(q, context.turns, pairs)), self.hook_rot_k(rotate(k, context.turns, pairs))
        if context.cache is not None:
            k, v = context.cache.layers[self.layer].append(k, v)
        return q, k, v

    @property
    def _is_watched(self) -> bool:
        looked_at = self.attend is not None or self.hook_attn_scores is not passed or self.hook_pattern is not passed
        return looked_at or self.sinks is not None or self.config.attention_softcap is not None

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Float[Tensor, "batch pos head d_head"]:
        mask, grouped = context.masks[self.window], self.config.kv_heads != self.config.n_heads
        causal = mask is None and context.causal
        z = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=self.config.scale, enable_gqa=grouped)
        return z.transpose(1, 2)

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Float[Tensor, "batch pos head d_head"]:
        mask = context.masks[self.window]
        mask = added_to_scores(context.start, context.end, self.window, context.slopes, q) if mask is None else mask
        if self.attend is None:
            return eager_attention_forward(self, q, k, v, mask)[0]
        return self.attend(eager_attention_forward, self, q, k, v, mask)[0]


def eager_attention_forward(
    module: Attention,
    query: Float[Tensor, "batch head pos d_head"],
    key: Float[Tensor, "batch kv_head source d_head"],
    value: Float[Tensor, "batch kv_head source d_head"],
    attention_mask: Float[Tensor, "*head pos source"],
) -> tuple[Float[Tensor, "batch pos head d_head"], Float[Tensor, "batch head pos source"]]:
    """Attention in the open: its output and its pattern. The name is the one that transformers' families give theirs."""
    c, group = module.config, module.config.n_heads // module.config.kv_heads
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * c.scale
    if c.attention_softcap is not None:
        scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
    scores = module.hook_attn_scores(scores + attention_mask)
    pattern = module.hook_pattern(_softmax(scores, module.sinks).to(value.dtype))
    return (pattern @ value.repeat_interleave(group, 1)).transpose(1, 2), pattern


def _softmax(
    scores: Float[Tensor, "batch head pos source"], sinks: Float[Tensor, " head"] | None
) -> Float[Tensor, "batch head pos source"]:
    """In float32 at least. A sink takes its share of every row, and the row sums to less than 1."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=wide)
    last = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, last.to(scores)), dim=-1).softmax(-1, dtype=wide)[..., :-1]
