"""What it takes to read one family of transformers: its config, the names of its weights, and how it packs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamlens.decoder.config import DecoderConfig
from streamlens.errors import UnsupportedModelError

State = dict[str, Tensor]
Repack = Callable[[State, DecoderConfig], State]


def unchanged(state: State, config: DecoderConfig) -> State:
    return state


@dataclass(frozen=True)
class Family:
    """One `model_type`. `names` maps our module paths, and `qkv_proj` where it is packed, to theirs; `{i}` is a layer.

    `unpack` turns what stands at these paths in their shapes into ours, `pack` the other way.
    """

    model_type: str
    names: Mapping[str, str]
    read: Callable[[Any], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    unpack: Repack = unchanged
    pack: Repack = unchanged

    def ours(self, theirs: State, config: DecoderConfig) -> State:
        """Their state dict by our names and in our shapes. Raises :class:`UnsupportedModelError` for a weight without a place."""
        named = {their: our for our, their in self._names(config.n_layers).items()}
        state = {}
        for key, weight in theirs.items():
            path, suffix = _parts(key)
            if path not in named:
                raise UnsupportedModelError(f"{self.model_type}: the native decoder has no place for the weight {key}")
            state[named[path] + suffix] = weight
        return self.unpack(state, config)

    def theirs(self, ours: State, config: DecoderConfig) -> State:
        """Our state dict by their names and in their shapes."""
        named = self._names(config.n_layers)
        packed = self.pack(ours, config)
        return {named[path] + suffix: weight for path, suffix, weight in ((*_parts(key), weight) for key, weight in packed.items())}

    def _names(self, n_layers: int) -> dict[str, str]:
        return {our.format(i=i): their.format(i=i) for i in range(n_layers) for our, their in self.names.items()}


def _parts(key: str) -> tuple[str, str]:
    found = re.fullmatch(r"(.*?)(\.weight|\.bias)?", key)
    return found.group(1), found.group(2) or ""


def by_layer(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """Names of a layer's modules, below where layers stand."""
    return {f"{ours}.{our}": f"{theirs}.{their}" for our, their in names.items()}


def split_qkv(state: State, c: DecoderConfig, *, by_head: bool) -> State:
    """`qkv_proj` as three projections: all queries first, or (`by_head`) each head's query, key and value together."""
    out = {}
    for key, weight in state.items():
        if ".qkv_proj." not in key:
            out[key] = weight
            continue
        rows = weight.unflatten(0, (c.n_heads, 3, -1) if by_head else (3, c.n_heads, -1))
        for name, part in zip("qkv", rows.unbind(1 if by_head else 0), strict=True):
            out[key.replace("qkv_proj", f"{name}_proj")] = part.flatten(0, 1)
    return out


def join_qkv(state: State, c: DecoderConfig, *, by_head: bool) -> State:
    """The three projections as one, the other way round."""
    out = {key: weight for key, weight in state.items() if not re.search(r"\.attn\.[qkv]_proj\.", key)}
    for key in [key for key in state if ".attn.q_proj." in key]:
        parts = [state[key.replace("q_proj", f"{name}_proj")].unflatten(0, (c.n_heads, -1)) for name in "qkv"]
        out[key.replace("q_proj", "qkv_proj")] = torch.stack(parts, 1 if by_head else 0).flatten(0, 2)
    return out


def demand(config: Any, **settings: Any) -> None:
    """Raise :class:`UnsupportedModelError` unless each setting, where the config has it, is what the native decoder can do."""
    for name, wanted in settings.items():
        value = getattr(config, name, wanted)
        if value != wanted:
            raise UnsupportedModelError(f"{config.model_type}: the native decoder needs {name} {wanted!r}; got {value!r}")
