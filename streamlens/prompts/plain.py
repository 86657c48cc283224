"""What users hand over as lists, arrays, tensors or columns, as plain Python values."""

from __future__ import annotations

from numbers import Integral


def plain(value: object) -> object:
    """`value` as nested Python lists and scalars, whether it came as a list, tuple, range, array, tensor or pandas Series."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [plain(v) for v in value]
    return value


def is_index(value: object) -> bool:
    """Whether `value` is a whole number; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)
