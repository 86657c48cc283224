"""Norms of writes and heads the slow way: every write is made, one head at a time, in float64, and measured by itself."""

import torch

import streamlens as sl
from streamlens.stream.changes import places


def writes(model, ids):
    """{(site, layer, sublayer, head): (write, stream it is added to)}, both `[pos, d_model]` of one prompt."""
    anatomy, out = model.anatomy, {}
    kept = {name: value[0].double() for name, value in sl.record(model, [ids], sites=_sites(anatomy)).items()}
    inputs = _inputs(model, ids)
    for index, layer in enumerate(anatomy.layers):
        stream, before = kept[f"blocks.{index}.hook_resid_pre"], None
        for segment in layer.segments:
            read = stream
            for add in segment.adds:
                for number, write in enumerate(add.writes[: len(places(add))]):
                    value = kept[f"blocks.{index}.hook_{write.kind}_out{write.sublayer or ''}"]
                    mixing = write.kind in ("attn", "mixer")
                    if layer.reads_mid and not (mixing and before):
                        read = stream
                    before = mixing
                    out[f"{write.kind}_out", index, write.sublayer, -1] = (value, read)
                    for w in add.writes if add.norm else (write,):
                        out |= {key: (head, read) for key, head in _heads(model, index, add, w, number, inputs).items()}
                    stream = stream + value
            if segment.norm:
                stream, before = inputs["out", index, segment.norm], None
    return out


def _heads(model, layer, add, write, number, inputs):
    found, factor = {}, add.factors[number]
    for head in range(write.n_heads):
        z = inputs["in", layer, write.leaf]
        alone = torch.zeros_like(z)
        part = slice(head * write.d_head, (head + 1) * write.d_head)
        alone[..., part] = z[..., part]
        linear = model.module.get_submodule(write.leaf)
        with torch.no_grad():
            value = (linear(alone) - linear(torch.zeros_like(z))).double()
        if add.norm:
            x, form = inputs["in", layer, add.norm].double(), model.anatomy.norms[add.norm]
            x = x - x.mean(-1, keepdim=True) if form.centred else x
            value = value - value.mean(-1, keepdim=True) if form.centred else value
            value = value / (x.square().mean(-1, keepdim=True) + form.eps).sqrt() * (1.0 if form.gain is None else form.gain.double())
        found["head_out", layer, write.sublayer, head] = value * factor
    return found


def _inputs(model, ids):
    """What goes into each leaf and branch norm, and comes out of each norm on the stream, by plain hooks."""
    anatomy, seen, handles, entered = model.anatomy, {}, [], []
    paths = {w.leaf for _, w in anatomy.writes()} | set(anatomy.norms)

    def after(path, args, kwargs, out):
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        seen["in", len(entered) - 1, path] = x.detach().reshape(len(ids), -1).clone()
        value = out[0] if isinstance(out, (tuple, list)) else out
        seen["out", len(entered) - 1, path] = value.detach().reshape(len(ids), -1).double()

    for path in anatomy.block_paths:
        handles.append(model.module.get_submodule(path).register_forward_pre_hook(lambda *_: entered.append(1)))
    for path in paths:
        hook = lambda _, args, kwargs, out, path=path: after(path, args, kwargs, out)  # noqa: E731
        handles.append(model.module.get_submodule(path).register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad():
            model.module(input_ids=torch.tensor([ids]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _sites(anatomy):
    kinds = dict.fromkeys(w.kind for layer in anatomy.layers for w in layer.writes)
    return ["resid_pre", *(f"{kind}_out" for kind in kinds)]


def measures(write, stream):
    """Each measure of a write, `[pos]`."""
    length, size, inner = write.norm(dim=-1), stream.norm(dim=-1), (write * stream).sum(-1)
    along = inner / size
    return {
        "l2": length,
        "relative": length / size,
        "cosine": inner / (length * size),
        "along": along,
        "across": (write - along[:, None] * stream / size[:, None]).norm(dim=-1),
    }
