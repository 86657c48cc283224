"""Streams of several vectors a token (AltUp, hyper-connections): what is left of an anatomy where only whole blocks can be told apart.

The vectors of a token are mixed by coefficients that the data make, so no sublayer's write has a place of its own. A block still has an
input and an output; which of their axes are batch and position is seen on batches of other shapes, and assumed of none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from streamlens.models import structure as tree
from streamlens.models.anatomy import Anatomy, Layer
from streamlens.models.norms import NormForm
from streamlens.models.structure import Structure
from streamlens.stream.run import Run, stream_of


def anatomy_of_blocks(
    module: nn.Module, found: Structure, applied: Sequence[str], norms: Mapping[str, NormForm], ids: Tensor
) -> Anatomy | None:
    """The anatomy of a model whose blocks, as `applied` one after the other, hand on several vectors a token; None where they do not."""
    seen = [_shape(module, found, x) for x in (ids, torch.cat([ids, ids[:1]]), ids[:, :-1])]
    if None in seen or len({len(shape) for shape in seen}) != 1:
        return None
    shape, larger, shorter = seen
    batch, pos = _grown(shape, larger, ids.shape[0], 1), _grown(shape, shorter, ids.shape[1], -1)
    if batch is None or pos is None or batch == pos or len(shape) - 1 in (batch, pos):
        return None
    return Anatomy(
        d_model=shape[-1],
        n_vocab=module.get_output_embeddings().weight.shape[0],
        embed=found.embed,
        pos_embeds=(),
        layers=tuple(Layer(path, ()) for path in applied),
        readers=found.readers,
        norms=norms,
        unembed=found.unembed,
        unembed_bias=tree.has_bias(module.get_output_embeddings()),
        clones=True,
        n_streams=prod(shape[:-1]) // ids.numel(),
        stream_axes=(batch, pos),
    )


@torch.no_grad()
def _shape(module: nn.Module, found: Structure, ids: Tensor) -> tuple[int, ...] | None:
    """The shape of what the blocks are given and return; None where it is not the same everywhere."""
    shapes: set[tuple[int, ...]] = set()
    with Run(module, found.blocks, found.unembed) as run:
        for path in found.blocks:
            run.on_input(path, lambda _, named: shapes.add(tuple(stream_of((), named).shape)))
            run.on_output(path, lambda _, out, x: shapes.add(tuple(out.shape)))
        run.hidden(ids)
    return shapes.pop() if len(shapes) == 1 else None


def _grown(shape: tuple[int, ...], other: tuple[int, ...], size: int, by: int) -> int | None:
    """The one axis that has `size` and follows it to `size + by`; None where there is none, or another one changes too."""
    changed = [axis for axis, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]
    fits = len(changed) == 1 and (shape[changed[0]], other[changed[0]]) == (size, size + by)
    return changed[0] if fits else None
