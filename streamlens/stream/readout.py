"""The frozen readout: in which direction each sublayer's output is read by one logit.

With every norm on the residual path frozen at this forward pass, and no gradient into what a sublayer reads, a logit is
affine in the sublayer outputs. One backward pass from the unembedding's input gives the direction of each; a
contribution is <output, direction>, and the contributions add up to the logit by linearity. The weights are never
touched. See Elhage et al. 2021 for direct logit attribution, and McGrath et al. 2023 (eq. 7-10) for the frozen norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.norms import NormForm
from streamlens.stream.run import Planted, tensor_name
from streamlens.stream.tap import Tap

Key = tuple[int, str, str]
"""(layer, kind of place, module path): "write" and "embed" are leaves, "bias" and "norm" places where a constant enters."""

Sink = Callable[[Key, Tensor | None, Tensor], None]
"""Receives (key, the leaf's value or None for a constant, gradient there)."""


class FrozenNorm(torch.autograd.Function):
    """Forward: the norm's own output, unchanged. Backward: the norm as a linear map with its sigma frozen at this input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, form: NormForm, report: Callable[[Tensor], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.form, ctx.report = form, report
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.report(g)
        (x,) = ctx.saved_tensors
        wide = torch.promote_types(g.dtype, torch.float32)
        return ctx.form.pull_back(g.to(wide), x.to(wide)).to(g.dtype), None, None, None


class Readout(Planted):
    """A run whose writes are leaves: :meth:`forward` once, then :meth:`pull` once for every direction of interest."""

    def __init__(self, module: nn.Module, anatomy: Anatomy, tap: Tap | None = None):
        super().__init__(module, anatomy)
        self.tap = tap
        self.leaves: dict[Key, Tensor] = {}
        self._sink: Sink | None = None
        self._by_module: dict[tuple[int, str], Write] = {(layer, w.leaf): w for layer, w in anatomy.writes()}

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.leaves.clear()
        if self.tap is not None:
            self.tap.close()

    def forward(self, ids: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None = None) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input, as a function of the leaves."""
        self.leaves.clear()
        with torch.inference_mode(False), torch.enable_grad():
            hidden = self._run.hidden(ids, mask)
        if self.tap is not None:
            self.tap.check()
        if not hidden.requires_grad:
            raise UnsupportedModelError(f"{type(self.module).__name__}: none of the writes of its anatomy reaches the unembedding")
        return hidden

    def pull(self, hidden: Tensor, direction: Float[Tensor, "batch pos d_model"], sink: Sink, *, last: bool = True) -> None:
        """Pull `direction` at the unembedding's input back to every leaf and constant, each reported to `sink` and then dropped."""
        self._sink = sink
        try:
            torch.autograd.backward(hidden, direction.to(hidden), inputs=list(self.leaves.values()), retain_graph=not last)
        finally:
            self._sink = None

    # -- hooks ---------------------------------------------------------------------------------------------------
    def _plant(self) -> None:
        run, anatomy = self._run, self.anatomy
        if self.tap is not None:
            self.tap.plant(run, anatomy)
        for path in (anatomy.embed, *anatomy.pos_embeds):
            run.on_output(path, lambda layer, out, _, path=path: self._leaf((-1, "embed", path), self._full(out)))
        for path in anatomy.readers:
            run.on_input(path, lambda _, named: _stopped(named))
        for path in dict.fromkeys(w.leaf for _, w in anatomy.writes() if w.n_heads):
            run.on_input(path, lambda layer, named, path=path: self._leaf_at_input(layer, path, named))
            run.on_output(path, lambda layer, out, _, path=path: self._watch_bias(layer, path, out))
        for path in dict.fromkeys(w.leaf for _, w in anatomy.writes() if not w.n_heads):
            run.on_output(path, lambda layer, out, _, path=path: self._leaf_at_output(layer, path, out))
        for path, form in anatomy.norms.items():
            run.replace(path, partial(self._frozen, path, form))

    def _leaf(self, key: Key, value: Tensor) -> Tensor:
        if self.tap is not None:
            self.tap.entered(key, value)
        leaf = value.detach().requires_grad_()
        self.leaves[key] = leaf

        def report(accumulated: Tensor) -> None:
            self._report(key, leaf, accumulated.grad)
            accumulated.grad = None

        leaf.register_post_accumulate_grad_hook(report)
        return leaf.clone() if self.anatomy.clones else leaf

    def _leaf_at_input(self, layer: int, path: str, named: dict[str, Any]) -> dict[str, Any] | None:
        if (layer, path) not in self._by_module:
            return None
        name = tensor_name(named)
        return named | {name: self._leaf((layer, "write", path), named[name])}

    def _leaf_at_output(self, layer: int, path: str, out: Tensor) -> Tensor | None:
        return self._leaf((layer, "write", path), out) if (layer, path) in self._by_module else None

    def _watch_bias(self, layer: int, path: str, out: Tensor) -> None:
        write = self._by_module.get((layer, path))
        if write is not None and write.bias:
            out.register_hook(lambda g: self._report((layer, "bias", path), None, g))

    def _frozen(self, path: str, form: NormForm, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        layer, x = self._run.now, next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        with torch.no_grad():
            out = original(*args, **kwargs)
        if (layer, path) not in self.anatomy.path_norms:
            return out  # only read, and what is read has no gradient
        return FrozenNorm.apply(x, out, form, lambda g: self._report((layer, "norm", path), None, g)) if x.requires_grad else out

    def _report(self, key: Key, value: Tensor | None, g: Tensor | None) -> None:
        if self._sink is not None and g is not None:
            self._sink(key, value, g)

    def _full(self, out: Tensor) -> Tensor:
        """A broadcast embedding (`[1, pos, d_model]` or `[pos, d_model]`) at every prompt of the batch."""
        batch, pos = self._run.shape
        if out.dim() not in (2, 3) or out.shape[-2] != pos or (out.dim() == 3 and out.shape[0] not in (1, batch)):
            raise UnsupportedModelError(f"an embedding gives {list(out.shape)} for tokens of shape {[batch, pos]}: not one vector a token")
        return out.expand(*self._run.shape, out.shape[-1])


def _stopped(named: dict[str, Any]) -> dict[str, Any]:
    """A sublayer's arguments without gradient; a residual that a sublayer merely passes on keeps its own."""
    return {n: v.detach() if isinstance(v, Tensor) and v.requires_grad and n != "residual" else v for n, v in named.items()}
