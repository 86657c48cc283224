"""streamlens: attribution, layer removal and norms of a transformer's residual stream, as tables that add up.

The public names load on first use (PEP 562), so that `import streamlens` brings in neither torch nor pandas.
"""

__version__ = "0.1.0"

_HOME = {
    "load": "models.loaded",
    "attribute": "calls.attribute",
    "ablate": "calls.ablate",
    "norms": "calls.norms",
    "norm_summary": "calls.norms",
    "similarity": "calls.similarity",
    "rearrange": "calls.rearrange",
    "without_blocks": "calls.surgery",
    "prune": "calls.prune",
    "plan": "calls.plan",
    "Keep": "stream.kept",
    "lens": "calls.lens",
    "effects": "calls.effects",
    "promotes": "calls.promotes",
    "record": "calls.record",
    "card": "calls.card",
    "train": "calls.train",
    "decompose_norm": "calls.growth",
    "depth_use": "calls.growth",
    "gradient_norms": "calls.growth",
    "growth_rate": "stats",
    "Decoder": "decoder.model",
    "DecoderConfig": "decoder.config",
}
_MODULES = ("errors", "figures", "orders", "prompts", "schema", "stats")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name):
    from importlib import import_module

    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
