"""The places of the residual stream, in a running model: every site of a layer, as it passes by.

`resid_pre + attn_out = resid_mid` and `resid_mid + mlp_out = resid_post`: a write is what is *added*, after its branch norm
and multiplier. A norm on the stream itself acts after the add, and the site after it is the block's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from jaxtyping import Float
from torch import Tensor

from streamlens.models.anatomy import Add, Anatomy
from streamlens.stream.changes import places
from streamlens.stream.replay import stream_of
from streamlens.stream.run import Run

See = Callable[[str, int, int, Float[Tensor, "batch pos d_model"]], None]
"""Receives (site, layer, sublayer, value); the value is the model's own tensor, to be read and not kept unless copied."""

WRITES = {"attn": "attn_out", "mlp": "mlp_out", "mixer": "mixer_out", "other": "other_out"}
SITES = ("embed", "resid_pre", "attn_out", "mixer_out", "resid_mid", "mlp_out", "other_out", "resid_post", "final")


def watch_sites(run: Run, anatomy: Anatomy, wanted: Collection[str], see: See) -> None:
    """Call `see` for each wanted site while `run` runs."""
    watcher = _Watcher(run, anatomy, frozenset(wanted), see)
    run.on_output(anatomy.embed, lambda _, out, x: watcher.emit("embed", 0, -1, out))
    for path in anatomy.block_paths:
        run.on_input(path, lambda layer, named: watcher.enter(layer, stream_of((), named)))
    if watcher.wanted - {"embed", "resid_pre", "resid_post", "final"}:
        for path in watcher.places:
            run.on_output(path, lambda layer, out, _, path=path: watcher.passed(layer, path, out))
    for path in anatomy.block_paths:
        run.on_output(path, lambda layer, out, _: watcher.leave(layer, out))


class _Watcher:
    """Follows the program of each layer with the model's own tensors."""

    def __init__(self, run: Run, anatomy: Anatomy, wanted: frozenset[str], see: See):
        self.run, self.anatomy, self.wanted, self.see = run, anatomy, wanted, see
        self.adds: dict[tuple[int, str], tuple[Add, int]] = {}
        self.norms: set[tuple[int, str]] = set()
        self.before_mid: set[tuple[int, str]] = set()  # the last attention or mixer of a layer whose MLP reads what it made
        for index, layer in enumerate(anatomy.layers):
            for segment in layer.segments:
                for add in segment.adds:
                    self.adds |= {(index, path): (add, i) for i, path in enumerate(places(add))}
                if segment.norm:
                    self.norms.add((index, segment.norm))
            mixing = [place for add in layer.adds for w, place in zip(add.writes, places(add), strict=False) if w.kind in ("attn", "mixer")]
            if mixing and layer.reads_mid:
                self.before_mid.add((index, mixing[-1]))
        self.places = tuple(dict.fromkeys(path for _, path in (*self.adds, *self.norms)))
        self.follow = "resid_mid" in self.wanted
        self.stream: Tensor | None = None

    def emit(self, site: str, layer: int, sublayer: int, value: Tensor) -> None:
        if site in self.wanted:
            self.see(site, layer, sublayer, value.reshape(*self.run.shape, value.shape[-1]) if value.dim() != 3 else value)

    def enter(self, layer: int, stream: Tensor) -> None:
        self.emit("resid_pre", layer, -1, stream)
        # A block may add to its input in place, and what is followed must not change under our hands.
        self.stream = (stream.clone() if self.anatomy.clones else stream) if self.follow else None

    def passed(self, layer: int, path: str, out: Tensor) -> None:
        if (layer, path) in self.adds:
            self._added(layer, path, *self.adds[layer, path], out)
        elif (layer, path) in self.norms:
            self.stream = out

    def _added(self, layer: int, path: str, add: Add, index: int, out: Tensor) -> None:
        write, factor = add.writes[index], add.factors[index]
        value = out if factor == 1.0 else out * factor
        self.emit(WRITES[write.kind], layer, write.sublayer, value)
        if self.follow:
            self.stream = self.stream + value.reshape(self.stream.shape)
            if (layer, path) in self.before_mid:
                self.emit("resid_mid", layer, -1, self.stream)

    def leave(self, layer: int, out: Tensor) -> None:
        self.emit("resid_post", layer, -1, out)
        if layer == self.anatomy.n_layers - 1:
            self.emit("final", self.anatomy.n_layers, -1, out)
