"""Where a mixture of experts routes: what tells which expert took a token, whose output is theirs, and what runs beside them."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from functools import cache

from torch import nn

INDEX, WEIGHTS = ("top_k_index", "router_indices"), ("top_k_weights", "routing_weights")
"""What families call the two arguments of their experts module: each token's experts, and their weights."""

_SHARED = re.compile(r"shared_?(experts?|mlp)$")


@dataclass(frozen=True)
class Mixture:
    """Paths of a mixture's parts, relative to the model.

    `kind` says how `experts` is called: "slots" takes each token's experts and their weights, "dense" gives every expert's output
    for every token, `[expert * token, d_model]`, "sorted" one for each pair in the order that `router` gives.
    """

    kind: str
    experts: str
    shared: tuple[str, ...] = ()
    router: str | None = None
    bias: str | None = None  # a constant that the module adds to its output
    pairs: bool = False  # the experts module takes two slots or more


ODD = {
    "Llama4TextMoe": Mixture("dense", "experts", ("shared_expert",)),
    "LongcatFlashMoE": Mixture("slots", "experts", pairs=True),
    "JetMoeMoE": Mixture("sorted", "output_linear", router="router", bias="bias"),
}
"""Mixtures whose experts are not called with single slots, by class, paths relative to the class; one line an odd architecture."""


def mixture_of(module: nn.Module, path: str) -> Mixture | None:
    """The mixture of experts in the sublayer at `path`, None where there is none or its experts cannot be called by slot."""
    sublayer = module.get_submodule(path)
    odd = ODD.get(type(sublayer).__name__)
    if odd is not None:
        inside = {name: f"{path}.{value}" for name in ("experts", "router", "bias") if (value := getattr(odd, name)) is not None}
        return replace(odd, **inside, shared=tuple(f"{path}.{name}" for name in odd.shared))
    parts = dict(sublayer.named_modules(prefix=path))
    experts = [name for name, part in parts.items() if takes_slots(type(part))]
    if len(experts) != 1:
        return None
    return Mixture("slots", experts[0], tuple(name for name in parts if _SHARED.search(name) and not name.startswith(experts[0])))


@cache
def takes_slots(kind: type[nn.Module]) -> bool:
    """Whether modules of this class take each token's experts and their weights."""
    given = inspect.signature(kind.forward).parameters
    return any(name in given for name in INDEX) and any(name in given for name in WEIGHTS)
