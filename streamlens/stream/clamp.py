"""The slow truth behind a contribution: zero one write, hold every other one, freeze the norms on the path, read the logit.

Independent of the readout's backward pass: nothing is differentiated, the model runs forward. Used by the proof at load and the tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.models.anatomy import Anatomy
from streamlens.models.norms import NormForm
from streamlens.stream.run import Place, Planted, tensor_name


class Clamp(Planted):
    """Forward passes in which every leaf keeps its clean value but for the parts that are zeroed."""

    def __init__(self, module: nn.Module, anatomy: Anatomy, ids: Tensor, mask: Tensor | None = None):
        super().__init__(module, anatomy)
        self.ids, self.mask = ids, mask
        self.clean: dict[Place, Tensor] = {}
        self._norms: dict[Place, tuple[Tensor, Tensor]] = {}
        self._zeroed: list[tuple[Place, slice]] = []  # one a copy of the batch; empty in the clean pass
        self._leaves = {(layer, w.leaf): bool(w.n_heads) for layer, w in anatomy.writes()}

    def _plant(self) -> None:
        for path in (self.anatomy.embed, *self.anatomy.pos_embeds):
            self._run.on_output(path, lambda _, out, x, path=path: self._value((-1, path), out.expand(*self._run.shape, out.shape[-1])))
        for path, at_input in dict.fromkeys((path, at_input) for (_, path), at_input in self._leaves.items()):
            if at_input:
                self._run.on_input(path, lambda layer, named, path=path: self._input(layer, path, named))
            else:
                self._run.on_output(path, lambda layer, out, _, path=path: self._output(layer, path, out))
        for path, form in self.anatomy.norms.items():
            self._run.on_output(path, lambda layer, out, x, path=path, form=form: self._norm((layer, path), form, x, out))
        with torch.no_grad():
            self.hidden = self._run.hidden(self.ids, self.mask)

    def without(self, place: Place, part: slice = slice(None)) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input with these coordinates of one leaf at zero."""
        return self.without_each([(place, part)])[0]

    @torch.no_grad()
    def without_each(self, zeroed: list[tuple[Place, slice]]) -> Float[Tensor, "change batch pos d_model"]:
        """The same for several changes, one at a time, in one pass over as many copies of the batch."""
        self._zeroed, n = zeroed, len(zeroed)
        try:
            hidden = self._run.hidden(self.ids.repeat(n, 1), None if self.mask is None else self.mask.repeat(n, 1))
        finally:
            self._zeroed = []
        return hidden.unflatten(0, (n, -1))

    def _input(self, layer: int, path: str, named: dict) -> dict | None:
        if (layer, path) not in self._leaves:
            return None
        name = tensor_name(named)
        return named | {name: self._value((layer, path), named[name])}

    def _output(self, layer: int, path: str, out: Tensor) -> Tensor | None:
        return self._value((layer, path), out) if (layer, path) in self._leaves else None

    def _value(self, place: Place, value: Tensor) -> Tensor:
        clean = self.clean.setdefault(place, value.clone())
        held = _copies(clean, max(len(self._zeroed), 1))
        for copy, (changed, part) in enumerate(self._zeroed):
            if changed == place:
                held[copy * len(clean) : (copy + 1) * len(clean), ..., part] = 0
        return held

    def _norm(self, place: Place, form: NormForm, x: Tensor, out: Tensor) -> Tensor | None:
        """A norm on the path as the affine map that it was in the clean pass; the others feed sublayers, whose writes are held anyway."""
        if place not in self.anatomy.path_norms:
            return None
        clean_x, clean_y = self._norms.setdefault(place, (x.clone(), out.clone()))
        wide, n = torch.promote_types(x.dtype, torch.float32), max(len(self._zeroed), 1)
        clean_x, clean_y = _copies(clean_x, n).to(wide), _copies(clean_y, n).to(wide)
        return (clean_y + form.push_forward(x.to(wide) - clean_x, clean_x)).to(out.dtype)


def _copies(x: Tensor, n: int) -> Tensor:
    """`n` copies of a batch under one another, whether it is `[batch, pos, width]` or `[batch * pos, width]`."""
    return x.repeat(n, *[1] * (x.dim() - 1))
