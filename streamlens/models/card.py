"""The facts of an architecture, for the card: widths from the real weights, settings from the config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from torch import nn

from streamlens.models import counts, positions
from streamlens.models import structure as tree
from streamlens.models.settings import setting
from streamlens.models.structure import Structure, text_config

_OUTPUT = re.compile(r"(^|\.)(o_proj|out_proj|c_proj|dense|wo|proj|out|output)$")
_FUSED = re.compile(r"(^|\.)(qkv_proj|query_key_value|c_attn|wqkv|qkv|att_proj)$", re.I)
_KEY = re.compile(r"(^|\.)(k_proj|key|k|wk)$")
_DOWN = re.compile(r"(down_proj|w2|output_linear|wo)(\.weight)?$")
_QK_NORM = re.compile(r"^(q|k|query|key)_?(layer)?norm$")


def config_facts(module: nn.Module, applications: Mapping[str, int] | None = None) -> dict[str, object]:
    """The architecture of a transformers causal language model, one entry a fact, in the card's order.

    Counts and widths are read off the real parameters (and one off the real cache), the rest off the config. Absent: 0
    for a number, "none" for a kind, NaN for a softcap. Where layers differ, a width is the most common one and `varies`
    names it. `multiply_adds_per_token` holds the products with weights; attention adds `multiply_adds_per_source` for
    every token that a query looks at. `kv_cache_bytes_per_token` is in the model's dtype, below any sliding window.
    """
    config, found = text_config(module), tree.structure(module)
    widths, per_source, varies = _widths(module, found)
    (total, active), (experts, experts_active) = counts.parameters(module), counts.n_experts(module)
    scheme, settings = positions.position_scheme(module)
    window, window_layers = positions.sliding_window(module)
    return {
        "architecture": type(module).__name__,
        "n_layers": len(found.blocks),
        **widths,
        "varies": ", ".join(varies) or "none",
        "vocabulary": module.get_output_embeddings().weight.shape[0],
        "context_length": positions.context_length(module),
        "position": scheme,
        "position_settings": settings or "none",
        "qk_norm": _qk_norm(module, found),
        "n_experts": experts,
        "n_experts_active": experts_active,
        "tied": module.get_output_embeddings().weight is module.get_input_embeddings().weight,
        "attention_softcap": float(setting(config, "attn_logit_softcapping") or "nan"),
        "logit_softcap": float(setting(config, "final_logit_softcapping", "logits_soft_cap") or "nan"),
        "sliding_window": window,
        "sliding_window_layers": window_layers,
        "dtype": _dtypes(module),
        "parameters": total,
        "parameters_active": active,
        "multiply_adds_per_token": counts.multiply_adds(module, applications),
        "multiply_adds_per_source": per_source,
        "kv_cache_bytes_per_token": counts.cache_bytes(module),
    }


def _dtypes(module: nn.Module) -> str:
    kinds = Counter(str(weight.dtype).removeprefix("torch.") for weight in module.parameters())
    return " and ".join(kind for kind, _ in kinds.most_common())


def _widths(module: nn.Module, found: Structure) -> tuple[dict[str, int], int, list[str]]:
    """The most common width of each kind over all blocks, the attention scores' cost, and the names of widths that differ."""
    d_model, per_source = _d_model(module, found), 0
    seen = {name: Counter() for name in ("n_heads", "n_kv_heads", "d_head", "d_mlp", "d_expert")}
    for path in found.readers:
        reader = module.get_submodule(path)
        kind = tree.kind_of(reader, path.split(".", 2)[-1], tree.family(module))
        facts = _attention(module, reader) if kind == "attn" else _mlp(reader, d_model, path) if kind == "mlp" else {}
        # A score with every head's key, and that head's value weighed and added.
        per_source += facts.get("n_heads", 0) * (facts.get("d_head", 0) + facts.get("d_key", 0))
        for name in seen.keys() & facts.keys():
            seen[name][facts[name]] += 1
    common = {name: values.most_common(1)[0][0] if values else 0 for name, values in seen.items()}
    common["d_mlp"] = common["d_mlp"] or common["d_expert"]
    return {"d_model": d_model} | common, per_source, [name for name, values in seen.items() if len(values) > 1]


def _d_model(module: nn.Module, found: Structure) -> int:
    """The width of the stream: what the blocks' norms work on, where they have weights; else what the config says."""
    inside = [module.get_submodule(path) for path in found.norms if path.startswith(found.blocks)]
    sizes = Counter(weight.shape[-1] for norm in inside for weight in norm.parameters())
    return sizes.most_common(1)[0][0] if sizes else int(setting(text_config(module), "hidden_size", "d_model"))


def _linears(module: nn.Module) -> list[tuple[str, int, int]]:
    """(path, inputs, outputs) of every linear map, GPT-2's transposed ones included."""
    shapes = []
    for path, part in module.named_modules():
        if tree.is_linear(part):
            inputs, outputs = (part.in_features, part.out_features) if hasattr(part, "in_features") else part.weight.shape
            shapes.append((path, int(inputs), int(outputs)))
    return shapes


def _attention(module: nn.Module, attention: nn.Module) -> dict[str, int]:
    """Heads as the config counts them; d_head and the key-value heads follow from the weights' shapes."""
    config, shapes = text_config(module), _linears(attention)
    n_heads = setting(config, "num_attention_heads", "n_heads")
    output = [shape for shape in shapes if _OUTPUT.search(shape[0])]
    if not isinstance(n_heads, int) or not output:
        return {}
    d_head = output[-1][1] // n_heads
    d_key = setting(config, "qk_head_dim", "head_dim") or d_head
    keys = [outputs for path, _, outputs in shapes if _KEY.search(path)]
    fused = [outputs for path, _, outputs in shapes if _FUSED.search(path)]
    if keys:
        n_kv_heads = keys[0] // d_key
    elif fused:
        n_kv_heads = (fused[0] // d_head - n_heads) // 2
    else:
        n_kv_heads = setting(config, "num_key_value_heads") or n_heads
    return {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head, "d_key": d_key}


def _mlp(mlp: nn.Module, d_model: int, path: str) -> dict[str, int]:
    """d_mlp: the inputs of the last map back to the stream's width. d_expert: the same of one routed expert."""
    down = [
        inputs for name, inputs, outputs in _linears(mlp) if outputs == d_model and "expert" not in f"{path}.{name}" and "gate" not in name
    ]
    facts = {"d_mlp": down[-1]} if down else {}
    lists = [inputs for name, inputs, outputs in _linears(mlp) if counts.is_expert(name) and outputs == d_model]
    if lists:
        return facts | {"d_expert": lists[-1]}
    for name, weight in mlp.named_parameters():
        if counts.is_expert(name) and _DOWN.search(name) and weight.dim() == 3:
            return facts | {"d_expert": weight.numel() // (weight.shape[0] * d_model)}
    return facts


def _qk_norm(module: nn.Module, found: Structure) -> str:
    """Whether queries and keys are normalized over each head, over all heads at once, or not at all."""
    config = text_config(module)
    for path in found.readers:
        for name, part in module.get_submodule(path).named_modules():
            if not _QK_NORM.search(name.rsplit(".", 1)[-1]) or isinstance(part, nn.Identity):
                continue
            widths = [weight.shape[-1] for weight in part.parameters()]
            heads = setting(config, "num_attention_heads") or 1
            d_head = setting(config, "head_dim") or setting(config, "hidden_size") // heads
            return "width" if widths and widths[0] > d_head else "head"
    return "none"
