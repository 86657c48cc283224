"""Where a replay keeps what it starts from: in memory, in another dtype, on another device, or on disk beyond a limit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from streamlens.errors import InputError, whole


@dataclass(frozen=True)
class Keep:
    """How the clean streams of a sweep are kept: one a block, `[batch, pos, d_model]` each, and every z for heads.

    `dtype` and `device` None are the model's own; a narrower dtype rounds what every change starts from. What is beyond `limit` bytes
    goes to files in a temporary folder, which is removed when the batch is done. Raises InputError for a limit below 0 or a dtype that
    holds no fractions.
    """

    dtype: torch.dtype | None = None
    device: str | torch.device | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise InputError(f"keep: dtype must be a floating-point torch dtype; got {self.dtype!r}")
        if self.limit is not None:
            whole("keep: limit", self.limit, 0)


class Kept:
    """Tensors by key, given back as they came."""

    def __init__(self, keep: Keep):
        self.keep = keep
        self._held: dict[Hashable, tuple[Tensor | Path, torch.dtype, torch.device]] = {}
        self._bytes = 0
        self._folder: TemporaryDirectory | None = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def put(self, key: Hashable, value: Tensor) -> None:
        small = value.detach().to(device=self.keep.device, dtype=self.keep.dtype)
        size = small.numel() * small.element_size()
        if self.keep.limit is not None and self._bytes + size > self.keep.limit:
            self._held[key] = self._filed(small), value.dtype, value.device
        else:
            self._bytes += size
            self._held[key] = small, value.dtype, value.device

    def get(self, key: Hashable) -> Tensor:
        value, dtype, device = self._held[key]
        value = torch.load(value, weights_only=True) if isinstance(value, Path) else value
        return value.to(device=device, dtype=dtype)

    def clear(self) -> None:
        self._held.clear()
        self._bytes = 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _filed(self, value: Tensor) -> Path:
        self._folder = self._folder or TemporaryDirectory(prefix="streamlens-")
        path = Path(self._folder.name) / f"{len(self._held)}.pt"
        torch.save(value.clone(), path)
        return path
