"""Replays: run the rest of the model from a changed stream, without running again what comes before the change.

The model's own forward runs, so that masks, rotary tables and whatever else a family passes to its blocks are its own, also
where several variants share a batch; finished blocks are bypassed and hand on the stream that they gave in the clean pass.
Where blocks also make keys and values for later ones (`Anatomy.bypass` false), finished blocks are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from streamlens.models.anatomy import Add, Anatomy, Write
from streamlens.stream import changes
from streamlens.stream.changes import Change, put
from streamlens.stream.experts import experts_of, without_experts
from streamlens.stream.kept import Keep, Kept
from streamlens.stream.narrow import ALIKE, at_rows
from streamlens.stream.run import Planted, first, stream_of, tensor_name, with_first
from streamlens.stream.streams import by_token

See = Callable[[int, Write, Tensor], None]
"""Receives (layer, write, value at its leaf: z where it has heads, else its raw output), as it passes by."""


@dataclass(frozen=True)
class _Attention:
    """What an attention module returned in the clean pass, but for the tensor, and that tensor's shape."""

    frame: Any
    shape: torch.Size


class Replay(Planted):
    """A context manager over one batch: :meth:`record` the clean pass, then any number of changed ones."""

    def __init__(self, module: nn.Module, anatomy: Anatomy, see: See | None = None, keep: Keep | None = None):
        super().__init__(module, anatomy)
        self.see = see
        self.enlarges = True  # variants may share a batch: no block returns more than its stream
        self._clean = Kept(keep or Keep())  # by layer what its block returned in the clean pass, by (layer, leaf) z
        self._frames: list[Any] = []  # what else each block returned
        self._attention: dict[tuple[int, str], _Attention] = {}
        self._recording = self._keep_attention = False
        self._batch: tuple[Tensor, Tensor | None] = (torch.empty(0, dtype=torch.long), None)
        self._variants: Sequence[Sequence[Change]] = [[]]
        self._resume = 0  # the first layer that runs
        self._leaves: list[int] = [0]  # by variant, the layer whose clean input is where it starts from
        self._read: Tensor | None = None  # rows of the batch, where nothing is asked of others
        self._last_mlps = [w.reader for w in anatomy.layers[-1].writes if w.kind == "mlp" and w.output == w.reader]
        self._whole = {w.reader: w.leaf for _, w in anatomy.writes() if w.n_heads and w.output == w.reader}

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._forget()

    def _forget(self) -> None:
        self._clean.clear()
        self._frames.clear()
        self._attention.clear()
        self._read = None

    def _plant(self) -> None:
        run, anatomy = self._run, self.anatomy
        for path in anatomy.block_paths:
            run.replace(path, self._block)
        for path in self._whole:
            run.replace(path, lambda *args, path=path, **kwargs: self._reader(path, *args, **kwargs))
        for path in self._last_mlps:
            run.replace(path, self._last_mlp)
        outputs = [place for layer in anatomy.layers for add in layer.adds for place in add.outputs]
        for path in dict.fromkeys(outputs):
            run.on_output(path, lambda layer, out, _, path=path: self._output(layer, path, out))
        leaves = {(layer, w.leaf): w for layer, w in anatomy.writes()}
        for path in dict.fromkeys(w.leaf for w in leaves.values() if w.n_heads):
            run.on_input(path, lambda layer, named, path=path: self._input(leaves.get((layer, path)), layer, path, named))
        for path, _ in dict.fromkeys(experts_of(self.module, anatomy).values()):
            run.on_input(path, lambda layer, named, path=path: self._experts(layer, path, named))
        for path in dict.fromkeys(w.leaf for w in leaves.values() if not w.n_heads and self.see):
            run.on_output(path, lambda layer, out, _, path=path: self._seen(leaves.get((layer, path)), layer, out))

    # -- passes --------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def record(
        self, ids: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None = None, attention: bool = False
    ) -> Float[Tensor, "batch pos d_model"]:
        """The clean pass: the unembedding's input, with what each block returned kept.

        `attention` keeps every z too, so that a change of heads does not compute its own layer's attention again.
        """
        self._forget()
        self._batch, self.enlarges = (ids, mask), True
        self._keep_attention = attention and self.anatomy.bypass
        self._recording = True
        try:
            return self._run.hidden(ids, mask)
        finally:
            self._recording = False

    def read_at(self, rows: Int[Tensor, " row"], clean: Float[Tensor, "batch pos d_model"]) -> None:
        """Of what :meth:`each` gives only these rows of `[batch * pos]` are asked for: the last block's MLP runs at no others.

        Where it cannot be seen in the `clean` pass that they are the same then, everything runs as before.
        """
        few = len(rows) * 2 <= clean[..., 0].numel() and torch.finfo(clean.dtype).eps < ALIKE
        if not few or not self._last_mlps or not self.anatomy.bypass:
            return
        self._read = rows
        (found,) = self.each([[Change(self.anatomy.n_layers - 1, "")]])  # nothing changes, but the last block runs
        found, truth = (x.flatten(0, 1)[rows] for x in (found, clean))
        if not float((found - truth).abs().max()) <= ALIKE * float(truth.abs().max()):
            self._read = None

    def without_blocks(self, layers: set[int]) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input where these layers hand on their input (x_out = x_in), everything after recomputed."""
        return self.changed(*(changes.block(self.anatomy, layer) for layer in layers))

    def without_write(self, layer: int, add: Add) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input where `add` puts nothing into the stream; norms on the stream itself still act."""
        return self.changed(*changes.write(layer, add))

    def changed(self, *made: Change) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input under one or several changes together."""
        return self.each([made])[0]

    @torch.no_grad()
    def each(self, variants: Sequence[Sequence[Change]]) -> Float[Tensor, "variant batch pos d_model"]:
        """The same for several variants, each a set of changes, in one pass over as many copies of the batch.

        Where :attr:`enlarges` is false, one after the other.
        """
        if len(variants) > 1 and not self.enlarges:
            return torch.cat([self.each([variant]) for variant in variants])
        self._variants = variants
        self._resume = min(map(self.first, variants))
        self._leaves = [min(self._start(variant), self._resume) for variant in variants]
        ids, mask = self._batch
        n = len(variants)
        try:
            hidden = self._run.hidden(ids.repeat(n, 1), None if mask is None else mask.repeat(n, 1))
        finally:
            self._variants, self._resume, self._leaves = [[]], 0, [0]
        return hidden.unflatten(0, (n, -1))

    def first(self, variant: Sequence[Change]) -> int:
        """The first layer that runs, behind the blocks that are removed one after the other; variants that share it share a pass best."""
        layer = self._start(variant)
        gone = {c.layer for c in variant if c.path == self.anatomy.layers[c.layer].path and c.value is None and c.at is None}
        # What a block hands on beside its stream is the clean pass's only where it starts from the clean stream.
        while layer in gone and self.anatomy.bypass and self.enlarges:
            layer += 1
        return layer

    def _start(self, variant: Sequence[Change]) -> int:
        return min((c.layer for c in variant), default=self.anatomy.n_layers)

    # -- blocks --------------------------------------------------------------------------------------------------
    def _block(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = self._run.layer
        if self._recording:
            output = original(*args, **kwargs)
            self._clean.put(layer, self._kept(first(output)))
            self._frames.append(with_first(output, None))
            self.enlarges &= not _holds_tensors(output)
            return output
        if layer < self._resume and self.anatomy.bypass:
            return with_first(self._frames[layer], self._kept(self._handed_on(layer, stream_of(args, kwargs))))
        made = self._made(layer, self.anatomy.layers[layer].path) if any(self._variants) else []
        if not made:
            return original(*args, **kwargs)
        # A block may add to its input in place.
        entered = stream_of(args, kwargs).clone()
        # What a block hands on beside its stream is the clean pass's only where it starts from the clean stream.
        known = layer == self._resume or not _holds_tensors(self._frames[layer])
        skipped = self.anatomy.bypass and known and len(made) == len(self._variants) and all(c.at is None for _, c in made)
        # Where later blocks take keys and values from this one, they are still made.
        output = self._frames[layer] if skipped else original(*args, **kwargs)
        out = entered.clone() if skipped else first(output).clone()
        for number, change in made:
            put(self._streams(out)[number], change, base=self._streams(entered)[number])
        return with_first(output, out)

    def _handed_on(self, layer: int, stream: Tensor) -> Tensor:
        """What a finished block hands on: to the variants that start behind it what it gave in the clean pass, to others what it got."""
        starts = [leaves == layer + 1 for leaves in self._leaves]
        if not any(starts):
            return stream
        axis, clean = self.anatomy.stream_axes[0], self._clean.get(layer)
        parts = stream.chunk(len(starts), dim=axis)
        return torch.cat([clean if here else part for here, part in zip(starts, parts, strict=True)], dim=axis)

    # -- inside blocks -------------------------------------------------------------------------------------------
    def _reader(self, path: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An attention module; where its input is still the clean one, only its output projection runs, on the clean z changed."""
        layer, leaf = self._run.now, self._whole[path]
        if self._recording and self._keep_attention:
            output = original(*args, **kwargs)
            if (layer, leaf) in self._clean:
                self._attention[layer, leaf] = _Attention(_without_tensors(output), first(output).shape)
            return output
        clean = self._attention.get((layer, leaf))
        # Attention maps may be dropped where the block does not hand them on.
        reused = clean is not None and not _holds_tensors(self._frames[layer]) and {layer, self._resume} == set(self._leaves)
        # Where the last MLPs run at some rows alone, the proof that it may be so is of an attention that runs.
        proven = self._read is None or layer < self.anatomy.n_layers - 1
        if not reused or not proven or not self._first_changed(layer, leaf):
            return original(*args, **kwargs)
        out = self.module.get_submodule(leaf)(torch.cat([self._clean.get((layer, leaf))] * len(self._variants)))
        return with_first(clean.frame, out.reshape(-1, *clean.shape[1:]))

    def _last_mlp(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An MLP of the last layer, at the rows that are read alone where these are told."""
        last = self._run.now == self.anatomy.n_layers - 1
        routed = any(c.expert >= 0 for variant in self._variants for c in variant)
        if self._read is None or not last or routed:
            return original(*args, **kwargs)
        copies = torch.arange(len(self._variants), device=self._read.device)[:, None] * self._batch[0].numel()
        out = at_rows(original, (copies + self._read).flatten(), args, kwargs)
        return original(*args, **kwargs) if out is None else out

    def _first_changed(self, layer: int, leaf: str) -> bool:
        """Whether nothing that this layer does before its attention has changed."""
        before: set[str] = set()
        for add in self.anatomy.layers[layer].adds:
            if any(w.leaf == leaf for w in add.writes):
                break
            before |= {*add.outputs, *(w.leaf for w in add.writes)}
        before.add(self.anatomy.layers[layer].path)
        return not any(c.layer == layer and c.path in before for variant in self._variants for c in variant)

    def _output(self, layer: int, path: str, out: Tensor) -> Tensor | None:
        made = [(number, c) for number, c in self._made(layer, path) if c.part is None and c.expert < 0]
        return self._put(out, made) if made else None

    def _input(self, write: Write | None, layer: int, path: str, named: dict[str, Any]) -> dict[str, Any] | None:
        if write is None:
            return None
        name = tensor_name(named)
        if self._recording and self._keep_attention:
            self._clean.put((layer, path), self._kept(named[name]))
        made = [(number, c) for number, c in self._made(layer, path) if c.part is not None]
        z = self._put(named[name], made) if made else named[name]
        self._seen(write, layer, z)
        return named | {name: z} if made else None

    def _experts(self, layer: int, path: str, named: dict[str, Any]) -> dict[str, Any] | None:
        gone = [(number, c.at, c.expert) for number, c in self._made(layer, path) if c.expert >= 0]
        return without_experts(named, gone, len(self._variants)) if gone else None

    def _seen(self, write: Write | None, layer: int, value: Tensor) -> None:
        if write is not None and self.see is not None:
            self.see(layer, write, value)

    # -- variants ------------------------------------------------------------------------------------------------
    def _made(self, layer: int, path: str) -> list[tuple[int, Change]]:
        """The changes at a place, each with the number of its variant."""
        return [(number, c) for number, variant in enumerate(self._variants) for c in variant if c.layer == layer and c.path == path]

    def _put(self, old: Tensor, made: list[tuple[int, Change]]) -> Tensor:
        new = old.clone(memory_format=torch.contiguous_format)
        for number, change in made:
            put(self._rows(new)[number], change)
        return new

    def _rows(self, x: Tensor) -> Tensor:
        """`[variant, batch, pos, width]` of a tensor over the enlarged batch, whether or not its tokens are flattened."""
        return x.view(len(self._variants), -1, self._run.shape[1], x.shape[-1])

    def _streams(self, x: Tensor) -> Tensor:
        """`[variant, .., batch, pos, d_model]` of what a block is given or returns."""
        if self.anatomy.n_streams == 1:
            return self._rows(x)
        return by_token(x, self.anatomy).unflatten(-3, (len(self._variants), -1)).movedim(-4, 0)

    def _kept(self, stream: Tensor) -> Tensor:
        return stream.clone() if self.anatomy.clones else stream


def _holds_tensors(output: Any) -> bool:
    """Whether a module returned more tensors than its first."""
    return isinstance(output, (tuple, list)) and any(isinstance(v, Tensor) for v in output[1:])


def _without_tensors(output: Any) -> Any:
    return type(output)(None if isinstance(v, Tensor) else v for v in output) if isinstance(output, (tuple, list)) else None
