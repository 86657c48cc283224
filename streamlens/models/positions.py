"""How a model knows where a token stands, and how far its attention sees."""

from __future__ import annotations

from torch import nn

from streamlens.models.settings import setting
from streamlens.models.structure import text_config


def position_scheme(module: nn.Module) -> tuple[str, str]:
    """(scheme, settings): rope, learned, alibi, sinusoidal or none, and the settings as text ("theta 10000, 25% of d_head")."""
    if _alibi(module):
        return "alibi", ""
    if _rotary(module):
        return "rope", _rope_settings(module)
    table = _table(module)
    if table is None:
        return "none", ""
    if isinstance(table, nn.Embedding):
        return "learned", f"{context_length(module)} positions"
    return "sinusoidal", ""


def context_length(module: nn.Module) -> int:
    """The longest prompt in tokens that the config states and a learned table allows; 0 where nothing limits it."""
    config = text_config(module)
    stated = setting(config, "max_position_embeddings", "max_seq_len", "seq_length") or 0
    table = _table(module)
    if not isinstance(table, nn.Embedding):
        return int(stated)
    rows = table.num_embeddings - getattr(table, "offset", 0)  # OPT keeps two rows for padding
    return min(int(stated), rows) if stated else rows


def sliding_window(module: nn.Module) -> tuple[int, int]:
    """(window in tokens, layers that use it), (0, 0) where every layer sees all of the prompt."""
    config = text_config(module)
    window = setting(config, "sliding_window", "window_size", "attention_chunk_size")
    if not isinstance(window, int) or getattr(config, "use_sliding_window", True) is False:
        return 0, 0
    kinds = setting(config, "layer_types", "attention_layers")
    if kinds is None:
        return window, int(config.num_hidden_layers)
    layers = sum(kind in ("sliding_attention", "chunked_attention", "local") for kind in kinds)
    return (window, layers) if layers else (0, 0)


def _alibi(module: nn.Module) -> bool:
    stated = setting(text_config(module), "alibi")
    if stated is not None:
        return bool(stated)
    attention = setting(text_config(module), "attn_config")
    if getattr(attention, "alibi", False):
        return True
    return any(hasattr(part, "build_alibi_tensor") for part in module.modules())


def _rotary(module: nn.Module) -> bool:
    stated = setting(text_config(module), "rotary_dim")  # GPT-J and CodeGen rotate without a module for it
    return stated is not None or any("rotary" in type(part).__name__.lower() for part in module.modules())


def _table(module: nn.Module) -> nn.Module | None:
    """The module that turns positions into vectors, if one does."""
    words = module.get_input_embeddings()
    for path, part in module.named_modules():
        name = path.rsplit(".", 1)[-1].lower()
        if part is not words and (name in ("wpe", "position_embeddings") or name.endswith(("embed_positions", "pos_embed"))):
            return part
    return None


def _rope_settings(module: nn.Module) -> str:
    config = text_config(module)
    found = setting(config, "rope_parameters") or {}
    kinds = {kind: values for kind, values in found.items() if isinstance(values, dict)}
    text = "; ".join(f"{kind}: {_one_rope(values)}" for kind, values in kinds.items()) or _one_rope(found)
    if rotary := setting(config, "rotary_dim"):
        text = ", ".join(filter(None, (text, f"{rotary} dimensions of a head")))
    without = setting(config, "no_rope_layers")
    if without and not all(without):
        text += f", on {sum(map(bool, without))} of {len(without)} layers"
    return text


def _one_rope(values: dict) -> str:
    theta = values.get("rope_theta")
    parts = [] if theta is None else [f"theta {int(theta)}" if theta == int(theta) else f"theta {theta}"]
    if (kind := values.get("rope_type", "default")) != "default":
        factor = values.get("factor")
        parts.append(f"scaling {kind}" + (f" x {factor:g}" if isinstance(factor, int | float) else ""))
    if (partial := values.get("partial_rotary_factor")) not in (None, 1, 1.0):
        parts.append(f"{partial:.0%} of d_head")
    return ", ".join(parts)
