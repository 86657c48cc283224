"""The unembedding, read row by row: logits for the tokens that somebody asked for, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.models.anatomy import LogitMap
from streamlens.models.logits import apply_map, capped
from streamlens.models.structure import bias_of
from streamlens.prompts import MEAN, NONE

CHUNK_ELEMENTS = 2**23
"""Logits made at once where all of the vocabulary is needed: 32 MiB in float32."""

CHUNK_ROWS = 64
"""Rows made at once at least: for fewer, a large vocabulary's weights are read as long as they are multiplied."""

PLAIN_TIMES = 6
"""So many chunks at once, 192 MiB, where nothing is made beside a product: it packs the weights anew, and 1024 rows take a sixth less."""

SUMMED = 1024
"""Tokens of a vocabulary that are summed at once: over fifty thousand, float32 would be off by 1e-4."""

_BLOCK = 64  # neighbouring logits whose maximum stands for them all while the largest are looked for


@dataclass(frozen=True)
class Unembed:
    """A model's unembedding with its logit map; sums in float32, in float64 for a float64 model."""

    module: nn.Module
    logit_map: LogitMap

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.module.weight.dtype, torch.float32)

    @property
    def n_vocab(self) -> int:
        return self.module.weight.shape[0]

    def at(self, hidden: Float[Tensor, "row d_model"], target: Int[Tensor, " row"]) -> Unembed | Tangent:
        """What reads these rows at these targets; a logit is read in the same way everywhere."""
        return self

    def direction(self, target: Int[Tensor, " row"], versus: Int[Tensor, " row"]) -> Float[Tensor, "row d_model"]:
        """What a stream entering the unembedding is multiplied with: W_U[target] - W_U[versus], times the multiplier."""
        rows = self._rows(self.module.weight, target)
        minus = self._rows(self.module.weight, versus.clamp_min(0))
        minus = torch.where((versus == NONE)[:, None], torch.zeros_like(minus), minus)
        if bool((versus == MEAN).any()):
            minus = torch.where((versus == MEAN)[:, None], self.module.weight.mean(0, dtype=self.wide), minus)
        return (rows - minus) * self.logit_map.multiplier

    def bias(self, target: Int[Tensor, " row"], versus: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """The unembedding bias's share of each logit or logit difference."""
        bias = bias_of(self.module)
        if bias is None:
            return torch.zeros(len(target), dtype=self.wide, device=target.device)
        minus = torch.where(versus == NONE, torch.zeros((), dtype=self.wide, device=bias.device), self._rows(bias, versus.clamp_min(0)))
        minus = torch.where(versus == MEAN, bias.to(self.wide).mean(), minus)
        return (self._rows(bias, target) - minus) * self.logit_map.multiplier

    def logit(self, hidden: Float[Tensor, "row d_model"], token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """One logit a row before the cap, from the unembedding's own row."""
        none = torch.full_like(token, NONE)
        return (hidden.to(self.wide) * self.direction(token, none)).sum(-1) + self.bias(token, none)

    def softcap(
        self, hidden: Float[Tensor, "row d_model"], target: Int[Tensor, " row"], versus: Int[Tensor, " row"]
    ) -> Float[Tensor, " row"]:
        """What the cap adds to each logit or logit difference: [cap(z_t) - cap(z_v)] - [z_t - z_v]."""
        cap = self.logit_map.cap
        if cap is None:
            return torch.zeros(len(target), dtype=self.wide, device=hidden.device)
        z_t, z_v = self.logit(hidden, target), self.logit(hidden, versus.clamp_min(0))
        bend_v = torch.where(versus == NONE, torch.zeros_like(z_v), capped(z_v, cap) - z_v)
        mean = versus == MEAN
        if bool(mean.any()):
            bend_v[mean] = self._mean_bend(hidden[mean], cap)
        return capped(z_t, cap) - z_t - bend_v

    def _mean_bend(self, hidden: Float[Tensor, "row d_model"], cap: float) -> Float[Tensor, " row"]:
        """What the cap adds to the mean over the vocabulary."""
        means = []
        for rows in self.chunks(len(hidden)):
            z = self.module(hidden[rows].to(self.module.weight.dtype)).to(self.wide) * self.logit_map.multiplier
            means.append((capped(z, cap) - z).mean(-1))
        return torch.cat(means)

    def logits(self, hidden: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        """All printed logits of the given rows."""
        return apply_map(self.module(hidden).to(self.wide), self.logit_map)

    def moved(self, change: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        """What a change of the unembedding's input does to every logit before the cap, less the mean over the vocabulary."""
        moved = nn.functional.linear(change.to(self.module.weight.dtype), self.module.weight).to(self.wide) * self.logit_map.multiplier
        return moved - moved.mean(-1, keepdim=True)

    @torch.no_grad()
    def each_logits(self, hidden: Float[Tensor, "row d_model"]) -> Iterator[tuple[slice, Float[Tensor, "chunk vocab"]]]:
        """All printed logits, a chunk of rows at a time; they are written over the ones before them where that is possible."""
        if not self._is_plain:
            yield from ((rows, self.logits(hidden[rows])) for rows in self.chunks(len(hidden), times=2))
            return
        table, bias, buffer = self.module.weight.T, self.module.bias, None
        for rows in self.chunks(len(hidden), times=PLAIN_TIMES if self.logit_map == LogitMap() else 2):
            # A fresh allocation of this size costs a sixth of the product that fills it.
            buffer = hidden.new_empty(rows.stop - rows.start, self.n_vocab) if buffer is None else buffer
            out = buffer[: rows.stop - rows.start]
            torch.mm(hidden[rows], table, out=out) if bias is None else torch.addmm(bias, hidden[rows], table, out=out)
            yield rows, apply_map(out, self.logit_map)

    @property
    def _is_plain(self) -> bool:
        """Whether the unembedding is its weights and nothing else: no adapter, no hook, no other dtype than that of the sums."""
        touched = self.module._forward_hooks or self.module._forward_pre_hooks or "forward" in vars(self.module)
        return type(self.module) is nn.Linear and not touched and self.module.weight.dtype == self.wide

    def chunks(self, n_rows: int, times: int = 1) -> Iterator[slice]:
        """Slices of rows whose full logits are at most so many times :data:`CHUNK_ELEMENTS`, or of once or twice :data:`CHUNK_ROWS`."""
        size = max(min(times, 2) * CHUNK_ROWS, times * CHUNK_ELEMENTS // self.n_vocab)
        return (slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size))

    @torch.no_grad()
    def top(self, hidden: Float[Tensor, "row d_model"], k: int = 1) -> Int[Tensor, "row k"]:
        """The `k` likeliest tokens of each row, the likeliest first."""
        return torch.cat([largest(logits, k)[1] for _, logits in self.each_logits(hidden)])

    def _rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return table[ids.to(table.device)].to(self.wide)


@dataclass(frozen=True)
class Tangent:
    """How some rows are read, each at its own target."""

    read: Float[Tensor, "row d_model"]
    constant: Float[Tensor, " row"]
    bend: Float[Tensor, " row"]
    entropy: Float[Tensor, " row"]  # nats

    def direction(self, target: Int[Tensor, " row"], versus: Int[Tensor, " row"]) -> Float[Tensor, "row d_model"]:
        return self.read

    def bias(self, target: Int[Tensor, " row"], versus: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        return self.constant

    def softcap(
        self, hidden: Float[Tensor, "row d_model"], target: Int[Tensor, " row"], versus: Int[Tensor, " row"]
    ) -> Float[Tensor, " row"]:
        return self.bend


@dataclass(frozen=True)
class LogProbability(Unembed):
    """Log-probabilities with softmax and cap linearised where the clean run stands: the target's logit less the mean logit under p.

    Their direction is the gradient of log p(target); what they read of a row is log p(target) plus the entropy of p, in nats.
    """

    @torch.no_grad()
    def at(self, hidden: Float[Tensor, "row d_model"], target: Int[Tensor, " row"]) -> Tangent:
        parts = [self._tangent(hidden[rows], target[rows]) for rows in self.chunks(len(hidden))]
        return Tangent(*map(torch.cat, zip(*parts, strict=True)))

    def _tangent(self, hidden: Float[Tensor, "row d_model"], target: Int[Tensor, " row"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight, bias, cap = self.module.weight, bias_of(self.module), self.logit_map.cap
        straight = self.module(hidden.to(weight.dtype)).to(self.wide) * self.logit_map.multiplier
        logits = straight if cap is None else capped(straight, cap)
        log_p = log_probabilities(logits)
        p, row = log_p.exp(), torch.arange(len(hidden), device=hidden.device)
        entropy, expected = -(p * log_p).sum(-1), (p * logits).sum(-1)
        # How much of each token's row is read: the target's own less all of them as they are expected. What the target gets is what the
        # others have, summed: 1 - p would be rounding where it is likely.
        others = p.scatter_(-1, target[:, None], 0)
        pull = others.neg()
        pull[row, target] = others.sum(-1)
        if cap is not None:
            pull *= 1 - (logits / cap).square()
        read = _product(pull, weight) * self.logit_map.multiplier
        constant = torch.zeros_like(p[:, 0]) if bias is None else (pull * bias.to(self.wide)).sum(-1) * self.logit_map.multiplier
        bend = torch.zeros_like(entropy) if cap is None else logits[row, target] - expected - (pull * straight).sum(-1)
        return read, constant, bend, entropy


def log_probabilities(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:
    """As log_softmax, whose own float32 sum over a vocabulary of fifty thousand is off by 3e-5."""
    return logits - logits.logsumexp(-1, keepdim=True)


SCALES = {"logit": Unembed, "logprob": LogProbability}


def _product(rows: Float[Tensor, "row vocab"], weight: Float[Tensor, "vocab d_model"]) -> Float[Tensor, "row d_model"]:
    """rows @ weight in the dtype of the rows: by blocks, since one sum over a vocabulary rounds too much, and of a narrower weight no
    more than a block is ever in that dtype."""
    size = max(1, min(SUMMED, CHUNK_ELEMENTS // weight.shape[1]))
    return sum(part @ block.to(rows.dtype) for part, block in zip(rows.split(size, 1), weight.split(size), strict=True))


def largest(logits: Float[Tensor, "row vocab"], k: int) -> tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]:
    """The `k` largest of each row and their ids, the largest first, of equal ones the lower id first."""
    if k == 1:
        return logits.max(-1, keepdim=True)
    n_vocab = logits.shape[-1]
    n_blocks = n_vocab // _BLOCK
    if n_blocks < 4 * k:
        values, ids = logits.topk(k)
    else:  # a block without one of the k largest maxima holds none of the k largest: most of the row is read only once
        blocks = logits[:, : n_blocks * _BLOCK].unflatten(-1, (n_blocks, _BLOCK))
        chosen = blocks.amax(-1).topk(k)[1]
        rest = torch.arange(n_blocks * _BLOCK, n_vocab, device=logits.device).expand(len(logits), -1)
        inside = (chosen[..., None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
        candidates = torch.cat([inside, rest], dim=-1)
        values, index = logits.gather(-1, candidates).topk(k)
        ids = candidates.gather(-1, index)
    order = ids.argsort(dim=-1)
    order = order.gather(-1, values.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    return values.gather(-1, order), ids.gather(-1, order)
