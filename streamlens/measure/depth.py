"""What depth is used for: how much the later layers' writes, and the predictions, change when one layer is taken away.

Position 0 is never changed nor measured. Csordas, Manning & Potts 2025, arXiv 2505.13898 (the relative change of a later
layer's write; predictions by the L2 distance of the distributions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from streamlens.errors import InputError
from streamlens.measure.metrics import Logits
from streamlens.measure.units import Variant
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import TokenBatch
from streamlens.stream.changes import Change
from streamlens.stream.replay import Replay
from streamlens.stream.run import stream_of
from streamlens.stream.unembed import Unembed

UNITS = ("block", "attn", "mlp", "mixer", "head")
SPANS = ("all", "future")
STATISTICS = ("max", "mean")
TOKENS = 512
"""Tokens a pass, over the variants that share it."""

LEAST = 1e-6
"""A write's length is taken to be at least this, as in the authors' code."""


@dataclass(frozen=True)
class DepthUse:
    """Of one batch: relative changes of writes and distances of predictions, the largest and the mean over positions."""

    prompt: Int64[np.ndarray, " prompt"]
    cut: Int64[np.ndarray, " prompt"]  # last position at which the layer was taken away; -1 for every one but the first
    write: Float64[np.ndarray, "removal layer prompt 2"]  # nan up to the removed layer
    prediction: Float64[np.ndarray, "removal prompt 2"]


def cuts(lengths: np.ndarray, span: str, where: float) -> Int64[np.ndarray, " prompt"]:
    """Where the future begins: after this position, a share `where` of the prompt in, with positions on both sides."""
    if span == "all":
        if lengths.min() < 2:
            raise InputError("prompts must have 2 tokens or more, since position 0 is never changed; got one of 1")
        return np.full(len(lengths), -1)
    if lengths.min() < 3:
        raise InputError(f'prompts must have 3 tokens or more for positions="future"; got one of {lengths.min()}')
    return np.clip((where * (lengths - 1)).astype(np.int64), 1, lengths - 2)


@torch.no_grad()
def depth_use_batch(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, taken: Sequence[Variant], cut: Int64[np.ndarray, " prompt"]
) -> DepthUse:
    """One replay a change of `taken`; `cut` holds one number a row of the batch."""
    position = torch.arange(batch.ids.shape[1])[None, :]
    ends = torch.from_numpy(np.where(cut < 0, batch.ids.shape[1], cut))[:, None]
    changed = batch.mask & (position > 0) & (position <= ends)
    read = batch.mask & (position > 0) & (position > torch.from_numpy(cut)[:, None])
    write = np.full((len(taken), anatomy.n_layers, len(batch.ids), 2), np.nan)
    hidden: list[Tensor] = []
    with _Writes(module, anatomy) as writes:
        clean = writes.record(batch.ids, batch.mask)
        for start, stop in _groups(len(taken), batch.ids.numel() if writes.enlarges else None):

            def see(number: int, layer: int, change: Tensor, start: int = start) -> None:
                write[start + number, layer] = _over_positions(change, read)

            variants = [[site.change(None, changed) for site in variant.sites] for variant in taken[start:stop]]
            hidden += [h[read] for h in writes.compared(variants, see)]
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    moved = _moved(unembed, clean[read], hidden)
    prediction = np.stack([_over_positions(_scattered(m, read), read) for m in moved])
    return DepthUse(batch.index, cut, write, prediction)


class _Writes(Replay):
    """A replay that compares each block's write with that of the clean pass."""

    def _plant(self) -> None:
        super()._plant()
        self.clean_writes: list[Tensor] = []
        self.entered: Tensor | None = None
        self.compare: Callable[[int, Tensor], None] | None = None
        for path in self.anatomy.block_paths:
            self._run.on_input(path, lambda layer, named: self._enter(stream_of((), named)))
            self._run.on_output(path, lambda layer, out, _: self._leave(layer, out))

    def compared(
        self, variants: Sequence[Sequence[Change]], see: Callable[[int, int, Tensor], None]
    ) -> Float[Tensor, "variant batch pos d_model"]:
        """The unembedding's input under each set of changes; `see` gets (variant, layer, relative change) of every later block."""
        firsts = [min(change.layer for change in made) for made in variants]

        def compare(layer: int, change: Float[Tensor, "variant batch pos"]) -> None:
            for number, (first, moved) in enumerate(zip(firsts, change, strict=True)):
                if layer > first:
                    see(number, layer, moved)

        self.compare = compare
        try:
            return self.each(variants)
        finally:
            self.compare = None

    def _enter(self, stream: Tensor) -> None:
        self.entered = stream.clone() if self.anatomy.clones else stream

    def _leave(self, layer: int, out: Tensor) -> None:
        write = out - self.entered
        if self._recording:
            self.clean_writes.append(write)
        elif self.compare is not None and layer > self._resume:
            wide = torch.promote_types(write.dtype, torch.float32)
            clean = self.clean_writes[layer].to(wide)
            moved = torch.linalg.vector_norm(write.to(wide).unflatten(0, (-1, len(clean))) - clean, dim=-1)
            self.compare(layer, moved / torch.linalg.vector_norm(clean, dim=-1).clamp_min(LEAST))


def _groups(n: int, tokens: int | None) -> Iterator[tuple[int, int]]:
    """Neighbouring changes that share a pass, so that it has as many tokens as are worth one; each by itself where that is not possible."""
    size = 1 if tokens is None else max(1, TOKENS // tokens)
    return ((start, min(start + size, n)) for start in range(0, n, size))


def _over_positions(change: Float[Tensor, "batch pos"], read: Bool[Tensor, "batch pos"]) -> Float64[np.ndarray, "batch 2"]:
    """The largest and the mean of each prompt, over the positions that are read."""
    read = read.to(change.device)
    change = change.double().where(read, 0.0)
    return torch.stack([change.amax(-1), change.sum(-1) / read.sum(-1)], dim=-1).cpu().numpy()


def _moved(unembed: Unembed, clean: Float[Tensor, "row d_model"], hidden: list[Tensor]) -> list[Float[Tensor, " row"]]:
    """||softmax - softmax'||_2 of each changed run, chunk by chunk of rows, so that the clean softmax is made once."""
    moved: list[list[Tensor]] = [[] for _ in hidden]
    for rows in unembed.chunks(len(clean)):
        base = Logits(unembed.logits(clean[rows])).probabilities
        for found, changed in zip(moved, hidden, strict=True):
            found.append(torch.linalg.vector_norm(Logits(unembed.logits(changed[rows])).probabilities - base, dim=-1))
    return [torch.cat(found) for found in moved]


def _scattered(rows: Float[Tensor, " row"], read: Bool[Tensor, "batch pos"]) -> Float[Tensor, "batch pos"]:
    out = torch.zeros(read.shape, dtype=rows.dtype, device=rows.device)
    out[read.to(rows.device)] = rows
    return out
