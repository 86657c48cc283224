"""What an intervention is: a place in the forward pass, and what stands there instead of what the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from streamlens.models.anatomy import Add, Anatomy, Write


@dataclass(frozen=True, eq=False)
class Change:
    """One intervention, at the positions where `at` `[batch, pos]` is true; everywhere for None. `value` None is zero.

    Without `part`, the output of the module at `path` is replaced by `value`; of a block (its own path), by its input plus
    `value`: None removes it. With `part`, these coordinates of the module's *input* are replaced: a head's slice of z.
    With `expert`, the module holds experts, and the routing weights of this one are zero.
    """

    layer: int
    path: str
    part: slice | None = None
    value: Tensor | None = None  # broadcasts to `[batch, pos, width of what is replaced]`
    at: Tensor | None = None
    expert: int = -1


def block(anatomy: Anatomy, layer: int, value: Tensor | None = None, at: Tensor | None = None) -> Change:
    """The block adds `value` to its input, and nothing else."""
    return Change(layer, anatomy.layers[layer].path, None, value, at)


def write(layer: int, add: Add, values: Sequence[Tensor | None] | None = None, at: Tensor | None = None) -> tuple[Change, ...]:
    """An addition to the stream, after its branch norm and before its factor, one value for each of its `outputs`."""
    paths = add.outputs
    return tuple(Change(layer, path, None, value, at) for path, value in zip(paths, values or [None] * len(paths), strict=True))


def head(layer: int, attention: Write, index: int, value: Tensor | None = None, at: Tensor | None = None) -> Change:
    """One head's z, at the input of the output projection: projection, branch norm and the rest of the block see the change."""
    return Change(layer, attention.leaf, attention.coordinates(index), value, at)


def put(old: Tensor, change: Change, base: Tensor | None = None) -> None:
    """Make the change in `old` `[batch, pos, width]`, in place; `base` is what stands there before `value` is added (a block's input)."""
    target = old if change.part is None else old[..., change.part]
    new = base if change.value is None else change.value.to(target) if base is None else base + change.value.to(target)
    if change.at is None:
        target.copy_(new) if new is not None else target.zero_()
    elif new is None:
        target.masked_fill_(change.at.to(target.device)[..., None], 0)
    else:
        target.copy_(target.where(~change.at.to(target.device)[..., None], new))
