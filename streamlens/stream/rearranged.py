"""The blocks of a model in another order: each with its own arguments of the clean pass, on the stream that reaches it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models.anatomy import Anatomy
from streamlens.stream.run import Planted, first, stream_of, with_first

Order = Sequence[int | tuple[int, ...]]


@dataclass(frozen=True)
class _Call:
    """One application of a block in the clean pass."""

    forward: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    out: Any

    def on(self, stream: Tensor) -> Tensor:
        """The block's output on another stream."""
        args, kwargs = [_fresh(v) for v in self.args], {name: _fresh(v) for name, v in self.kwargs.items()}
        for i, value in enumerate(args):
            if isinstance(value, Tensor) and value.is_floating_point():
                args[i] = stream
                return first(self.forward(*args, **kwargs))
        name = next(n for n, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point())
        return first(self.forward(*args, **kwargs | {name: stream}))


class Rearranged(Planted):
    """A context manager over one batch: :meth:`record` the clean pass, then :meth:`run` any number of orders."""

    def __init__(self, module: nn.Module, anatomy: Anatomy):
        super().__init__(module, anatomy)
        self._calls: list[_Call] = []
        self._order: Order | None = None
        self._batch: tuple[Tensor, Tensor | None] = (torch.empty(0, dtype=torch.long), None)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._calls.clear()

    def _plant(self) -> None:
        if not self.anatomy.bypass:
            raise self._refusal("its blocks share keys and values, and no order but its own makes them")
        for path in self.anatomy.block_paths:
            self._run.replace(path, self._block)

    @torch.no_grad()
    def record(self, ids: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None = None) -> Float[Tensor, "batch pos d_model"]:
        """The clean pass: the unembedding's input, with each block's arguments kept.

        Raises :class:`UnsupportedModelError` where a block does not simply get what the one before it returned.
        """
        self._calls, self._order, self._batch = [], None, (ids, mask)
        hidden = self._run.hidden(ids, mask)
        for layer, (call, after) in enumerate(zip(self._calls, self._calls[1:], strict=False)):
            if not torch.equal(first(call.out), stream_of(after.args, after.kwargs)):
                raise self._refusal(f"something stands between its blocks {layer} and {layer + 1}")
            rest = call.out[1:] if isinstance(call.out, (tuple, list)) else ()
            if any(_same(v, given) for v in _tensors(rest) for given in _tensors((*after.args, *after.kwargs.values()))):
                raise self._refusal(f"block {layer} hands more than its stream to the next")
        return hidden

    @torch.no_grad()
    def run(self, order: Order) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input after the blocks of `order`."""
        self._order = order
        try:
            return self._run.hidden(*self._batch)
        finally:
            self._order = None

    def _block(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = self._run.layer
        if self._order is None:
            given = tuple(self._kept(v) for v in args), {name: self._kept(v) for name, v in kwargs.items()}
            out = original(*args, **kwargs)
            self._calls.append(_Call(original, *given, with_first(out, self._kept(first(out)))))
            return out
        stream, clean = stream_of(args, kwargs), self._calls[layer]
        if layer == 0:
            for item in self._order:
                stream = self._mean(item, stream) if isinstance(item, tuple) else self._calls[item].on(self._kept(stream))
        elif not _same_beside_stream((args, kwargs), (clean.args, clean.kwargs)):
            raise self._refusal(f"what block {layer} gets beside the stream depends on the stream")
        return with_first(clean.out, stream)

    def _mean(self, layers: tuple[int, ...], stream: Tensor) -> Tensor:
        return torch.stack([self._calls[layer].on(stream.clone()) for layer in layers]).mean(0)

    def _kept(self, value: Any) -> Any:
        return value.clone() if self.anatomy.clones and isinstance(value, Tensor) else _fresh(value)

    def _refusal(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{type(self.module).__name__}: its blocks cannot be rearranged: {why}")


def _fresh(value: Any) -> Any:
    """A snapshot of what a block may change under our hands (a cache, a dictionary); tensors and plain values as they are."""
    return value if value is None or isinstance(value, (Tensor, bool, int, float, str, tuple)) else copy.deepcopy(value)


def _same_beside_stream(one: tuple[tuple, dict[str, Any]], other: tuple[tuple, dict[str, Any]]) -> bool:
    """Whether two calls of a block differ at most in their streams."""
    a, b = (_tensors((*args, *kwargs.values())) for args, kwargs in (one, other))
    streams = [stream_of(*call) for call in (one, other)]
    a, b = ([t for t in side if t is not stream] for side, stream in zip((a, b), streams, strict=True))
    return len(a) == len(b) and all(map(_same, a, b))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []
