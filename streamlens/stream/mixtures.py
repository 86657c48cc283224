"""Experts in the readout: what each adds to its mixture's output, times the direction in which that output is read.

Routing weights, gates of shared experts and whatever scales their sum afterwards stand as they are at this pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models import limits
from streamlens.models.anatomy import Anatomy
from streamlens.models.mixtures import INDEX, WEIGHTS, Mixture
from streamlens.stream.inner_norms import freeze_inside
from streamlens.stream.readout import Key
from streamlens.stream.run import Place, Run, parameter_names
from streamlens.stream.tap import Places, Tap

_COMPARED = 4  # tokens for which the experts run twice


@dataclass
class _Mixed:
    """One call of a mixture."""

    numbers: Int[Tensor, "kept slot"] | None = None
    outputs: Float[Tensor, "kept slot width"] | None = None  # what each slot's expert gives
    experts: Float[Tensor, "row width"] | None = None  # a leaf: the experts' output
    rows: Int[Tensor, "kept slot"] | None = None  # the row of `experts` that each slot's output is part of
    shared: list[Float[Tensor, "... d_model"]] = field(default_factory=list)  # leaves
    out: Tensor | None = None  # the mixture's output, a function of the leaves


@dataclass(frozen=True)
class Mixed:
    """The shares of one mixture's parts."""

    experts: Float[Tensor, "row slot"]
    numbers: Int[Tensor, "row slot"]
    shared: Float[Tensor, " row"] | None
    bias: Float[Tensor, " row"] | None


