"""From any stream to the unembedding's input: whatever a model does behind its last block, as a map of single positions.

The model's own forward runs over one token a row, its blocks hand on what they are given and the last one the stream that is
asked about: final norms, projections and scales are the model's own, and nothing needs to know their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models import limits
from streamlens.models.anatomy import Anatomy
from streamlens.stream.run import Planted, stream_of, with_first


class Tail(Planted):
    """A context manager: :meth:`fit` the clean end of some rows once, then map any stream of the same rows."""

    def __init__(self, module: nn.Module, anatomy: Anatomy):
        super().__init__(module, anatomy)
        self._stream: Tensor | None = None  # what the last block hands on; None while the blocks run
        self._frames: list[Any] = []  # what each block returns
        self._inputs: dict[str, Tensor] = {}  # of the norms behind the last block, in the clean pass
        self._fitting = self._frozen = False

    def fit(self, final: Float[Tensor, "row d_model"], hidden: Float[Tensor, "row width"]) -> None:
        """Take the statistics of the clean pass from the rows of its last stream.

        Raises :class:`UnsupportedModelError` where the map does not give `hidden`, the unembedding's input in the clean pass.
        """
        with torch.no_grad():
            self._run.hidden(torch.zeros(1, 1, dtype=torch.long))
        self._fitting = True
        try:
            found = self(final)
        finally:
            self._fitting = False
        room = limits.room(hidden.dtype)
        error = float((found - hidden).abs().max() / hidden.abs().max()) if found.shape == hidden.shape else float("inf")
        # A stream that is not finite is the caller's to report.
        if bool(torch.isfinite(hidden).all()) and not error <= room:
            name = type(self.module).__name__
            raise UnsupportedModelError(
                f"{name}: what stands between its last block and its unembedding is no map of single positions: off by {error:.2g} of the "
                f"largest value (limit {room:.0e})"
            )

    @torch.no_grad()
    def __call__(self, stream: Float[Tensor, "row d_model"], frozen: bool = False) -> Float[Tensor, "row width"]:
        """The unembedding's input for a stream in the last one's place; `frozen` keeps the clean statistics of the final norms."""
        self._stream, self._frozen = stream[:, None], frozen
        try:
            return self._run.hidden(torch.zeros(len(stream), 1, dtype=torch.long)).reshape(len(stream), -1)
        finally:
            self._stream, self._frozen = None, False

    def _plant(self) -> None:
        for path in self.anatomy.block_paths:
            self._run.replace(path, self._block)
        for path in self.anatomy.norms:
            if (self.anatomy.n_layers, path) in self.anatomy.path_norms:
                self._run.on_output(path, lambda layer, out, x, path=path: self._norm(layer, path, out, x))

    def _block(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = self._run.layer
        if self._stream is None:
            output = original(*args, **kwargs)
            self._frames.append(with_first(output, None))
            return output
        last = layer + 1 == self.anatomy.n_layers
        return with_first(self._frames[layer], self._stream if last else stream_of(args, kwargs))

    def _norm(self, layer: int, path: str, out: Tensor, x: Tensor | None) -> Tensor | None:
        if layer != self.anatomy.n_layers or x is None:
            return None
        if self._fitting:
            self._inputs[path] = x
        if not self._frozen:
            return None
        form, wide = self.anatomy.norms[path], torch.promote_types(x.dtype, torch.float32)
        y = form.push_forward(x.to(wide), self._inputs[path].to(wide))
        return (y if form.bias is None else y + form.bias).to(out.dtype)
