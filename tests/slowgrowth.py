"""How the stream grows, the slow way: every write is made by itself, one head at a time; plain hooks and torch's own backward pass."""

import torch

import streamlens as sl
from streamlens.stream.changes import block
from tests import hooked


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
                for number, write in enumerate(add.writes[: len(add.outputs)]):
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


def gradients(module, paths, ids):
    """Norms of the loss's gradient at every block's input and the last one's output, `[layer, pos]`, and the loss, of one prompt."""
    seen, handles = [], []

    def keep(stream):
        stream.retain_grad()
        seen.append(stream)

    for path in paths:
        block = module.get_submodule(path)
        handles.append(block.register_forward_pre_hook(lambda _, a, k: keep(stream_of(a, k)), with_kwargs=True))
    last = module.get_submodule(paths[-1])
    handles.append(last.register_forward_hook(lambda _, args, out: keep(out[0] if isinstance(out, (tuple, list)) else out)))
    try:
        logits = module(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad()
    return torch.stack([s.grad[0].norm(dim=-1) for s in seen]).double().numpy(), float(loss.detach())


def writes_and_predictions(model, ids, made=()):
    """Every block's write, `[layer, pos, d_model]`, and the predictions, of one prompt by itself, under these changes."""
    found, handles, entered = [], [], []

    def after(part, args, kwargs, output):
        found.append(((output[0] if isinstance(output, (tuple, list)) else output) - entered.pop())[0].double())

    with hooked.hooked(model, made), torch.no_grad():
        for path in model.anatomy.block_paths:
            part = model.module.get_submodule(path)
            handles.append(part.register_forward_pre_hook(lambda _, a, k: entered.append(stream_of(a, k).clone()), with_kwargs=True))
            handles.append(part.register_forward_hook(after, with_kwargs=True))
        try:
            logits = model.module(torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
    return torch.stack(found), logits.double().softmax(-1)


def without_the_first_block(model, ids, cut):
    """The largest relative change of each later block's write, and of the predictions, after `cut`, where block 0 lacks up to it."""
    at = torch.tensor([[0 < t <= cut for t in range(len(ids))]])
    clean, base = writes_and_predictions(model, ids)
    changed, moved = writes_and_predictions(model, ids, [block(model.anatomy, 0, at=at)])
    relative = (changed - clean).norm(dim=-1) / clean.norm(dim=-1).clamp_min(1e-6)
    return torch.cat([relative[1:, cut + 1 :].amax(-1), (moved - base).norm(dim=-1)[cut + 1 :].amax()[None]]).numpy()


def stream_of(args, kwargs):
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point())
