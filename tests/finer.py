"""The slow truth behind a neuron's, an expert's and a source position's row: take it out of a forward pass and read the logit.

All other writes are held and all norms frozen at the clean pass, those inside the sublayer too; nothing is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd
import torch
from torch import Tensor, nn

from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.attention import replaced_attention
from streamlens.models.mixtures import INDEX, WEIGHTS, mixture_of
from streamlens.models.norms import NormForm, fit, looks_like_norm
from streamlens.stream.clamp import Clamp


class Open(Clamp):
    """Clamped passes in which one write is made anew from what it reads, less one of its parts."""

    def __init__(self, module: nn.Module, anatomy: Anatomy, ids: Tensor, layer: int, write: Write):
        super().__init__(module, anatomy, ids)
        self.layer, self.write, self.reader = layer, write, module.get_submodule(write.reader)
        self.neuron = self.expert = self.source = None
        self._inner: dict[str, tuple] = {}

    @torch.no_grad()
    def less(self, **part) -> Tensor:
        """The unembedding's input without `neuron=`, `expert=` or `source=(head, position)`, at every position."""
        self.__dict__.update(part)
        try:
            return self.without((-2, "nothing"))
        finally:
            self.__dict__.update(dict.fromkeys(part))

    def _value(self, place, value):
        return value if place == (self.layer, self.write.leaf) else super()._value(place, value)

    def _plant(self) -> None:
        run = self._run
        for path, part in self.reader.named_modules(prefix=self.write.reader):
            form = _form(part) if looks_like_norm(part) else None
            if form is not None:
                run.on_output(path, lambda layer, out, x, path=path, form=form: self._frozen(layer, path, form, x, out))
        if self.write.kind == "attn":
            run.within(replaced_attention(self.module, self._attend))
        elif self.write.down is not None:
            run.on_input(self.write.down, self._without_neuron)
        elif (mixture := mixture_of(self.module, self.write.reader)) is not None:
            self._open_mixture(mixture)
        super()._plant()

    def _open_mixture(self, mixture) -> None:
        if mixture.kind == "slots":
            self._run.on_input(mixture.experts, self._without_weight)
        elif mixture.kind == "dense":
            self._run.on_input(mixture.experts, self._without_input)
        else:
            self._run.on_whole_output(mixture.router, lambda _, routed: setattr(self, "sizes", routed[3]))
            self._run.on_output(mixture.experts, self._without_rows)

    def _frozen(self, layer: int, path: str, form: NormForm, x: Tensor, out: Tensor) -> Tensor | None:
        if layer != self.layer:
            return None
        clean_x, clean_y = self._inner.setdefault(path, (x.clone(), out.clone()))
        return clean_y + form.push_forward(x - clean_x, clean_x)

    def _attend(self, function: Callable, part: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args, **kwargs):
        out, pattern = function(part, q, k, v, *args, **kwargs)
        if self.source is not None and self._run.now == self.layer and part in set(self.reader.modules()):
            head, position = self.source
            v = v.clone()
            v[:, head // (q.shape[1] // v.shape[1]), position] = 0
            out = out.clone()
            out[:, :, head] = function(part, q, k, v, *args, **kwargs)[0][:, :, head]
        return out, pattern

    def _without_neuron(self, layer: int, named: dict) -> dict | None:
        if self.neuron is None or layer != self.layer:
            return None
        name = next(n for n, v in named.items() if isinstance(v, Tensor))
        return named | {name: _zeroed(named[name], (..., self.neuron))}

    def _without_weight(self, layer: int, named: dict) -> dict | None:
        if self.expert is None or layer != self.layer:
            return None
        index, weights = (next(name for name in names if name in named) for names in (INDEX, WEIGHTS))
        return named | {weights: named[weights].masked_fill(named[index] == self.expert, 0)}

    def _without_input(self, layer: int, named: dict) -> dict | None:
        if self.expert is None or layer != self.layer:
            return None
        name = next(n for n, v in named.items() if isinstance(v, Tensor))
        n_tokens = self.ids.numel()
        return named | {name: _zeroed(named[name], slice(self.expert * n_tokens, (self.expert + 1) * n_tokens))}

    def _without_rows(self, layer: int, out: Tensor, _: Tensor) -> Tensor | None:
        if self.expert is None or layer != self.layer:
            return None
        start = int(sum(self.sizes[: self.expert]))
        return _zeroed(out, slice(start, start + int(self.sizes[self.expert])))


def _form(norm: nn.Module) -> NormForm | None:
    weight = next(norm.parameters(), None)
    return None if weight is None else fit(norm, weight.shape[-1], weight.dtype, weight.device)


def _zeroed(x: Tensor, where) -> Tensor:
    x = x.clone()
    x[where] = 0
    return x


def sampled(df: pd.DataFrame, by: str) -> Iterator[tuple[dict, pd.DataFrame]]:
    """What :meth:`Open.less` takes out of one layer of an attribution table, and its rows."""
    parts = df[df[by] >= 0]
    if by == "source":
        heads = sorted(parts["head"].unique())
        for head, source in ((heads[0], 0), (heads[-1], 2)):
            yield {"source": (int(head), source)}, parts[(parts["head"] == head) & (parts["source"] == source)]
    elif by == "expert":
        for number, rows in parts.groupby("expert"):
            yield {"expert": int(number)}, rows
    else:
        for number in parts.iloc[parts["contribution"].abs().argsort()[-2:]]["neuron"]:
            yield {"neuron": int(number)}, parts[parts["neuron"] == number]
