"""Where one model reads and writes its residual stream: plain facts, found by `discover` and proven by `verify`.

Paths are module paths relative to the model (`model.layers.3.self_attn`). A layer is one *application* of a block, in
execution order, so that a block that is applied twice is two layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from streamlens.models.norms import NormForm

MIXING = ("attn", "mixer")
"""Kinds of writes that carry something from one position to another."""


@dataclass(frozen=True)
class Write:
    """One sublayer's addition to the stream.

    `reader` is the module at whose input the stream is read, `output` the module whose output is the raw write, `leaf`
    the module at whose input (`n_heads` > 0: the concatenated heads z) or output the frozen readout takes the write.
    """

    kind: str
    sublayer: int  # tells two writes of one kind in one layer apart
    reader: str
    output: str
    leaf: str
    n_heads: int = 0  # 0: heads cannot be had
    d_head: int = 0
    bias: bool = False  # the output projection `leaf` has a bias (heads only)
    down: str | None = None  # the last linear map of the sublayer, where there is one

    def coordinates(self, head: int) -> slice:
        """One head's coordinates of z."""
        return slice(head * self.d_head, (head + 1) * self.d_head)


@dataclass(frozen=True)
class Add:
    """`factor * norm(sum of writes)` goes into the stream; without a norm each write has its own factor."""

    writes: tuple[Write, ...]
    factors: tuple[float, ...]
    norm: str | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The modules whose output is what goes into the stream, but for its factor."""
        return (self.norm,) if self.norm else tuple(w.output for w in self.writes)


@dataclass(frozen=True)
class Segment:
    """`stream <- norm(scale * (stream + adds))`: a stretch of a block up to a norm on the stream itself or the block's end."""

    adds: tuple[Add, ...]
    scale: float = 1.0
    norm: str | None = None


@dataclass(frozen=True)
class Layer:
    """One application of the block at `path`."""

    path: str
    segments: tuple[Segment, ...]
    mid_reader: str | None = None  # the first module that reads the stream between attention and the MLP; parallel blocks have none

    @property
    def reads_mid(self) -> bool:
        return self.mid_reader is not None

    @property
    def adds(self) -> tuple[Add, ...]:
        return tuple(add for segment in self.segments for add in segment.adds)

    @property
    def writes(self) -> tuple[Write, ...]:
        return tuple(write for add in self.adds for write in add.writes)

    @property
    def stream_norms(self) -> tuple[str, ...]:
        return tuple(segment.norm for segment in self.segments if segment.norm)


@dataclass(frozen=True)
class LogitMap:
    """From the unembedding's output to the printed logits: `cap * tanh(multiplier * u / cap)`, linear without a cap."""

    multiplier: float = 1.0
    cap: float | None = None


@dataclass(frozen=True)
class Anatomy:
    """Everything that the engine needs to know of a model."""

    d_model: int
    n_vocab: int
    embed: str
    pos_embeds: tuple[str, ...]
    layers: tuple[Layer, ...]
    readers: tuple[str, ...]  # modules into whose input no gradient goes
    norms: Mapping[str, NormForm] = field(repr=False)  # every norm outside the readers; those on the path are frozen
    path_norms: frozenset[tuple[int, str]] = frozenset()  # (layer, path) of the norms that lie on the residual path
    unembed: str = ""
    unembed_bias: bool = False
    logits: LogitMap = LogitMap()
    clones: bool = False  # the family adds in place, so writes are passed on as copies
    n_streams: int = 1  # vectors a token; where there are several, no write is known and only whole blocks can be changed
    stream_axes: tuple[int, int] = (0, 1)  # which axes of what a block is given are batch and position
    bypass: bool = True  # finished blocks can be skipped in a replay (false where they also make keys and values for later ones)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def block_paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer.path for layer in self.layers))

    def writes(self) -> Iterator[tuple[int, Write]]:
        """Each write with its layer, in execution order."""
        for index, layer in enumerate(self.layers):
            for write in layer.writes:
                yield index, write
