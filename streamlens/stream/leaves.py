"""Replays that change writes where the readout takes them: before a branch norm, which then runs again on what is left."""

from __future__ import annotations

from streamlens.stream.replay import Replay


class LeafReplay(Replay):
    """A replay whose changes may stand at the output of every sublayer, and not only at what is added to the stream."""

    def _plant(self) -> None:
        added = {path for layer in self.anatomy.layers for add in layer.adds for path in add.outputs}
        leaves = dict.fromkeys(w.leaf for _, w in self.anatomy.writes() if not w.n_heads and w.leaf not in added)
        for path in leaves:  # before those of the base, so that what is seen at a leaf is what stands there
            self._run.on_output(path, lambda layer, out, _, path=path: self._output(layer, path, out))
        super()._plant()
