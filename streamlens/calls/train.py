"""How a small model comes to be: `sl.train`."""

from __future__ import annotations

import os
from dataclasses import asdict, fields

import pandas as pd
from torch import nn

from streamlens import frames
from streamlens.arguments import watched
from streamlens.decoder import train as training
from streamlens.decoder.data import Data
from streamlens.errors import InputError


def train(
    decoder: nn.Module,
    data: object,
    *,
    folder: str | os.PathLike | None = None,
    until: int | None = None,
    progress: bool = False,
    **settings: object,
) -> pd.DataFrame:
    """Train a decoder in place; one row a measure of a step: loss in nats, gradient_norm, learning_rate and, where the model was
    looked into, each layer's largest attention_logit and stream_norm.

    `data` is a text (`streamlens.decoder.data.Text`), a task of `streamlens.decoder.tasks`, or anything with n_vocab, length and
    draw(n, generator). `settings` are the fields of `streamlens.decoder.train.TrainConfig`; `steps` must be given. With a `folder`,
    checkpoints are kept there, and a run that was broken off goes on from its last one, as if it had never stopped; `until` ends
    it early, after so many steps in all. Raises :class:`InputError`, and :class:`NumericError` where a loss is not finite.
    """
    known = [field.name for field in fields(training.TrainConfig)]
    unknown = next((name for name in settings if name not in known), None)
    if unknown is not None or "steps" not in settings:
        raise InputError(f"settings must hold steps, and be among {', '.join(known)}; got {unknown or ', '.join(settings) or 'none'}")
    if not isinstance(data, Data):
        legal = "streamlens.decoder.data.Text(text), a task of streamlens.decoder.tasks, or anything with n_vocab, length and draw"
        raise InputError(f"data must be {legal}; got {type(data).__name__}")
    config = training.TrainConfig(**settings)
    history = training.train(decoder, data, config, folder=folder, until=until, watch=lambda steps: watched(list(steps), progress, "train"))
    df = frames.training(history)
    df.attrs = {
        "model": type(decoder).__name__,
        "dtype": str(next(decoder.parameters()).dtype).removeprefix("torch."),
        "versions": frames.versions(),
        "seed": config.seed,
        "arguments": {"data": repr(data), **asdict(config)},
    }
    return df
