"""Raw tensors of a forward pass under TransformerLens' names: the way out for what no call answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.errors import InputError
from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.attention import returned_pattern, watched_attention
from streamlens.prompts import TokenBatch
from streamlens.stream.run import Run
from streamlens.stream.sites import SITES, watch_sites

ATTENTION = {"q": "hook_rot_q", "k": "hook_rot_k", "v": "hook_v", "pattern": "hook_pattern"}
"""q and k as they enter the scores, rotated where the model rotates."""

RECORDED = (*(s for s in SITES if s != "final"), "pos_embed", "z", *ATTENTION, "post")

See = Callable[[str, Tensor], None]


def names(anatomy: Anatomy, site: str) -> tuple[str, ...]:
    """TransformerLens' names of a site, one a layer that has it; a second attention or MLP of a block is `attn1`, `mlp1`."""
    if site == "embed":
        return ("hook_embed",)
    if site == "pos_embed":
        return ("hook_pos_embed",)[: len(anatomy.pos_embeds)]
    if site in ("resid_pre", "resid_post"):
        return tuple(f"blocks.{i}.hook_{site}" for i in range(anatomy.n_layers))
    if site == "resid_mid":
        return tuple(f"blocks.{i}.hook_{site}" for i, layer in enumerate(anatomy.layers) if layer.reads_mid)
    writes = anatomy.writes() if not site.endswith("_out") else _added(anatomy)
    return tuple(name for layer, write in writes if (name := _write_name(layer, write, site)))


def _added(anatomy: Anatomy) -> Iterator[tuple[int, Write]]:
    """The writes that are added by themselves; several behind one norm are added as one, under the first one's name."""
    for index, layer in enumerate(anatomy.layers):
        for add in layer.adds:
            yield from ((index, write) for write, _ in zip(add.writes, add.outputs, strict=False))


def resolve(anatomy: Anatomy, sites: Collection[object]) -> dict[str, str]:
    """The asked-for names and their sites; a site stands for all of its names. Raises InputError for what this model has not."""
    every = {name: site for site in RECORDED for name in names(anatomy, site)}
    chosen: dict[str, str] = {}
    for site in sites:
        found = {name: s for name, s in every.items() if site in (s, name)}
        if not found:
            has = [s for s in RECORDED if names(anatomy, s)]
            raise InputError(f"sites must be among {', '.join(has)}, or a full name such as 'blocks.0.hook_resid_pre'; got {site!r}")
        chosen |= found
    if not chosen:
        raise InputError("sites must name at least one site; got none")
    return chosen


@torch.no_grad()
def record_batch(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, chosen: dict[str, str]
) -> dict[str, Float[Tensor, "batch pos *rest"]]:
    """The chosen tensors of one batch, on the CPU; pattern is `[batch, pos, head, source]`.

    Raises :class:`InputError` for an attention that shows none.
    """
    kept: dict[str, Tensor] = {}

    def see(name: str, value: Tensor) -> None:
        if name in chosen:
            kept[name] = value.detach().to("cpu", copy=True)

    sites = set(chosen.values())
    with Run.of(module, anatomy) as run:
        watch_sites(run, anatomy, sites & set(SITES), lambda site, layer, sub, value: see(_site_name(site, layer, sub), value))
        _watch_inside(run, anatomy, sites, see)
        attention = sites & set(ATTENTION)
        with watched_attention(module, lambda *qkvp: _seen(run.layer, qkvp, see)) if attention else nullcontext():
            if "pattern" in attention:
                _watch_returned(run, anatomy, see)
            run.hidden(batch.ids, batch.mask)
    missing = sorted(chosen.keys() - kept.keys(), key=lambda n: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", n)])
    if missing:
        raise InputError(
            f"sites: {missing[0]} cannot be had of this model: its attention neither looks its function up nor returns its weights"
        )
    return kept


def _watch_inside(run: Run, anatomy: Anatomy, sites: set[str], see: See) -> None:
    """What stands inside sublayers: z before the output projection, the MLP's activation before the down projection."""
    if "pos_embed" in sites:
        for path in anatomy.pos_embeds:
            run.on_output(path, lambda _, out, x: see("hook_pos_embed", out.expand(*run.shape, out.shape[-1])))
    inputs: dict[str, dict[int, Write]] = {}
    for layer, write in anatomy.writes():
        if "z" in sites and write.n_heads:
            inputs.setdefault(write.leaf, {})[layer] = write
        if "post" in sites and write.kind == "mlp" and write.down:
            inputs.setdefault(write.down, {})[layer] = write

    def inside(layer: int, value: Tensor, write: Write) -> None:
        value = value.reshape(*run.shape, -1)
        see(
            _write_name(layer, write, "z" if write.n_heads else "post"),
            value.unflatten(-1, (write.n_heads, -1)) if write.n_heads else value,
        )

    for path, by_layer in inputs.items():
        run.on_output(path, lambda layer, out, x, by_layer=by_layer: inside(layer, x, by_layer[layer]) if layer in by_layer else None)


def _seen(layer: int, qkvp: tuple[Tensor, ...], see: See) -> None:
    for site, value in zip(ATTENTION, qkvp, strict=True):
        see(f"blocks.{layer}.attn.{ATTENTION[site]}", value.transpose(1, 2))


def _watch_returned(run: Run, anatomy: Anatomy, see: See) -> None:
    for path, n_heads in {w.reader: w.n_heads for _, w in anatomy.writes() if w.kind == "attn" and w.n_heads}.items():

        def returned(layer: int, output: object, n_heads: int = n_heads) -> None:
            pattern = returned_pattern(output, n_heads)
            if pattern is not None:
                see(f"blocks.{layer}.attn.{ATTENTION['pattern']}", pattern.transpose(1, 2))

        run.on_whole_output(path, returned)


def _site_name(site: str, layer: int, sublayer: int) -> str:
    if site == "embed":
        return "hook_embed"
    return f"blocks.{layer}.hook_{site}{sublayer if sublayer > 0 else ''}"


def _write_name(layer: int, write: Write, site: str) -> str | None:
    """The name of a write's own sites, None where it has not this one."""
    number = write.sublayer or ""
    if site == f"{write.kind}_out":
        return f"blocks.{layer}.hook_{site}{number}"
    if write.kind == "attn" and ((site == "z" and write.n_heads) or site in ATTENTION):
        return f"blocks.{layer}.attn{number}.{ATTENTION.get(site, 'hook_z')}"
    if site == "post" and write.kind == "mlp" and write.down:
        return f"blocks.{layer}.mlp{number}.hook_post"
    return None
