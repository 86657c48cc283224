"""A write beside the stream that it is added to: how large it is, and how much of it points along the stream.

Three numbers say it all: the write's length, the stream's, and their inner product. A head's come without making its write:
its length by the Gram matrix of its rows of the output projection, its inner product by pulling the stream back through them.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from streamlens.measure import vectors
from streamlens.models.anatomy import Write
from streamlens.models.norms import NormForm
from streamlens.stream.neurons import pulled_through

MEASURES = ("relative", "cosine", "along", "across")
"""Length over the stream's; cosine to the stream; the signed length along the stream; the length across it."""


def measured(
    length: Float64[np.ndarray, "*row"], stream: Float64[np.ndarray, "*#row"], inner: Float64[np.ndarray, "*row"]
) -> dict[str, Float64[np.ndarray, "*row"]]:
    """Every measure from the write's length, the stream's and their inner product; 0 where a length is 0."""
    tiny = np.finfo(np.float64).tiny
    stream = np.maximum(stream, tiny)
    along = inner / stream
    cosine = np.clip(along / np.maximum(length, tiny), -1, 1)
    across = length * np.sqrt((1 - cosine) * (1 + cosine))
    return {"relative": length / stream, "cosine": cosine, "along": along, "across": across}


class Heads:
    """Lengths and inner products of heads' writes; keeps each layer's Gram matrices, `[head, d_head, d_head]`, from batch to batch."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._grams: dict[tuple[str, NormForm | None], Tensor] = {}

    def length(
        self, z: Float[Tensor, "row z"], write: Write, form: NormForm | None, scale: Float64[np.ndarray, "row 1"] | float
    ) -> Float64[np.ndarray, "row head"]:
        """sqrt(z_h G_h z_h), times the scale of the branch norm that the write goes through."""
        by_head = z.unflatten(-1, (write.n_heads, -1)).transpose(0, 1)
        square = vectors.inner(torch.bmm(by_head, self._gram(write, form).to(z)), by_head)
        return np.sqrt(np.maximum(square, 0)).T * scale

    def inner(self, z: Float[Tensor, "row z"], write: Write, direction: Float[Tensor, "row d_model"]) -> Float64[np.ndarray, "row head"]:
        """<head's write before its branch norm, direction>."""
        pulled = pulled_through(self.module.get_submodule(write.leaf), direction, z)
        return vectors.inner(*(each.unflatten(-1, (write.n_heads, -1)) for each in (pulled, z)))

    def _gram(self, write: Write, form: NormForm | None) -> Tensor:
        key = (write.leaf, id(form))
        if key not in self._grams:
            rows = columns_of(self.module.get_submodule(write.leaf), write.n_heads * write.d_head)
            if form is not None:
                rows = rows - rows.mean(-1, keepdim=True) if form.centred else rows
                rows = rows if form.gain is None else rows * form.gain
            by_head = rows.unflatten(0, (write.n_heads, -1))
            self._grams[key] = by_head @ by_head.mT
        return self._grams[key]


def columns_of(linear: nn.Module, width: int) -> Float[Tensor, "z d_model"]:
    """What each coordinate of a linear map's input adds to its output; packed and adapted maps are asked by calling them."""
    if type(linear) is nn.Linear:
        rows = linear.weight.T
    elif type(linear).__name__ == "Conv1D":
        rows = linear.weight
    else:
        like = next(p for p in linear.parameters() if p.is_floating_point())
        none = torch.zeros(1, width, dtype=like.dtype, device=like.device)
        rows = linear.forward(torch.eye(width, dtype=like.dtype, device=like.device)) - linear.forward(none)
    return rows.detach().to(torch.promote_types(rows.dtype, torch.float32))
