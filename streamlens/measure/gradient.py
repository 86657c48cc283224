"""The first-order estimate of an ablation: <gradient of the metric, what would stand there - what stands there>.

One forward pass and, for each metric and each read position of a prompt, one backward pass, for all variants together. It knows nothing
of what saturates; the exact sweep says how far to trust it (Nanda 2023, attribution patching).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.measure import metrics as m
from streamlens.measure.ablation import Plan, Removal, Tick, made_at, of_corrupted, overflowed, positions_mask
from streamlens.measure.metrics import Logits
from streamlens.measure.places import ids_on, ordinals, with_top
from streamlens.measure.readings import Readings, Rows, measure
from streamlens.measure.units import EVERYWHERE, Site, Variant
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.run import Planted, stream_of, tensor_name
from streamlens.stream.unembed import Unembed
from streamlens.stream.values import Key

METRICS = ("loss", "target_logit", "target_logprob", "logit_diff")
"""Those that have a slope: divergences are flat at the clean run, ranks and agreement are steps."""


def estimate_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    plan: Plan,
    places: tuple[np.ndarray, np.ndarray],
    readouts: Readouts,
    tick: Tick = lambda passes: None,
) -> Removal:
    """As :func:`streamlens.measure.ablation.sweep_batch`, `ablated` being clean + estimate."""
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    (draw,) = plan.replacement.draws(batch, plan.keys)
    with torch.inference_mode(False), torch.enable_grad(), _Slopes(module, anatomy, plan.keys) as slopes:
        hidden = slopes.forward(batch)
        tick(1.0)
        readouts = with_top(readouts, batch, hidden.detach(), unembed)
        rows = Rows(batch, places, readouts)
        table = Readings.empty(len(plan.changes), len(rows.place), len(rows.target), plan.wanted)
        clean_rows = rows.of(hidden.detach())
        measure(unembed, rows, clean_rows, {}, table, plan.wanted)
        steps = {key: draw.values.get(key, 0.0) - value for key, value in slopes.values.items()}
        passes = list(_passes(places[0], readouts.prompt, plan))
        for number, (name, at_place, chosen) in enumerate(passes):
            # One row a prompt: their sum has each prompt's own slope in each prompt's rows.
            total = _metric(name, unembed, rows, hidden, chosen).sum()
            slope = slopes.of(total, last=number == len(passes) - 1)
            owner = rows.flat[(rows.place if at_place else rows.target)[chosen]] // batch.ids.shape[1]
            clean, changed = (table.at_position if at_place else table.at_target)[name]
            estimates = _estimates(slope, steps, batch, plan)
            changed[:, chosen] = clean[chosen] + estimates[:, owner]
            tick(1.0)
    corrupted = None if draw.hidden is None else of_corrupted(unembed, rows, clean_rows, draw.hidden, plan)
    return Removal(*places, table.at_position, readouts, table.at_target, overflowed([clean_rows]), corrupted, made_at(batch, plan.at))


class _Slopes(Planted):
    """A pass with its graph: values at the keys, then the slope of any number there."""

    def __init__(self, module: nn.Module, anatomy: Anatomy, keys: Collection[Key]):
        super().__init__(module, anatomy)
        self.keys = frozenset(keys)
        self.values: dict[Key, Float[Tensor, "batch pos width"]] = {}
        self._points: dict[Key, Tensor] = {}
        self._entered: Tensor | None = None

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._points.clear()

    def _plant(self) -> None:
        run = self._run
        run.on_output(self.anatomy.embed, lambda _, out, x: out.detach().clone().requires_grad_())
        for path, at_input in dict.fromkeys((path, at_input) for _, path, at_input in self.keys):
            if at_input:
                run.on_input(path, lambda layer, named, path=path: self._input(layer, path, named))
            else:
                if path in self.anatomy.block_paths:
                    run.on_input(path, self._enter)
                run.on_output(path, lambda layer, out, _, path=path: self._point((layer, path, False), out))

    def forward(self, batch: TokenBatch) -> Float[Tensor, "batch pos d_model"]:
        return self._run.hidden(batch.ids, batch.mask)

    def of(self, total: Tensor, last: bool) -> dict[Key, Float[Tensor, "batch pos width"]]:
        """The slope of `total` at each key."""
        found = torch.autograd.grad(total, list(self._points.values()), retain_graph=not last, allow_unused=True)
        zeros = (
            torch.zeros_like(value) if g is None else g.reshape(value.shape) for g, value in zip(found, self.values.values(), strict=True)
        )
        return dict(zip(self.values, zeros, strict=True))

    def _enter(self, layer: int, named: dict[str, Any]) -> None:
        self._entered = stream_of((), named).detach().clone()

    def _input(self, layer: int, path: str, named: dict[str, Any]) -> dict[str, Any] | None:
        name = tensor_name(named)
        changed = self._point((layer, path, True), named[name])
        return None if changed is None else named | {name: changed}

    def _point(self, key: Key, value: Tensor) -> Tensor | None:
        if key not in self.keys:
            return None
        is_block = key[1] == self.anatomy.layers[key[0]].path
        old = value.detach() - self._entered if is_block else value.detach().clone()
        self.values[key], self._points[key] = old.reshape(*self._run.shape, -1), value
        return value.clone() if self.anatomy.clones else None


def _passes(place_prompt: np.ndarray, target_prompt: np.ndarray, plan: Plan) -> Iterator[tuple[str, bool, np.ndarray]]:
    """(metric, whether it is read at places, rows of its table), one row a prompt each."""
    for name in plan.wanted:
        at_place = name in m.POSITION_METRICS
        ordinal = ordinals(place_prompt if at_place else target_prompt)
        for k in range(int(ordinal.max(initial=-1)) + 1):
            yield name, at_place, np.flatnonzero(ordinal == k)


def _metric(name: str, unembed: Unembed, rows: Rows, hidden: Tensor, chosen: np.ndarray) -> Tensor:
    """One metric at some rows of its table, with its graph; 0 where it has no inputs."""
    index = (rows.place if name in m.POSITION_METRICS else rows.target)[chosen]
    logits = unembed.logits(rows.of(hidden)[torch.from_numpy(index).to(hidden.device)])
    if name == "loss":
        value = m.loss(logits, logits.logsumexp(-1), rows.following[torch.from_numpy(index)].to(logits.device))
    else:
        target, versus = ids_on(logits.device, rows.readouts.take(chosen))
        value = m.target_metrics(Logits(logits), torch.arange(len(chosen), device=logits.device), target, versus, (name,))[name]
    return torch.where(value.isnan(), torch.zeros_like(value), value)


def _estimates(slope: dict[Key, Tensor], steps: dict[Key, Tensor], batch: TokenBatch, plan: Plan) -> Float[np.ndarray, "variant batch"]:
    products = {key: slope[key].to(_wide(step)) * step for key, step in steps.items()}
    mask = positions_mask(batch, plan.at)
    return np.stack([_estimate(variant, products, mask) for variant in plan.changes])


def _estimate(variant: Variant, products: dict[Key, Tensor], mask: Tensor | None) -> Float[np.ndarray, " batch"]:
    total = sum(_at(site, products).cpu() for site in variant.sites)  # [batch, pos]
    if variant.at != EVERYWHERE:
        total = total[:, variant.at : variant.at + 1]
    elif mask is not None:
        total = total * mask
    return total.double().sum(-1).numpy()


def _at(site: Site, products: dict[Key, Tensor]) -> Tensor:
    return site.of(products[site.key]).sum(-1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
