"""Layer removal by replay: what breaks when a block, or what attention or MLP adds, is taken away.

`remove` sets to zero what a sublayer adds to the stream (after its branch norm, multiplier and biases), or hands on a block's
input as its output; everything after is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from streamlens.measure import metrics as m
from streamlens.measure.places import at, flat_index, with_top
from streamlens.models.anatomy import Add, Anatomy
from streamlens.prompts import NO_READOUTS, Readouts, TokenBatch
from streamlens.stream.replay import Replay, hooked_removal, places
from streamlens.stream.unembed import Unembed

UNITS = ("block", "attn", "mlp")

KEPT_ELEMENTS = 2**27
"""Elements of the unembedding's input that are kept at once, over the variants: 512 MiB in float32."""


@dataclass(frozen=True)
class Variant:
    """One change: a layer's block, or one of its additions."""

    layer: int
    sublayer: int = -1
    add: Add | None = None


@dataclass(frozen=True)
class Removal:
    """Metrics of one batch under every variant; a value is nan where a metric's inputs are absent."""

    prompt: np.ndarray  # [row] rows of the metrics without a target
    position: np.ndarray
    at_position: dict[str, tuple[Float64[np.ndarray, " row"], Float64[np.ndarray, "variant row"]]]  # metric: clean, changed
    readouts: Readouts  # [target] rows of the metrics with a target
    at_target: dict[str, tuple[Float64[np.ndarray, " target"], Float64[np.ndarray, "variant target"]]]
    overflowed: int = 0  # rows, clean and changed, whose stream is not finite: their metrics mean nothing


def variants(anatomy: Anatomy, unit: str, layers: Sequence[int]) -> tuple[Variant, ...]:
    """The changes that `unit` asks for at `layers`. A layer without such a sublayer has none, nor one whose norm covers other kinds too."""
    if unit == "block":
        return tuple(Variant(layer) for layer in layers)
    adds = ((layer, add) for layer in layers for add in anatomy.layers[layer].adds)
    return tuple(Variant(layer, add.writes[0].sublayer, add) for layer, add in adds if {w.kind for w in add.writes} == {unit})


def remove_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    changes: Sequence[Variant],
    places: tuple[np.ndarray, np.ndarray],
    readouts: Readouts,
    wanted: tuple[str, ...],
) -> Removal:
    """Metrics at `places` (prompt, position) and `readouts`, whose prompts are all in `batch`, under each change."""
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    with Replay(module, anatomy) as replay:
        clean = replay.record(batch.ids, batch.mask)
        readouts = with_top(readouts, batch, clean, unembed)
        rows = _Rows(batch, places, readouts)
        table = _Table(len(changes), rows, wanted)
        clean_rows = rows.of(clean)
        overflowed = _overflowed([clean_rows])
        for start, hidden in _replayed(replay, changes, rows):
            overflowed += _overflowed(hidden)
            _measure(unembed, rows, clean_rows, hidden, start, table, wanted)
    return Removal(*places, table.at_position, readouts, table.at_target, overflowed)


def _overflowed(hidden: list[Tensor]) -> int:
    return sum(int((~torch.isfinite(h)).any(-1).sum()) for h in hidden)


def remove_by_hooks(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, places: tuple[np.ndarray, np.ndarray], wanted: tuple[str, ...]
) -> Removal:
    """The slow, obvious way to :func:`remove_batch`'s blocks: a full forward pass a block, whose output a hook replaces by its input.

    The reference of tests and benchmark; the metrics are by the same code.
    """
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    rows = _Rows(batch, places, NO_READOUTS)
    table = _Table(anatomy.n_layers, rows, wanted)
    with torch.no_grad(), hooked_removal(module, anatomy) as run:
        clean = rows.of(run.hidden(batch.ids, batch.mask))
    hidden = []
    for layer in range(anatomy.n_layers):
        with torch.no_grad(), hooked_removal(module, anatomy, removed={layer}) as run:
            hidden.append(rows.of(run.hidden(batch.ids, batch.mask)))
    _measure(unembed, rows, clean, hidden, 0, table, wanted)
    return Removal(*places, table.at_position, rows.readouts, table.at_target)


def replay_error(module: nn.Module, anatomy: Anatomy, batch: TokenBatch, change: Variant) -> float:
    """How far a removal by replay is from a plainly hooked forward pass, over the largest value at the unembedding's input."""
    zeroed = {(change.layer, path) for path in places(change.add)} if change.add else set()
    with torch.no_grad(), hooked_removal(module, anatomy, removed=set() if change.add else {change.layer}, zeroed=zeroed) as run:
        truth = run.hidden(batch.ids, batch.mask)[batch.mask]
    with Replay(module, anatomy) as replay:
        replay.record(batch.ids, batch.mask)
        hidden = _changed(replay, change)[batch.mask]
    return float((hidden - truth).abs().max() / truth.abs().max())


