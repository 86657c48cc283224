"""Every error that streamlens raises on purpose.

All share :class:`StreamLensError`, so that a batch script can catch what streamlens says and let real bugs through.
"""

from collections.abc import Hashable
from numbers import Integral


class StreamLensError(Exception):
    """The common base; the command line prints its message as one line and exits with 2."""


class InputError(StreamLensError, ValueError):
    """A parameter is wrong. The message names the parameter, what is legal and what came."""


class SourceError(StreamLensError):
    """A model cannot be found or opened. The message says what to install, download or correct."""


class UnsupportedModelError(StreamLensError):
    """A model was opened but its residual stream cannot be read exactly. The message says what does not add up, and by how much."""


class AdditivityError(StreamLensError):
    """Contributions do not sum to the logit within the limit of the dtype. The message names model, prompt, position and error."""


class NumericError(StreamLensError):
    """A measured value is not finite, or a replay misses what the model does; the message says which, and by how much."""


def choice(parameter: str, value: object, legal) -> None:
    """Raise :class:`InputError` unless `value` is one of `legal`."""
    legal = list(legal)
    if not isinstance(value, Hashable) or value not in legal:  # an array would be compared word by word
        raise InputError(f"{parameter} must be one of {', '.join(map(repr, legal))}; got {value!r}")


def whole(parameter: str, value: object, least: int) -> None:
    """Raise :class:`InputError` unless `value` is a whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{parameter} must be a whole number, {least} or more; got {value!r}")
