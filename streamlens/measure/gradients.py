"""How the loss's gradient flows back through the stream: its norm where the stream enters each block, by one backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.measure import metrics
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import TokenBatch
from streamlens.stream.run import Run, stream_of
from streamlens.stream.unembed import Unembed


@dataclass(frozen=True)
class Gradients:
    """Norms of one batch at every position, padding included (where they are 0), by layer; the last is the stream after the last block."""

    value: Float64[np.ndarray, "layer batch pos"]
    loss: Float64[np.ndarray, " batch"]  # mean over each prompt's next tokens, in nats


def gradients_batch(module: nn.Module, anatomy: Anatomy, batch: TokenBatch) -> Gradients:
    """||d loss / d stream||_2, where each prompt's loss is the mean of -log p of its own next tokens."""
    norms = np.zeros((anatomy.n_layers + 1, *batch.ids.shape))

    def watch(layer: int, stream: Tensor) -> None:
        if not stream.requires_grad:
            raise UnsupportedModelError(f"{type(module).__name__}: the stream into layer {layer} has no gradient")
        stream.register_hook(lambda g: norms.__setitem__(layer, _norm(g)))

    with Run.of(module, anatomy) as run, torch.inference_mode(False), torch.enable_grad():
        # A family may scale what it has embedded in place, which a leaf does not allow.
        run.on_output(anatomy.embed, lambda _, out, x: out.detach().requires_grad_().clone())
        for path in anatomy.block_paths:
            run.on_input(path, lambda layer, named: watch(layer, stream_of((), named)))
        run.on_output(anatomy.layers[-1].path, lambda layer, out, _: watch(layer + 1, out) if layer == anatomy.n_layers - 1 else None)
        hidden = run.hidden(batch.ids, batch.mask)
        loss, g = _loss(Unembed(module.get_submodule(anatomy.unembed), anatomy.logits), hidden, batch)
        torch.autograd.backward(hidden, g)
    return Gradients(norms, loss)


def _norm(g: Tensor) -> Float64[np.ndarray, "batch pos"]:
    return torch.linalg.vector_norm(g.to(torch.promote_types(g.dtype, torch.float32)), dim=-1).double().cpu().numpy()


def _loss(
    unembed: Unembed, hidden: Float[Tensor, "batch pos d_model"], batch: TokenBatch
) -> tuple[Float64[np.ndarray, " batch"], Float[Tensor, "batch pos d_model"]]:
    """Each prompt's loss, and the gradient of their sum at the unembedding's input: logits are made a chunk of rows at a time."""
    there = batch.mask[:, 1:].to(hidden.device)
    weight = (1.0 / there.sum(-1)).repeat_interleave(there.sum(-1))
    row, following = there.nonzero()[:, 0], batch.ids[:, 1:].to(hidden.device)[there]
    flat = hidden.detach()[:, :-1][there]
    g, loss = torch.zeros_like(hidden), torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
    g_rows = torch.empty_like(flat)
    for chunk in unembed.chunks(len(flat)):
        x = flat[chunk].requires_grad_()
        logits = unembed.logits(x)
        losses = metrics.loss(logits, logits.logsumexp(-1), following[chunk])
        (g_rows[chunk],) = torch.autograd.grad((losses * weight[chunk]).sum(), x)
        loss.index_add_(0, row[chunk], (losses * weight[chunk]).detach().double())
    g[:, :-1][there] = g_rows
    return loss.cpu().numpy(), g
