"""The stream of a model by token, whichever of its axes are batch and position."""

from __future__ import annotations

from torch import Tensor

from streamlens.models.anatomy import Anatomy


def by_token(stream: Tensor, anatomy: Anatomy) -> Tensor:
    """A view `[.., batch, pos, d_model]` of what a block is given or returns; the vectors of a token, where there are several, lead."""
    return stream if anatomy.n_streams == 1 else stream.movedim(anatomy.stream_axes, (-3, -2))
