"""Units that are changed together: `layers` or `heads` given as {name: which}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamlens.errors import InputError


def sets_of(layers: object, heads: object, span: object) -> Iterator[tuple[str, object, object]]:
    """(name, layers, heads) of each named set; what has no name is one, called "". Raises InputError for what cannot be a set."""
    if not isinstance(layers, Mapping) and not isinstance(heads, Mapping):
        yield "", layers, heads
        return
    if isinstance(layers, Mapping) and isinstance(heads, Mapping):
        raise InputError("layers and heads must not both be {name: which}, one set each; got two such")
    parameter, named = ("layers", layers) if isinstance(layers, Mapping) else ("heads", heads)
    if not named or not all(isinstance(name, str) and name for name in named):
        raise InputError(
            f"{parameter} must name each set by a text, as in {{'early': [0, 1]}}; got {', '.join(map(repr, named)) or 'none'}"
        )
    if span not in (1, [1]):
        raise InputError(f"span must be 1 for sets, which are changed as they are; got {span!r}")
    for name, which in named.items():
        if which is None:
            raise InputError(f"{parameter} must say what is in the set {name!r}; got None")
        yield (name, which, heads) if parameter == "layers" else (name, layers, which)
