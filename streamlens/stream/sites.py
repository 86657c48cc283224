"""The places of the residual stream, in a running model: every site of a layer, as it passes by.

`resid_pre + attn_out = resid_mid` and `resid_mid + mlp_out = resid_post`: a write is what is *added*, after its branch norm
and multiplier. A norm on the stream itself acts after the add, and the site after it is the block's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from streamlens.models.anatomy import MIXING, Add, Anatomy, Write
from streamlens.stream.run import Run, stream_of

See = Callable[[str, int, int, Float[Tensor, "batch pos d_model"]], None]
"""Receives (site, layer, sublayer, value); the value is the model's own tensor, to be read and not kept unless copied."""

WRITES = {"attn": "attn_out", "mlp": "mlp_out", "mixer": "mixer_out", "other": "other_out"}
SITES = ("embed", "resid_pre", "attn_out", "mixer_out", "resid_mid", "mlp_out", "other_out", "resid_post", "final")


@dataclass(frozen=True)
class Written:
    """One addition as it goes into the stream; the tensors are the model's own, to be read and not kept."""

    site: str
    layer: int
    write: Write  # the first of several behind one norm
    add: Add
    value: Float[Tensor, "batch pos d_model"]
    stream: Float[Tensor, "batch pos d_model"]  # that it is added to
    raw: Float[Tensor, "*token d_model"] | None  # what its branch norm read, where it has one


SeeWrite = Callable[[Written], None]


def watch_sites(run: Run, anatomy: Anatomy, wanted: Collection[str], see: See, see_write: SeeWrite | None = None) -> None:
    """Call `see` for each wanted site, and `see_write` for each addition, while `run` runs."""
    watcher = _Watcher(run, anatomy, frozenset(wanted), see, see_write)
    run.on_output(anatomy.embed, lambda _, out, x: watcher.emit("embed", 0, -1, out))
    for path in anatomy.block_paths:
        run.on_input(path, lambda layer, named: watcher.enter(layer, stream_of((), named)))
    if see_write is not None or watcher.wanted - {"embed", "resid_pre", "resid_post", "final"}:
        for path in watcher.places:
            run.on_output(path, lambda layer, out, x, path=path: watcher.passed(layer, path, out, x))
        for path in dict.fromkeys(layer.mid_reader for layer in anatomy.layers if layer.mid_reader):
            run.on_input(path, lambda layer, named, path=path: watcher.reads(layer, path, stream_of((), named)))
    for path in anatomy.block_paths:
        run.on_output(path, lambda layer, out, _: watcher.leave(layer, out))


class _Watcher:
    """Follows the program of each layer with the model's own tensors."""

    def __init__(self, run: Run, anatomy: Anatomy, wanted: frozenset[str], see: See, see_write: SeeWrite | None):
        self.run, self.anatomy, self.wanted, self.see, self.see_write = run, anatomy, wanted, see, see_write
        self.adds: dict[tuple[int, str], tuple[Add, int]] = {}
        self.norms: set[tuple[int, str]] = set()
        self.before_mid: set[tuple[int, str]] = set()  # the last attention or mixer of a layer whose MLP reads what it made
        for index, layer in enumerate(anatomy.layers):
            for segment in layer.segments:
                for add in segment.adds:
                    self.adds |= {(index, path): (add, i) for i, path in enumerate(add.outputs)}
                if segment.norm:
                    self.norms.add((index, segment.norm))
            mixing = [place for add in layer.adds for w, place in zip(add.writes, add.outputs, strict=False) if w.kind in MIXING]
            if mixing and layer.reads_mid:
                self.before_mid.add((index, mixing[-1]))
        self.places = tuple(dict.fromkeys(path for _, path in (*self.adds, *self.norms)))
        self.follow = "resid_mid" in self.wanted or see_write is not None
        self.stream: Tensor | None = None  # with all that was added up to here, but for what is `pending`
        self.pending: list[Tensor] = []
        self.read: Tensor | None = None  # what the writes that run side by side have read
        self.was_mixing = False
        self.mid_is_next = False  # the attention or mixer before it has written

    def emit(self, site: str, layer: int, sublayer: int, value: Tensor) -> None:
        if site in self.wanted:
            self.see(site, layer, sublayer, value.reshape(*self.run.shape, value.shape[-1]) if value.dim() != 3 else value)

    def enter(self, layer: int, stream: Tensor) -> None:
        self.emit("resid_pre", layer, -1, stream)
        # A block may add to its input in place, and what is followed must not change under our hands.
        self._at((stream.clone() if self.anatomy.clones else stream) if self.follow else None)

    def _at(self, stream: Tensor | None) -> None:
        self.stream, self.read, self.pending = stream, stream, []
        self.was_mixing = self.mid_is_next = False

    def _now(self) -> Tensor:
        """The stream as it stands; what a layer adds last is never added here, since the block's own output holds it."""
        while self.pending:
            self.stream = self.stream + self.pending.pop(0)
        return self.stream

    def passed(self, layer: int, path: str, out: Tensor, x: Tensor | None) -> None:
        if (layer, path) in self.adds:
            self._added(layer, path, *self.adds[layer, path], out, x)
        elif (layer, path) in self.norms:
            self._at(out)

    def _added(self, layer: int, path: str, add: Add, index: int, out: Tensor, x: Tensor | None) -> None:
        write, factor = add.writes[index], add.factors[index]
        value = out if factor == 1.0 else out * factor
        self.emit(WRITES[write.kind], layer, write.sublayer, value)
        if not self.follow:
            return
        value = value if value.shape == self.stream.shape else value.reshape(self.stream.shape)
        mixing = write.kind in MIXING
        if self.anatomy.layers[layer].reads_mid and not (mixing and self.was_mixing):
            self.read = self._now()
        self.was_mixing = mixing
        if self.see_write is not None:
            self.see_write(Written(WRITES[write.kind], layer, write, add, value, self.read, x if add.norm else None))
        self.pending.append(value)
        if self.anatomy.clones:  # what follows may be added to it in place
            self._now()
        self.mid_is_next |= (layer, path) in self.before_mid

    def reads(self, layer: int, path: str, x: Tensor) -> None:
        """What a layer's MLP reads is the model's own sum of what entered and what attention wrote."""
        if not self.mid_is_next or path != self.anatomy.layers[layer].mid_reader:
            return
        self.mid_is_next = False
        stream = x if x.shape == self.stream.shape else x.reshape(self.stream.shape)
        if not self.anatomy.clones:  # else the MLP may add to it in place
            self.stream, self.read, self.pending = stream, stream, []
        self.emit("resid_mid", layer, -1, stream)

    def leave(self, layer: int, out: Tensor) -> None:
        self.emit("resid_post", layer, -1, out)
        if layer == self.anatomy.n_layers - 1:
            self.emit("final", self.anatomy.n_layers, -1, out)
