"""Candidates, read off the module tree: blocks, sublayers, norms, embeddings, unembedding. `discover` decides among them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models.norms import looks_like_norm

WRAPPERS = {"DbrxNormAttentionNorm", "ZambaMambaDecoderLayer", "Zamba2MambaDecoderLayer"}
"""Modules inside a block that add to the stream themselves: one line an odd architecture; their children are looked at instead."""

MAPS_A_HEAD = {"DiffLlamaAttention": 2}
"""Attention maps that one head takes the difference of, where a family counts the maps; one line an odd architecture."""

_MIXER = re.compile(r"mamba|mlstm|mixer2?$|conv|delta|recurrent|rglru|lightning|rwkv.*attention|linear_?att", re.I)
_ATTN = re.compile(r"attention|attn", re.I)
_MLP = re.compile(r"mlp|ffn|feed_?forward|moe|expert|(^|\.)fc2$|(^|\.)ff$", re.I)


@dataclass(frozen=True)
class Structure:
    """Module paths, relative to the model."""

    embed: str
    unembed: str
    blocks: tuple[str, ...]
    readers: tuple[str, ...]  # sublayers and whatever else with weights stands in a block
    norms: tuple[str, ...]  # outside the readers
    pos_embeds: tuple[str, ...]  # candidates


def structure(module: nn.Module) -> Structure:
    """Raises :class:`UnsupportedModelError` where no stack of blocks or no unembedding can be found."""
    paths = {m: path for path, m in reversed(list(module.named_modules()))}
    embed, unembed = module.get_input_embeddings(), module.get_output_embeddings()
    if embed is None or unembed is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} names no input or output embeddings: not a decoder with a language-model head"
        )
    if not isinstance(unembed.weight, Tensor):
        raise UnsupportedModelError(f"{type(module).__name__}: its unembedding is packed, and its rows cannot be read")
    stack = _blocks(module)
    # A block object that stands at several places is one block, applied several times: named_children gives it once.
    blocks = tuple(f"{stack}.{name}" for name, _ in module.get_submodule(stack).named_children())
    readers, norms = [], []
    for path in blocks:
        for child, is_norm in _children(module.get_submodule(path), path):
            (norms if is_norm else readers).append(child)
    outside = [(path, m) for path, m in module.named_modules() if not path.startswith(stack + ".") and m not in (embed, unembed)]
    norms += [path for path, m in outside if looks_like_norm(m) and not path.startswith(paths[unembed])]
    positions = tuple(path for path, m in outside if path and re.search(r"^(?!.*rotary).*embed", type(m).__name__, re.I))
    return Structure(paths[embed], paths[unembed], blocks, tuple(readers), tuple(norms), positions)


def kind_of(module: nn.Module, name: str, family: str = "") -> str:
    """attn, mlp, mixer or other, from the class first and the attribute's name second: labels of rows, nothing is computed from them.

    `family` is what all classes of a model begin with (:func:`family`): RecurrentGemmaMlp is no mixer.
    """
    kind = type(module).__name__
    for word in (kind.removeprefix(family) if family != "Rwkv" else kind, name):
        for label, pattern in (("mixer", _MIXER), ("attn", _ATTN), ("mlp", _MLP)):
            if pattern.search(word):
                return label
    return "other"


def family(module: nn.Module) -> str:
    """What the names of a model's classes begin with: "Llama" of LlamaForCausalLM."""
    return re.split(r"For[A-Z]|LMHead|Model", type(module).__name__)[0]


def passes_residual(module: nn.Module) -> bool:
    """Whether a sublayer takes the stream to add its write to, and returns the sum (BLOOM, MPT)."""
    return "residual" in inspect.signature(type(module).forward).parameters


def is_linear(module: nn.Module) -> bool:
    """A linear map, packed and wrapped ones (8-bit, LoRA) and GPT-2's Conv1D included."""
    return (hasattr(module, "in_features") and hasattr(module, "out_features")) or type(module).__name__ == "Conv1D"


def width_in(linear: nn.Module) -> int:
    """How many numbers a linear map reads at a position."""
    return linear.in_features if hasattr(linear, "in_features") else linear.weight.shape[0]  # Conv1D keeps its weight [in, out]


def has_bias(module: nn.Module) -> bool:
    return bias_of(module) is not None


def bias_of(module: nn.Module):
    """The bias of a linear map, also behind an adapter's wrapper; None without one."""
    return getattr(getattr(module, "base_layer", module), "bias", None)


def text_config(module: nn.Module):
    """The configuration of the decoder, where a model nests it."""
    config = module.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _blocks(module: nn.Module) -> str:
    lists = [(path, m) for path, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise UnsupportedModelError(f"{type(module).__name__} has no list of blocks")
    return max(lists, key=lambda item: (sum(p.numel() for p in item[1].parameters()), -len(item[0])))[0]


def _children(parent: nn.Module, path: str) -> Iterator[tuple[str, bool]]:
    for name, child in parent.named_children():
        if looks_like_norm(child):
            yield f"{path}.{name}", True
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)) or type(child).__name__ in WRAPPERS:
            yield from _children(child, f"{path}.{name}")
        elif any(True for _ in child.parameters()) or any(is_linear(part) for part in child.modules()):  # packed weights may be buffers
            yield f"{path}.{name}", False
