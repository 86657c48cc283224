"""What stands in the place of what is ablated: nothing, a mean over a named set of prompts, or what other prompts have there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from streamlens.errors import InputError
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import NONE, TokenBatch
from streamlens.stream.run import Run
from streamlens.stream.values import Key, watch_values

Values = Mapping[Key, Tensor]
"""What replaces the values at each key, broadcasting to `[batch, pos, width]`; a key that is absent is zero."""


@dataclass(frozen=True)
class Draw:
    """One set of replacements for one batch; `hidden` is the unembedding's input of the prompts that they come from."""

    values: Values
    sample: int = NONE
    hidden: Tensor | None = None


@runtime_checkable
class Replacement(Protocol):
    """Gives the replacements of a batch, one :class:`Draw` a sample."""

    def draws(self, batch: TokenBatch, keys: Collection[Key]) -> Iterator[Draw]: ...


class Zero:
    """Nothing stands there."""

    def draws(self, batch: TokenBatch, keys: Collection[Key]) -> Iterator[Draw]:
        yield Draw({})


@dataclass(frozen=True)
class Deferred:
    """A replacement that is made when it is first needed: a sweep whose numbers are all at hand needs none."""

    make: Callable[[], Replacement]

    def draws(self, batch: TokenBatch, keys: Collection[Key]) -> Iterator[Draw]:
        yield from self.make().draws(batch, keys)


@dataclass
class Mean:
    """Means over reference prompts, of all real tokens but the first; `positional`: of each position by itself, the first included."""

    positional: bool = False
    sums: dict[Key, Tensor] = field(default_factory=dict)
    counts: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def of(cls, positional: bool, keys: Sequence[Key], arrays: Sequence[np.ndarray]) -> Mean:
        """What :meth:`arrays` gave."""
        counts, *sums = map(torch.tensor, arrays)  # copies: what comes from a file cannot be written
        return cls(positional, {key: flat.reshape(len(counts), -1) for key, flat in zip(keys, sums, strict=True)}, counts)

    def arrays(self, keys: Sequence[Key]) -> list[np.ndarray]:
        """The counts, then the sums at each key."""
        return [self.counts.numpy(), *(self.sums[key].numpy() for key in keys)]

    def add(self, module: nn.Module, anatomy: Anatomy, batch: TokenBatch, keys: Collection[Key]) -> None:
        """Take in one batch of reference prompts."""
        mask = batch.mask.clone()
        if not self.positional:
            mask[:, 0] = False
        counts = mask.sum(0).double()
        self.counts = _added(self.counts, counts)

        def see(key: Key, value: Tensor) -> None:
            total = value.double().mul(mask.to(value.device)[..., None]).sum(0).cpu()
            self.sums[key] = _added(self.sums[key], total) if key in self.sums else total

        with torch.no_grad(), Run.of(module, anatomy) as run:
            watch_values(run, anatomy, keys, see)
            run.hidden(batch.ids, batch.mask)

    def draws(self, batch: TokenBatch, keys: Collection[Key]) -> Iterator[Draw]:
        if self.positional:
            n = batch.ids.shape[1]
            counts = _added(self.counts, torch.zeros(n).double())[:n].clamp_min(1)
            yield Draw(
                {key: (_added(self.sums[key], torch.zeros(n, self.sums[key].shape[1]).double())[:n] / counts[:, None]) for key in keys}
            )
        else:
            yield Draw({key: self.sums[key].sum(0) / self.counts.sum() for key in keys})


@dataclass(frozen=True)
class Donors:
    """What other prompts have at the same positions. `donors` holds each prompt's donors' ids, one a sample, at least as long as it is."""

    module: nn.Module
    anatomy: Anatomy
    donors: Sequence[Sequence[np.ndarray]]  # [prompt][sample]
    paired: bool = False

    def draws(self, batch: TokenBatch, keys: Collection[Key]) -> Iterator[Draw]:
        for sample in range(len(self.donors[0])):
            ids = batch.ids.clone()
            for row, prompt in enumerate(batch.index):
                n = int(batch.mask[row].sum())
                ids[row, :n] = torch.from_numpy(self.donors[prompt][sample][:n])
            values: dict[Key, Tensor] = {}
            with torch.no_grad(), Run.of(self.module, self.anatomy) as run:
                watch_values(run, self.anatomy, keys, lambda key, value: values.__setitem__(key, value.clone()))  # noqa: B023
                hidden = run.hidden(ids, batch.mask)
            yield Draw(values, NONE if self.paired else sample, hidden)


def drawn(prompts: Sequence[np.ndarray], pool: Sequence[np.ndarray], n_samples: int, seed: int) -> list[list[np.ndarray]]:
    """For each prompt `n_samples` different others of `pool`, none the prompt itself and none shorter. Raises InputError for too few."""
    rng, out = np.random.default_rng(seed), []
    for i, ids in enumerate(prompts):
        fits = [other for other in pool if len(other) >= len(ids) and not np.array_equal(other[: len(ids)], ids)]
        if len(fits) < n_samples:
            raise InputError(
                f"reference must hold n_samples={n_samples} prompts other than prompt {i} and no shorter than its {len(ids)} tokens; "
                f"got {len(fits)}"
            )
        out.append([fits[k] for k in rng.choice(len(fits), size=n_samples, replace=False)])
    return out


def _added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tensors, the shorter one filled up with zeros along its first axis."""
    if len(a) < len(b):
        a, b = b, a
    out = a.double().clone() if len(a) else b.double()
    out[: len(b)] += b
    return out