class MixtureTap(Tap):
    """Calls the experts of each mixture one routing slot at a time, all tokens at once: as much work as calling them once."""

    def __init__(self, module: nn.Module, mixtures: dict[Place, Mixture], places: Places):
        super().__init__(places)
        self.module, self.mixtures = module, mixtures
        self._open: dict[str, _Mixed] = {}  # by the path of the experts
        self._done: dict[Place, _Mixed] = {}

    def plant(self, run: Run, anatomy: Anatomy) -> None:
        for mixture in {m.experts: m for m in self.mixtures.values()}.values():
            if mixture.kind == "slots":
                run.replace(mixture.experts, partial(self._by_slot, mixture))
            else:
                run.on_output(mixture.experts, partial(self._dense if mixture.kind == "dense" else self._sorted, mixture))
            if mixture.router is not None:
                run.on_whole_output(mixture.router, partial(self._route, mixture))
            for path in mixture.shared:
                run.on_output(path, partial(self._shared, mixture))
        freeze_inside(run, self.module, (w.reader for layer, w in anatomy.writes() if (layer, w.leaf) in self.mixtures))

    def close(self) -> None:
        self._open.clear()
        self._done.clear()

    def entered(self, key: Key, value: Tensor) -> None:
        mixture = self.mixtures.get((key[0], key[2])) if key[1] == "write" else None
        if mixture is not None and (mixed := self._open.pop(mixture.experts, None)) is not None:
            mixed.out = value
            self._done[key[0], key[2]] = mixed

    def check(self) -> None:
        missing = next((place for place in self.mixtures if place not in self._done or self._done[place].numbers is None), None)
        if missing is not None:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} cannot be split by expert: the experts of layer {missing[0]} did not run as its mixture's"
            )

    def n_slots(self, place: Place) -> int:
        """Experts that a token of this mixture goes through."""
        return self._done[place].numbers.shape[1]

    def shares(self, place: Place, g: Float[Tensor, "... d_model"], at: Int[Tensor, " row"]) -> Mixed:
        """The share of each slot's expert, of the shared ones together and of the constant; `g` is the direction of the output."""
        mixed, mixture = self._done[place], self.mixtures[place]
        wide = torch.promote_types(g.dtype, torch.float32)
        leaves = [mixed.experts, *mixed.shared]
        read, *shared = torch.autograd.grad(mixed.out, leaves, g.reshape(mixed.out.shape), retain_graph=True)
        kept = self.places.index(at)
        outputs, read = mixed.outputs[kept].to(wide), read.reshape(-1, read.shape[-1])[mixed.rows[kept]].to(wide)
        beside = [
            (value.flatten(0, -2)[at].to(wide) * d.flatten(0, -2)[at].to(wide)).sum(-1)
            for value, d in zip(mixed.shared, shared, strict=True)
        ]
        bias = None if mixture.bias is None else g.flatten(0, -2)[at].to(wide) @ self.module.get_parameter(mixture.bias).to(wide)
        return Mixed((outputs * read).sum(-1), mixed.numbers[kept], sum(beside) if beside else None, bias)

    # -- hooks ---------------------------------------------------------------------------------------------------
    def _of(self, mixture: Mixture) -> _Mixed:
        return self._open.setdefault(mixture.experts, _Mixed())

    def _by_slot(self, mixture: Mixture, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        names = parameter_names(type(self.module.get_submodule(mixture.experts)))
        named = dict(zip(names, args, strict=False)) | kwargs
        numbers = next(named[name] for name in INDEX if name in named)
        routing = {name for name in (*INDEX, *WEIGHTS) if name in named}

        def slot(k: int) -> Tensor:
            part = {name: _slot(value, k, name in WEIGHTS, mixture.pairs) if name in routing else value for name, value in named.items()}
            return original(*(part[name] for name in names[: len(args)]), **{name: part[name] for name in kwargs})

        slots = [slot(k) for k in range(numbers.shape[-1])]
        wide = torch.promote_types(slots[0].dtype, torch.float32)
        total = sum(slot.to(wide) for slot in slots).to(slots[0].dtype)
        self._compare(total, original(*(_few(v, len(numbers)) for v in args), **{n: _few(v, len(numbers)) for n, v in kwargs.items()}))
        tokens = torch.arange(self.places.total, device=total.device)[:, None].expand(-1, len(slots))
        outputs = torch.stack([self.places.keep(slot.reshape(self.places.total, -1)) for slot in slots], 1)
        return self._keep(mixture, total, numbers.reshape(self.places.total, -1), tokens, outputs)

    def _compare(self, total: Tensor, few: Tensor) -> None:
        """The experts' sum by slot against what they give for the first tokens with all slots at once."""
        summed, given = (x.flatten(0, -2)[:_COMPARED].double() for x in (total, few))
        gap = (summed - given).abs().max()
        if not bool(gap <= limits.room(few.dtype) * given.abs().max()):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} cannot be split by expert: experts do not add up over routing slots, off by {float(gap):.2g}"
            )

    def _dense(self, mixture: Mixture, _: int, out: Tensor, given: Tensor) -> Tensor:
        n_tokens = self.places.total
        used = given.reshape(-1, n_tokens, given.shape[-1]).ne(0).any(-1)  # an expert that is not chosen is given zeros
        numbers = used.T.byte().topk(int(used.sum(0).max()), dim=1).indices
        rows = numbers * n_tokens + torch.arange(n_tokens, device=out.device)[:, None]
        return self._keep(mixture, out, numbers, rows)

    def _route(self, mixture: Mixture, _: int, routed: tuple) -> None:
        token, sizes = routed[1], routed[3]
        order = token.argsort(stable=True).reshape(self.places.total, -1)
        expert = torch.arange(len(sizes), device=token.device).repeat_interleave(torch.as_tensor(sizes, device=token.device))
        self._of(mixture).rows, self._of(mixture).numbers = order, expert[order]

    def _sorted(self, mixture: Mixture, _: int, out: Tensor, given: Tensor) -> Tensor:
        mixed = self._of(mixture)
        return self._keep(mixture, out, mixed.numbers, mixed.rows)

    def _keep(self, mixture: Mixture, out: Tensor, numbers: Tensor, rows: Tensor, outputs: Tensor | None = None) -> Tensor:
        mixed, leaf = self._of(mixture), out.detach().requires_grad_()
        mixed.experts, mixed.numbers, mixed.rows = leaf, self.places.keep(numbers), self.places.keep(rows)
        mixed.outputs = out.detach().reshape(-1, out.shape[-1])[mixed.rows] if outputs is None else outputs
        return leaf.clone()

    def _shared(self, mixture: Mixture, _: int, out: Tensor, __: Tensor) -> Tensor:
        leaf = out.detach().requires_grad_()
        self._of(mixture).shared.append(leaf)
        return leaf.clone()


def _slot(routed: Shaped[Tensor, "... slot"], k: int, weights: bool, pairs: bool) -> Shaped[Tensor, "... one"]:
    """One routing slot; in `pairs` it is followed by the same expert with weight 0."""
    one = routed[..., k : k + 1]
    if not pairs:
        return one
    return torch.cat([one, torch.zeros_like(one) if weights else one], -1)


def _few(x: Any, n_tokens: int) -> Any:
    """The first tokens of an argument that has one row a token."""
    return x[:_COMPARED] if isinstance(x, Tensor) and x.dim() > 1 and len(x) == n_tokens else x
