"""What a decoder is trained on: batches that follow from a seed and the number of the step alone.

So a run that is taken up in the middle sees what an unbroken one sees, and no generator's state need be kept.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from streamlens.errors import InputError, whole


@dataclass(frozen=True)
class Batch:
    """Token ids, and which of them count in the loss, each told from those before it; None: all but the first of a row."""

    ids: Int64[Tensor, "batch pos"]
    scored: Bool[Tensor, "batch pos"] | None = None

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.ids.to(device), None if self.scored is None else self.scored.to(device))


@runtime_checkable
class Data(Protocol):
    """What `train` takes: rows of `length` tokens below `n_vocab`. Its repr names it in checkpoints."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def length(self) -> int: ...

    def draw(self, n: int, generator: torch.Generator) -> Batch:
        """`n` rows, drawn with `generator` and nothing else."""


def batch_of(data: Data, n: int, seed: int, step: int) -> Batch:
    """The `n` rows of one step, the same ones whenever they are asked for."""
    state = np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0]
    return data.draw(n, torch.Generator().manual_seed(int(state >> np.uint64(1))))


@dataclass(frozen=True, eq=False)
class Text:
    """Byte-level text: rows of `length` bytes that start anywhere."""

    text: str | bytes = field(repr=False)
    length: int = 128
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        whole("length", self.length, 2)
        given = self.text.encode("utf-8") if isinstance(self.text, str) else self.text
        if len(given) < self.length:
            raise InputError(f"text must have at least length = {self.length} bytes; got {len(given)}")
        object.__setattr__(self, "sha256", hashlib.sha256(given).hexdigest()[:16])
        object.__setattr__(self, "_ids", torch.frombuffer(bytearray(given), dtype=torch.uint8))

    @property
    def n_vocab(self) -> int:
        return 256

    @property
    def ids(self) -> UInt8[Tensor, " byte"]:
        """All of it."""
        return self._ids

    def draw(self, n: int, generator: torch.Generator) -> Batch:
        start = torch.randint(len(self.ids) - self.length + 1, (n, 1), generator=generator)
        return Batch(self.ids[start + torch.arange(self.length)].long())


def python_text() -> str:
    """The reference manual that every Python ships (`pydoc_data.topics`), its topics in order, each paragraph once.

    Some 350 kB; the text is that of the running Python's version.
    """
    from pydoc_data.topics import topics

    paragraphs = (paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs)) + "\n"


def file_text(path: str | os.PathLike) -> bytes:
    """The bytes of a file. Raises :class:`InputError` where there is none."""
    if not Path(path).is_file():
        raise InputError(f"path must be a text file; got {os.fspath(path)!r}, which is none")
    return Path(path).read_bytes()


def split(text: str, held_out: float = 0.1) -> tuple[str, str]:
    """What to train on, and the last `held_out` of a text, cut between paragraphs."""
    if not 0 < held_out < 1:
        raise InputError(f"held_out must be between 0 and 1; got {held_out!r}")
    cut = text.rfind("\n\n", 0, int(len(text) * (1 - held_out))) + 2
    if cut < 2:
        raise InputError(f"text must have a paragraph's end in its first {1 - held_out:.0%}; got none")
    return text[:cut], text[cut:]
