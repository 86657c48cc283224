"""Read a transformers config without tripping over it."""

from __future__ import annotations


def setting(config, *names: str):
    """The first of `names` that `config` holds and that is not None; None where it holds none of them.

    A field that a config keeps layer by layer raises on plain access; it counts as absent.
    """
    by_layer = getattr(vars(config).get("_heterogeneity_spec"), "per_layer_attributes", ()) if config is not None else ()
    return next((value for name in names if name not in by_layer and (value := getattr(config, name, None)) is not None), None)
