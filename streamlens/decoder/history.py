"""What a training run showed, as arrays."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np
from jaxtyping import Float64, Int64


@dataclass(frozen=True)
class History:
    """One entry a step, and, at the steps of `looked`, what a look inside showed.

    `loss` is in nats a scored token, before the step's update, and leaves out a mixture's load-balancing loss. `gradient_norm` is
    that of all gradients together, before clipping. `attention_logit` is the largest score that enters a softmax in a layer;
    `stream_norm` is the mean l2 norm of the stream where each block reads it and, last, before the final norm.
    """

    step: Int64[np.ndarray, " step"]
    loss: Float64[np.ndarray, " step"]
    gradient_norm: Float64[np.ndarray, " step"]
    learning_rate: Float64[np.ndarray, " step"]
    looked: Int64[np.ndarray, " look"]
    attention_logit: Float64[np.ndarray, "look layer"]
    stream_norm: Float64[np.ndarray, "look layer_and_final"]

    def __len__(self) -> int:
        return len(self.step)

    def to_dict(self) -> dict:
        """Plain lists by field."""
        return {name: array.tolist() for name, array in asdict(self).items()}


class Log:
    """A history that grows."""

    def __init__(self, values: dict | None = None):
        self._values: dict[str, list] = {f.name: [] for f in fields(History)} if values is None else values

    def add(self, **values: int | float | list[float]) -> None:
        """One entry more of each of these fields."""
        for name, value in values.items():
            self._values[name].append(value)

    def history(self) -> History:
        arrays = {name: np.array(values, dtype=np.float64) for name, values in self._values.items()}
        for name in ("step", "looked"):
            arrays[name] = arrays[name].astype(np.int64)
        for name in ("attention_logit", "stream_norm"):
            arrays[name] = arrays[name].reshape(len(arrays["looked"]), -1 if arrays[name].size else 0)
        return History(**arrays)
