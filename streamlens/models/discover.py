"""From candidates to an :class:`Anatomy`: what lies on the residual path is found by watching two tiny forward passes.

The first pass, without gradients, records what goes in and out of every block, norm and sublayer. The second is the
frozen readout with every candidate as a leaf: what receives gradient lies on the path. Then each block is written
down as a short program of additions and norms, with factors fitted to what was recorded. Names decide nothing but labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models import limits
from streamlens.models import structure as tree
from streamlens.models.anatomy import MIXING, Add, Anatomy, Layer, Segment, Write
from streamlens.models.attention import watched_attention
from streamlens.models.norms import NormForm, fit
from streamlens.models.streams import anatomy_of_blocks
from streamlens.models.structure import Structure, structure
from streamlens.stream.readout import Readout
from streamlens.stream.run import Run, stream_of


@dataclass(frozen=True)
class Call:
    """One call of a watched module; tensors are `[tokens, width]` copies, since some families add in place."""

    what: str  # "block", "norm", "reader"
    layer: int
    path: str
    x: Tensor
    y: Tensor
    linear: str | None = None  # reader: the linear map inside that finished last
    linear_y: Tensor | None = None
    z_width: int = 0
    n_heads: int = 0  # reader: heads of the queries that it handed to its attention function


def discover(module: nn.Module, ids: Tensor) -> Anatomy:
    """The anatomy of a causal language model, found on the tiny prompts `ids` `[batch, pos]`.

    Raises :class:`UnsupportedModelError` where the stream cannot be followed.
    """
    found = structure(module)
    weight = module.get_output_embeddings().weight
    calls, n_layers = trace(module, found, ids)
    entered = [c for c in calls if c.what == "block"]
    if not entered or len(entered) != n_layers:
        raise UnsupportedModelError(f"{type(module).__name__}: its blocks could not be followed ({n_layers} applications seen)")
    forms = _norm_forms(module, found, calls)
    if any(len(c.x) != ids.numel() for c in entered):
        blocks = anatomy_of_blocks(module, found, [c.path for c in entered], forms, ids)
        if blocks is not None:
            return blocks
    writes = _candidates(module, calls)
    draft = Anatomy(
        d_model=entered[0].x.shape[-1],
        n_vocab=weight.shape[0],
        embed=found.embed,
        pos_embeds=found.pos_embeds,
        layers=tuple(Layer(c.path, (Segment(tuple(Add((w,), (1.0,)) for w in writes[c.layer])),)) for c in calls if c.what == "block"),
        readers=found.readers,
        norms=forms,
        unembed=found.unembed,
        unembed_bias=tree.has_bias(module.get_output_embeddings()),
        path_norms=frozenset((layer, path) for layer in range(-1, n_layers + 1) for path in forms),  # until the readout says which
    )
    draft = replace(draft, pos_embeds=_positions(module, draft, ids))
    reached, clones = _on_path(module, draft, ids)
    path_norms = frozenset((layer, path) for layer, what, path in reached if what == "norm")
    layers = tuple(
        _layer(layer, [c for c in calls if c.layer == layer], writes[layer], reached, path_norms, module) for layer in range(n_layers)
    )
    return replace(
        draft,
        clones=clones,
        path_norms=path_norms,
        pos_embeds=tuple(p for p in draft.pos_embeds if (-1, "embed", p) in reached),
        layers=layers,
    )


@torch.no_grad()
def trace(module: nn.Module, found: Structure, ids: Tensor) -> tuple[list[Call], int]:
    """Every call of a block, of a norm outside the sublayers and of a sublayer, in the order in which they end."""
    calls: list[Call] = []
    linears: dict[str, tuple[str, int, Tensor]] = {}
    opened: dict[tuple[str, str], Tensor] = {}
    heads: list[int] = []  # of the attention function's calls since the last sublayer ended
    with Run(module, found.blocks, found.unembed) as run, watched_attention(module, lambda q, *_: heads.append(q.shape[1])):

        def watch(what: str, path: str) -> None:
            run.on_input(path, lambda _, named: opened.__setitem__((what, path), _flat(stream_of((), named))))
            run.on_output(path, lambda layer, out, _: calls.append(close(what, layer, path, out)))

        def close(what: str, layer: int, path: str, out: Tensor) -> Call:
            x, last = opened.pop((what, path)), linears.pop(path, None)
            layer = layer if what == "block" or run.inside else -1
            if what != "reader" or last is None:
                return Call(what, layer, path, x, _flat(out))
            n_heads = heads[0] if heads and len(set(heads)) == 1 else 0
            heads.clear()
            return Call(what, layer, path, x, _flat(out), last[0], last[2], last[1], n_heads)

        for reader in found.readers:
            for name, inner in module.get_submodule(reader).named_modules(prefix=reader):
                if tree.is_linear(inner):
                    run.on_output(
                        name, lambda _, out, x, name=name, reader=reader: linears.__setitem__(reader, (name, x.shape[-1], _flat(out)))
                    )
        for what, paths in (("reader", found.readers), ("norm", found.norms), ("block", found.blocks)):
            for path in paths:
                watch(what, path)
        run.hidden(ids)
        return calls, run.layer + 1


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).clone()


def _norm_forms(module: nn.Module, found: Structure, calls: Iterable[Call]) -> dict[str, NormForm]:
    """The forms of the norms that were called; one that fits no form is left out, and then the proof at load fails if it matters."""
    widths = {c.path: (c.x.shape[-1], c.x.dtype, c.x.device) for c in calls if c.what == "norm"}
    forms = {path: fit(module.get_submodule(path), *widths[path]) for path in found.norms if path in widths}
    return {path: form for path, form in forms.items() if form is not None}


def _candidates(module: nn.Module, calls: Iterable[Call]) -> dict[int, list[Write]]:
    """Every sublayer call as a possible write, by layer."""
    n_heads = getattr(tree.text_config(module), "num_attention_heads", 0)
    found: dict[int, list[Write]] = {}
    for call in calls:
        if call.what == "block":
            found.setdefault(call.layer, [])
        elif call.what == "reader":
            found.setdefault(call.layer, []).append(_write(module, call, call.n_heads or (n_heads if isinstance(n_heads, int) else 0)))
    return found


def _write(module: nn.Module, call: Call, n_heads: int) -> Write:
    inner = module.get_submodule(call.path)
    kind = tree.kind_of(inner, call.path.split(".", 2)[-1], tree.family(module))
    passes = tree.passes_residual(inner) and call.linear is not None
    output = call.linear if passes else call.path
    whole = passes or (call.linear_y is not None and call.linear_y.shape == call.y.shape and torch.equal(call.linear_y, call.y))
    n_heads //= tree.MAPS_A_HEAD.get(type(inner).__name__, 1)
    if kind == "attn" and whole and n_heads and call.z_width % n_heads == 0:
        bias = tree.has_bias(module.get_submodule(call.linear))
        return Write(kind, 0, call.path, output, call.linear, n_heads, call.z_width // n_heads, bias, call.linear)
    return Write(kind, 0, call.path, output, output, down=call.linear if whole else None)


def _positions(module: nn.Module, draft: Anatomy, ids: Tensor) -> tuple[str, ...]:
    """Candidates whose output can be an addend of the embedding: one vector a position."""
    if not draft.pos_embeds:
        return ()
    shapes: dict[str, torch.Size] = {}
    embedded: list[Tensor] = []

    def see(path: str, out: Tensor) -> None:
        # What hands on the embedding itself (a place for images, say) adds nothing.
        if isinstance(out, Tensor) and out.is_floating_point() and not (out.shape == embedded[0].shape and torch.equal(out, embedded[0])):
            shapes[path] = out.shape

    with torch.no_grad(), Run.of(module, draft) as run:
        run.on_output(draft.embed, lambda _, out, x: embedded.append(out.clone()))
        for path in draft.pos_embeds:
            run.on_output(path, lambda _, out, x, path=path: see(path, out))
        run.hidden(ids)
    fits = ((*ids.shape, draft.d_model), (1, ids.shape[1], draft.d_model), (ids.shape[1], draft.d_model))
    return tuple(path for path in draft.pos_embeds if shapes.get(path) in fits)


def _on_path(module: nn.Module, draft: Anatomy, ids: Tensor) -> tuple[set[tuple[int, str, str]], bool]:
    """The places that a readout in a random direction reaches, and whether the family adds in place."""
    try:
        return _reached(module, draft, ids), False
    except RuntimeError as error:
        if "in-place" not in str(error) and "inplace" not in str(error):
            raise
    return _reached(module, replace(draft, clones=True), ids), True


def _reached(module: nn.Module, draft: Anatomy, ids: Tensor) -> set[tuple[int, str, str]]:
    reached = set()
    with Readout(module, draft) as readout:
        hidden = readout.forward(ids)
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
        readout.pull(hidden, direction, lambda key, _, g: reached.add(key) if bool(g.any()) else None)
    return reached


def _layer(layer: int, calls: list[Call], writes: list[Write], reached: set, path_norms: frozenset, module: nn.Module) -> Layer:
    """One block as a program: writes go in with their factors, norms on a branch belong to it, norms on the stream end a segment."""
    block, dtype = next(c for c in calls if c.what == "block"), module.get_output_embeddings().weight.dtype
    by_reader = {w.reader: w for w in writes if (layer, "write", w.leaf) in reached}
    program = _Program(layer, block, dtype, _own_numbers(module.get_submodule(block.path)))
    after_mixing = calls
    for i, call in enumerate(calls):
        if call.what == "reader" and call.path in by_reader:
            write = by_reader[call.path]
            program.write(write, call.linear_y if write.output == call.linear and write.output != write.reader else call.y)
            if write.kind in MIXING:
                after_mixing = calls[i + 1 :]
        elif call.what == "norm" and (layer, call.path) in path_norms:
            program.norm(call)
    segments = program.finish()
    return Layer(block.path, segments, next((c.path for c in after_mixing if c.what != "block" and program.is_mid(c.x)), None))


class _Program:
    """Fits a block's additions and norms to what was recorded."""

    def __init__(self, layer: int, block: Call, dtype: torch.dtype, numbers: tuple[float, ...]):
        self.layer, self.block, self.dtype, self.numbers = layer, block, dtype, numbers
        self.stream, self.mid = block.x, None
        self.segments: list[Segment] = []
        self.pending: list[tuple[tuple[Write, ...], str | None, Tensor]] = []  # writes, their branch norm, what it gives
        self.counts: dict[str, int] = {}

    def write(self, write: Write, value: Tensor) -> None:
        ordinal = self.counts.get(write.kind, 0)
        self.counts[write.kind] = ordinal + 1
        self.pending.append(((replace(write, sublayer=ordinal),), None, value))

    def norm(self, call: Call) -> None:
        bare = [p for p in self.pending if p[1] is None]
        # One write's norm, or that of several summed, which may have passed norms of their own (Gemma-4's experts beside its MLP).
        latest = [self.pending[-n:] for n in range(2, len(self.pending) + 1)]
        for branch in (*([p] for p in bare), bare, *latest):
            if branch and self._fits(call.x, [value for _, _, value in branch]) is not None:
                writes = tuple(w for ws, _, _ in branch for w in ws)
                self.pending = [p for p in self.pending if p not in branch] + [(writes, call.path, call.y)]
                return
        self._close_segment(call.x, call.path)
        self.stream = call.y

    def finish(self) -> tuple[Segment, ...]:
        self._close_segment(self.block.y, None)
        return tuple(s for s in self.segments if s.adds or s.norm or s.scale != 1.0)

    def is_mid(self, x: Tensor) -> bool:
        """Whether `x` is the stream as it stands after the last attention or mixer."""
        return self.mid is not None and x.shape == self.mid.shape and _close(x, self.mid, self.dtype)

    def _close_segment(self, target: Tensor, norm: str | None) -> None:
        values = [self.stream, *(value for _, _, value in self.pending)]
        if any(v.shape != target.shape for v in values):
            shapes = ", ".join(str(list(v.shape)) for v in (target, *values))
            raise UnsupportedModelError(
                f"layer {self.layer} ({self.block.path}): the stream is not one vector a token; its block and writes give {shapes}"
            )
        factors = self._fits(target, values)
        if factors is None:
            writes = ", ".join(w.output for ws, _, _ in self.pending for w in ws) or "none found"
            raise UnsupportedModelError(
                f"layer {self.layer} ({self.block.path}): the stream is not its input plus its writes ({writes}); "
                f"off by {self._misfit(target, values):.2g} of its largest value"
            )
        scale = factors[0]
        stream = self.stream
        for (writes, _, value), factor in zip(self.pending, factors[1:], strict=True):
            stream = stream + factor / scale * value
            if any(w.kind in MIXING for w in writes):
                self.mid = stream
        adds = tuple(
            Add(writes, (factor / scale,) * len(writes), branch)
            for (writes, branch, _), factor in zip(self.pending, factors[1:], strict=True)
        )
        self.segments.append(Segment(adds, scale, norm))
        self.pending = []

    def _fits(self, target: Tensor, values: list[Tensor]) -> list[float] | None:
        """Factors with which `values` sum to `target`; ones where ones do."""
        if any(v.shape != target.shape for v in values):
            return None
        total = sum(v.double() for v in values)
        # What rounding can do at each coordinate: a real stream has a few huge ones, and they must not decide for all.
        noise = sum(v.double().abs() for v in values) * torch.finfo(self.dtype).eps
        near = _close(total, target, self.dtype)
        if near and (torch.finfo(self.dtype).bits > 16 or bool(((total - target.double()).abs() <= noise).all())):
            return [1.0] * len(values)
        noise = noise.flatten().clamp_min(1e-30)
        basis = torch.stack([v.double().flatten() / noise for v in values], dim=1)
        solution = torch.linalg.lstsq(basis.cpu(), (target.double().flatten() / noise)[:, None].cpu()).solution[:, 0]
        factors = [_snapped(f, self.numbers) for f in solution.tolist()]
        fitted = sum(f * v.double() for f, v in zip(factors, values, strict=True))
        if near and not bool(((fitted - target.double()).abs().flatten() <= 2 * noise).all()):
            return [1.0] * len(values)  # no factor explains what is off, and none may excuse it
        return factors if _close(fitted, target, self.dtype) else None

    def _misfit(self, target: Tensor, values: list[Tensor]) -> float:
        return float((sum(v.double() for v in values) - target.double()).abs().max() / target.double().abs().max())


def _own_numbers(block: nn.Module) -> tuple[float, ...]:
    """The numbers that a block holds as its attributes: multipliers may be among them."""
    return tuple(value for value in vars(block).values() if isinstance(value, float) and value)


def _snapped(factor: float, numbers: tuple[float, ...] = ()) -> float:
    """A fitted 0.40000001 is the 0.4 of a config, or the block's own number; what neither is near stays as measured."""
    near = [n for n in (*numbers, float(f"{factor:.4g}")) if abs(n - factor) <= 1e-6 * abs(factor)]
    return near[0] if near else factor


def _close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    return bool((a.double() - b.double()).abs().max() <= limits.FIT[dtype] * b.double().abs().max())
