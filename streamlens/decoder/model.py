"""`sl.Decoder`: token embedding, blocks, final norm, unembedding."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.decoder.block import make_block, times
from streamlens.decoder.cache import Cache
from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.context import Context, added_to_scores, needs_no_mask
from streamlens.decoder.generate import generate
from streamlens.decoder.hookable import Hookable
from streamlens.decoder.init import initialise
from streamlens.decoder.norms import make_norm
from streamlens.decoder.positions import alibi_slopes, make_pos_embed
from streamlens.decoder.rope import Rotary
from streamlens.errors import InputError


@dataclass(frozen=True)
class Output:
    """What a forward pass gives: logits, the cache, and in training the layers' mean load-balancing loss, not weighed yet."""

    logits: Float[Tensor, "batch pos vocab"]
    cache: Cache | None = None
    aux_loss: Float[Tensor, ""] | None = None


class Decoder(Hookable):
    """A decoder-only transformer of one :class:`DecoderConfig`, its weights drawn with `seed` (None: left unset, to be loaded).

    `sl.load` takes it as it takes a transformers model. Its places carry TransformerLens' names (:meth:`hooked`).
    """

    PLACES = ("hook_embed", "hook_pos_embed")

    def __init__(self, config: DecoderConfig, seed: int | None = 0):
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # nothing is drawn twice, nor from the user's own generator
            # Not Embedding(...) here, nor to_empty below: on this device they import torch's compiler, which takes a second.
            self.embed = nn.Embedding.from_pretrained(torch.empty(config.n_vocab, config.d_model), freeze=False)
            self.pos_embed = make_pos_embed(config)
            self.embed_norm = make_norm(config) if config.embed_norm else None
            self.rotary = Rotary(config) if config.positions == "rope" else None
            self.blocks = nn.ModuleList(make_block(config, layer) for layer in range(config.n_layers))
            self.final_norm = make_norm(config) if config.has_final_norm else None
            self.unembed = nn.Linear(config.d_model, config.n_vocab, bias=config.unembed_bias)
        self._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=device))
        if self.pos_embed is None:
            self.without_places("hook_pos_embed")
        self.tie()
        if seed is not None and not self.embed.weight.is_meta:
            initialise(self, seed)

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        cache: Cache | None = None,
    ) -> Output:
        """Logits of every token, given those before it in `input_ids` and in `cache`.

        Padding may stand on the right only, where no real token sees it. `use_cache` starts a cache where none is given.
        Raises :class:`InputError` for padding elsewhere, and for more tokens than learned positions have rows.
        """
        _check_padding(attention_mask, cache)
        if use_cache and cache is None:
            cache = self.new_cache()
        n_new = input_ids.shape[1]
        if cache is not None and self.config.rope_scaling == "dynamic":
            input_ids = cache.growing(input_ids, self.config.original_length)
        start = 0 if cache is None else cache.length
        end = start + input_ids.shape[1]
        context = self._context(start, end, cache)
        x = self._embedded(input_ids, start, end)
        for block in self.blocks:
            x = block(x, context)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if cache is not None:
            cache.length = end
        return Output(self._logits(x[:, -n_new:]), cache, self._aux_loss() if self.training and self.config.n_experts else None)

    def _embedded(self, ids: Tensor, start: int, end: int) -> Float[Tensor, "batch pos d_model"]:
        x = times(self.hook_embed(self.embed(ids)), self.config.embed_multiplier)
        if self.pos_embed is not None:
            x = x + self.hook_pos_embed(self.pos_embed(start, end, x).expand_as(x))
        return x if self.embed_norm is None else self.embed_norm(x)

    def _logits(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        logits = times(self.unembed(x), self.config.logit_scale)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _context(self, start: int, end: int, cache: Cache | None) -> Context:
        c, like = self.config, self.embed.weight
        slopes = alibi_slopes(c.n_heads) if c.positions == "alibi" else None
        masks = {
            window: None if slopes is None and needs_no_mask(start, end, window) else added_to_scores(start, end, window, slopes, like)
            for window in {block.attn.window for block in self.blocks}
        }
        turns = None if self.rotary is None else self.rotary(start, end, like.dtype, like.device)
        return Context(start, end, masks, turns, slopes, cache)

    def _aux_loss(self) -> Tensor:
        return torch.stack([block.mlp.take_aux_loss() for block in self.blocks]).mean()

    def new_cache(self) -> Cache:
        """An empty cache of keys and values."""
        return Cache([block.attn.window for block in self.blocks])

    def tie(self) -> Decoder:
        """The embedding's weight as the unembedding's where the config says so; for who puts new weights in."""
        if self.config.tied:
            self.unembed.weight = self.embed.weight
        return self

    def generate(self, input_ids: Int[Tensor, "batch pos"], n_tokens: int, **options) -> Int[Tensor, "batch pos_out"]:
        """Up to `n_tokens` more tokens; options as in :func:`streamlens.decoder.generate.generate`."""
        return generate(self, input_ids, n_tokens, **options)

    def save(self, folder: str | os.PathLike, tokenizer=None) -> Path:
        """Write config, weights and tokenizer to a folder that `sl.load` opens."""
        from streamlens.decoder.folder import save_decoder

        return save_decoder(self, folder, tokenizer)

    def hooked(self):
        """This decoder as TransformerLens' `HookedRootModule`, on the same weights: `run_with_cache`, `run_with_hooks`."""
        from streamlens.decoder.hooks import HookedDecoder

        return HookedDecoder(self)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def get_output_embeddings(self) -> nn.Linear:
        return self.unembed


def _check_padding(mask: Tensor | None, cache: Cache | None) -> None:
    if mask is None:
        return
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()) or not bool(mask[:, 0].all()):
        raise InputError("attention_mask must be ones followed by zeros: padding stands on the right")
    if cache is not None and not bool(mask.all()):
        raise InputError("attention_mask must be all ones with a cache: padding would be cached")