class _Rows:
    """The (prompt, position)s at which anything is read, each once, ordered by place in the batch."""

    def __init__(self, batch: TokenBatch, places: tuple[np.ndarray, np.ndarray], readouts: Readouts):
        at_place, at_target = flat_index(batch, *places), flat_index(batch, readouts.prompt, readouts.position)
        self.flat = np.unique(np.concatenate([at_place, at_target]))
        self.place = np.searchsorted(self.flat, at_place)  # index into flat of each place
        self.target = np.searchsorted(self.flat, at_target)
        self.readouts = readouts
        following = torch.full(batch.ids.shape, -1)
        following[:, :-1] = torch.where(batch.mask[:, 1:], batch.ids[:, 1:], -1)
        self.following = following.reshape(-1)[torch.from_numpy(self.flat)]

    def of(self, hidden: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "row d_model"]:
        return at(hidden, self.flat)


class _Table:
    def __init__(self, n_changes: int, rows: _Rows, wanted: tuple[str, ...]):
        def empty(n: int) -> tuple[np.ndarray, np.ndarray]:
            return np.full(n, np.nan), np.full((n_changes, n), np.nan)

        self.at_position = {name: empty(len(rows.place)) for name in m.POSITION_METRICS if name in wanted}
        self.at_target = {name: empty(len(rows.target)) for name in m.TARGET_METRICS if name in wanted}


def _changed(replay: Replay, change: Variant) -> Float[Tensor, "batch pos d_model"]:
    return replay.without_blocks({change.layer}) if change.add is None else replay.without_write(change.layer, change.add)


def _replayed(replay: Replay, changes: Sequence[Variant], rows: _Rows) -> Iterator[tuple[int, list[Tensor]]]:
    """Groups of changed unembedding inputs, at the rows that are read, as many as may be kept at once."""
    group: list[Tensor] = []
    start = 0
    for number, change in enumerate(changes):
        group.append(rows.of(_changed(replay, change)))
        if (len(group) + 1) * group[0].numel() > KEPT_ELEMENTS:
            yield start, group
            start, group = number + 1, []
    if group:
        yield start, group


@torch.no_grad()
def _measure(
    unembed: Unembed, rows: _Rows, clean: Tensor, hidden: list[Tensor], start: int, table: _Table, wanted: tuple[str, ...]
) -> None:
    """Chunk by chunk of rows, so that the clean logits are made once and no more than a chunk of them is held."""
    for chunk in unembed.chunks(len(clean)):
        base = m.Clean(unembed.logits(clean[chunk]))
        view = _Chunk(rows, chunk, clean.device)
        view.put(table.at_position, view.place, m.clean_position_metrics(base, view.following, wanted))
        view.put(table.at_target, view.target, m.target_metrics(base.logits, *view.targets, wanted))
        for number, changed in enumerate(hidden, start):
            logits = unembed.logits(changed[chunk])
            view.put(table.at_position, view.place, m.position_metrics(base, logits, view.following, wanted), number)
            view.put(table.at_target, view.target, m.target_metrics(logits, *view.targets, wanted), number)


class _Chunk:
    """The table's rows whose place is within a slice of the rows that are read."""

    def __init__(self, rows: _Rows, chunk: slice, device: torch.device):
        def inside(index: np.ndarray) -> tuple[np.ndarray, Tensor]:
            table_rows = np.flatnonzero((index >= chunk.start) & (index < chunk.stop))
            return table_rows, torch.from_numpy(index[table_rows] - chunk.start).to(device)

        self.following = rows.following[chunk].to(device)
        self.place, self.target = inside(rows.place), inside(rows.target)
        target, versus = (torch.from_numpy(v[self.target[0]]).to(device) for v in (rows.readouts.target, rows.readouts.versus))
        self.targets = (self.target[1], target, versus)

    def put(self, store: dict, where: tuple[np.ndarray, Tensor], values: dict[str, Tensor], number: int | None = None) -> None:
        """Values a row of the chunk (or, with a target, a row of the table already) into the table."""
        table_rows, index = where
        for name, value in values.items():
            column = store[name][0] if number is None else store[name][1][number]
            column[table_rows] = (value if name in m.TARGET_METRICS else value[index]).double().cpu().numpy()
