"""Checkpoints by step: one file each, there whole or not at all."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import torch

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.model import Decoder
from streamlens.errors import SourceError

_NAME = re.compile(r"step-(\d+)\.pt")


def write_checkpoint(folder: str | os.PathLike, done: int, state: dict) -> Path:
    """Keep `state`, plain values and tensors, as that after `done` steps."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{done:06d}.pt"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def checkpoints(folder: str | os.PathLike) -> dict[int, Path]:
    """Files by steps done, the earliest first."""
    found = {int(match[1]): path for path in Path(folder).glob("step-*.pt") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read_checkpoint(path: str | os.PathLike) -> dict:
    """What :func:`write_checkpoint` kept, on the CPU. Raises :class:`SourceError` for anything else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise SourceError(f"cannot read the checkpoint {os.fspath(path)}: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or "weights" not in state:
        raise SourceError(f"{os.fspath(path)} is no checkpoint of a training run")
    return state


def decoder_at(path: str | os.PathLike) -> Decoder:
    """The decoder of a checkpoint, in eval mode: as it was after so many steps. Raises :class:`SourceError`."""
    state = read_checkpoint(path)
    if state["decoder"] is None:
        raise SourceError(f"{os.fspath(path)} is the checkpoint of another module, no Decoder")
    decoder = Decoder(DecoderConfig.from_dict(state["decoder"]), seed=None)
    decoder.load_state_dict(state["weights"])
    return decoder.eval()
