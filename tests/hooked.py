"""Interventions by plain torch hooks on an otherwise ordinary forward pass: the slow and obvious reference of every replay."""

from collections import Counter
from contextlib import contextmanager

import torch


def logits(model, made, ids, mask=None):
    """What the model prints under these changes, every block computed."""
    with hooked(model, made), torch.no_grad():
        kwargs = {} if mask is None or bool(mask.all()) else {"attention_mask": mask.long()}
        return model.module(input_ids=ids, use_cache=False, **kwargs).logits


@contextmanager
def hooked(model, made):
    """`made` are streamlens' changes, read here by other code: blocks, outputs, and slices of a module's input."""
    layers, module = model.anatomy.layers, model.module
    seen, handles = Counter(), []

    def before(change, part, args, kwargs):
        seen[id(change)] += 1
        if change.part is None or not _is_its_turn(layers, change, seen[id(change)]):
            return None
        name, x = _tensor(args, kwargs)
        x = x.clone()
        x[..., change.part] = _mixed(x[..., change.part], change, 0.0)
        return ((x, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: x})

    def after(change, part, args, kwargs, output):
        if change.part is not None or not _is_its_turn(layers, change, seen[id(change)]):
            return None
        out = output[0] if isinstance(output, (tuple, list)) else output
        base = entered.pop(id(change)) if change.path == layers[change.layer].path else 0.0
        new = _mixed(out, change, base)
        return type(output)((new, *output[1:])) if isinstance(output, (tuple, list)) else new

    entered = {}

    def keep(change, part, args, kwargs):
        entered[id(change)] = _tensor(args, kwargs)[1].clone()

    for change in made:
        part = module.get_submodule(change.path)
        handles.append(part.register_forward_pre_hook(lambda *a, c=change: keep(c, *a), with_kwargs=True))
        handles.append(part.register_forward_pre_hook(lambda *a, c=change: before(c, *a), with_kwargs=True))
        handles.append(part.register_forward_hook(lambda *a, c=change: after(c, *a), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_its_turn(layers, change, calls):
    block = layers[change.layer].path
    return calls == 1 + sum(layer.path == block for layer in layers[: change.layer])


def _tensor(args, kwargs):
    for name, value in (*((None, a) for a in args), *kwargs.items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return name, value
    raise AssertionError("no tensor among the arguments")


def _mixed(old, change, base):
    shape = old.shape
    if old.dim() == 2 and change.at is not None:
        old = old.reshape(*change.at.shape, -1)
    new = torch.zeros_like(old) + base + (0.0 if change.value is None else change.value.to(old))
    new = new if change.at is None else torch.where(change.at[..., None], new, old)
    return new.reshape(shape)


def values(model, keys, ids):
    """What stands at each (layer, path, at its input) in the clean run of one prompt, `[1, pos, width]`; a block's is what it adds."""
    layers, seen, handles, found = model.anatomy.layers, Counter(), [], {}

    def before(key, part, args, kwargs):
        seen[key] += 1
        x = _tensor(args, kwargs)[1].clone()
        if _calls(layers, key) == seen[key]:
            found[key] = x

    def after(key, part, args, kwargs, output):
        out = output[0] if isinstance(output, (tuple, list)) else output
        if _calls(layers, key) == seen[key] and not key[2]:
            found[key] = out - found[key] if key[1] == layers[key[0]].path else out.clone()

    for key in keys:
        part = model.module.get_submodule(key[1])
        handles.append(part.register_forward_pre_hook(lambda *a, k=key: before(k, *a), with_kwargs=True))
        handles.append(part.register_forward_hook(lambda *a, k=key: after(k, *a), with_kwargs=True))
    try:
        with torch.no_grad():
            model.module(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {key: value.reshape(1, len(ids), -1) for key, value in found.items()}


def _calls(layers, key):
    return 1 + sum(layer.path == layers[key[0]].path for layer in layers[: key[0]])
