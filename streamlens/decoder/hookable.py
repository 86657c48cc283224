"""Named places of a forward pass, at which somebody may look or change what goes by.

A place is an attribute that is called on a tensor. It is the function :func:`passed` until `hooks` puts a hook point of
TransformerLens there, for the length of a pass: so a model without hooks neither imports TransformerLens nor pays for it.
"""

from __future__ import annotations

from torch import Tensor, nn


def passed(x: Tensor) -> Tensor:
    """What an empty place does."""
    return x


class Hookable(nn.Module):
    """A module with places; `PLACES` are their names below this module, TransformerLens' own."""

    PLACES: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.places = self.PLACES
        for name in self.PLACES:
            setattr(self, name, passed)

    def without_places(self, *names: str) -> None:
        """Say that nothing goes by at these places of this module, so that nobody waits there."""
        self.places = tuple(name for name in self.places if name not in names)
