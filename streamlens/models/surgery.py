"""A model without some of its blocks, as a model of its own that shares the weights.

It is built from a config of fewer layers, by the family's own code, and given the old parameters: so layer indices, caches and
windows are right by construction, and what `save_pretrained` writes loads again to the same model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

import torch
from torch import nn

from streamlens.decoder.model import Decoder
from streamlens.errors import UnsupportedModelError
from streamlens.models.anatomy import Anatomy

_INDICES = re.compile(r"(only_layers|layer_indices|layers_idx|layer_ids|_idxs)$")
_FIRST = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
"""Config fields that hold layer indices, and such that count layers from the first on. What they miss is seen in the logits."""


def shortened(module: nn.Module, anatomy: Anatomy, removed: Sequence[int]) -> nn.Module:
    """A model of the same class without these blocks. Raises :class:`UnsupportedModelError` where its config cannot say so."""
    stack = anatomy.block_paths[0].rpartition(".")[0]
    if len(anatomy.block_paths) != anatomy.n_layers:
        raise _refusal(module, "a block of it runs several times")
    if not hasattr(getattr(module, "config", None), "to_dict"):
        raise _refusal(module, "only models of transformers can be built from a config")
    kept = [i for i in range(anatomy.n_layers) if i not in set(removed)]
    config = _config_of(module, kept, anatomy.n_layers)
    try:
        with torch.device("meta"):
            new = type(module)(config)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise _refusal(module, f"its config of {len(kept)} layers is refused ({error})") from error
    old_block = {f"{stack}.{i}": anatomy.block_paths[layer] for i, layer in enumerate(kept)}
    _share(module, new, lambda path: _renamed(path, stack, old_block))
    new.train(module.training)
    if getattr(module, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(module.generation_config)
    return new


def _config_of(module: nn.Module, kept: Sequence[int], n_layers: int) -> object:
    if isinstance(module, Decoder):
        return module.config.keeping(kept)
    config = copy.deepcopy(module.config)
    _shorten(text_config_of(config), kept, n_layers)
    return config


def text_config_of(config: object) -> object:
    """The decoder's config inside another, itself otherwise."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _shorten(config: object, kept: Sequence[int], n_layers: int) -> None:
    for name, value in config.to_dict().items():
        if isinstance(value, list) and _INDICES.search(name) and all(isinstance(v, int) for v in value):
            setattr(config, name, [kept.index(v) for v in value if v in kept])
        elif isinstance(value, list) and len(value) == n_layers:
            setattr(config, name, [value[i] for i in kept])
        elif name in _FIRST and isinstance(value, int):
            setattr(config, name, sum(i < value for i in kept))
    config.num_hidden_layers = len(kept)


def _share(old: nn.Module, new: nn.Module, source) -> None:
    """Every parameter and buffer of `new` becomes the old one's of its source; shapes and names must agree."""
    parts = dict(old.named_modules(remove_duplicate=False))
    for path, part in new.named_modules(remove_duplicate=False):
        twin = parts.get(source(path))
        if twin is None or type(twin) is not type(part):
            raise _refusal(old, f"its {source(path)} is not what its config says")
        for store in ("_parameters", "_buffers"):
            mine, theirs = getattr(part, store), getattr(twin, store)
            if mine.keys() != theirs.keys() or any(_shape(mine[n]) != _shape(theirs[n]) for n in mine):
                raise _refusal(
                    old, f"the size of {source(path) or 'its own weights'} depends on the number of layers, or is not what its config says"
                )
            mine.update(theirs)


def _shape(tensor: torch.Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _renamed(path: str, stack: str, old_block: dict[str, str]) -> str:
    """Where a module of the new model stands in the old one."""
    if not path.startswith(f"{stack}."):
        return path
    name, _, rest = path.removeprefix(f"{stack}.").partition(".")
    # A config that goes on counting the removed blocks makes one for which there is none.
    return ".".join(filter(None, (old_block.get(f"{stack}.{name}", f"{stack}.{name} among those that are left"), rest)))


def _refusal(module: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(module).__name__} cannot be made without blocks: {why}")
