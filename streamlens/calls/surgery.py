"""A model without some of its blocks: `sl.without_blocks`."""

from __future__ import annotations

import torch
from torch import nn

from streamlens.arguments import chosen_layers, opened
from streamlens.errors import InputError, UnsupportedModelError
from streamlens.models import limits
from streamlens.models.loaded import Model
from streamlens.models.surgery import shortened
from streamlens.models.verify import probe_ids
from streamlens.stream.replay import Replay
from streamlens.stream.unembed import Unembed


def without_blocks(model: Model, layers: object) -> nn.Module:
    """A working model of the same class without these blocks: `generate`, `save_pretrained` and `sl.load` take it.

    Its weights are the model's own tensors, not copies; the key/value cache is numbered anew. Its logits are compared with a removal of
    the same blocks by replay on two tiny prompts. Raises :class:`InputError` for indices outside the model or all of them, and
    :class:`UnsupportedModelError` for a family whose config cannot say which blocks are left.
    """
    opened(model, whole_blocks=True)
    removed = chosen_layers(model, layers)
    if len(removed) == model.n_layers:
        raise InputError(f"layers must leave a block of {model.n_layers}; got all of them")
    new = shortened(model.module, model.anatomy, removed)
    gap, limit = _gap(model, new, removed), limits.room(model.dtype)
    if not gap <= limit:
        raise UnsupportedModelError(
            f"{model.name}: without blocks {list(removed)} its config makes another model, off by {gap:.2g} of its logits"
        )
    return new


@torch.no_grad()
def _gap(model: Model, new: nn.Module, removed: tuple[int, ...]) -> float:
    """How far the new model's logits are from a removal by replay, over the largest."""
    ids = probe_ids(model.module)
    with Replay(model.module, model.anatomy) as replay:
        replay.record(ids)
        hidden = replay.without_blocks(set(removed)).flatten(0, 1)
    truth = Unembed(model.module.get_submodule(model.anatomy.unembed), model.anatomy.logits).logits(hidden)
    device, training = model.module.get_input_embeddings().weight.device, new.training
    new.eval()
    try:
        logits = new(input_ids=ids.to(device), use_cache=False).logits.flatten(0, 1).to(truth)
    finally:
        new.train(training)
    return float((logits - truth).abs().max() / truth.abs().max())
