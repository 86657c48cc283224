"""A decoder as a folder: its config as JSON, its weights as safetensors, and its tokenizer where it has one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.model import Decoder
from streamlens.errors import InputError, SourceError

_CONFIG, _WEIGHTS = "decoder.json", "model.safetensors"  # not config.json, which transformers would read as its own


def save_decoder(decoder: Decoder, folder: str | os.PathLike, tokenizer=None) -> Path:
    """Write a decoder to `folder`, which is made where it is not; the config comes last, so a folder with one is whole.

    A tied unembedding is not written twice. `tokenizer` is anything with `save_pretrained`.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: weight.contiguous() for name, weight in decoder.state_dict().items() if not _is_copy(decoder.config, name)}
    save_file(state, folder / f"{_WEIGHTS}.new", metadata={"format": "pt"})
    os.replace(folder / f"{_WEIGHTS}.new", folder / _WEIGHTS)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    text = json.dumps(decoder.config.to_dict(), indent=1)
    (folder / f"{_CONFIG}.new").write_text(text, encoding="utf-8")
    os.replace(folder / f"{_CONFIG}.new", folder / _CONFIG)
    return folder


def is_decoder_folder(folder: str | os.PathLike) -> bool:
    """Whether a folder holds a native decoder rather than a transformers model."""
    return (Path(folder) / _CONFIG).is_file()


def load_decoder(folder: str | os.PathLike, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Decoder:
    """The decoder of a folder in eval mode; `dtype` None keeps that of the file.

    Raises :class:`SourceError` that names an unknown or missing field, and a weight that is missing, unknown or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    config = _read_config(folder)
    try:
        state = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise SourceError(f"cannot read the weights of {folder}: {error}") from error
    decoder = Decoder(config, seed=None)
    if config.tied:
        state.setdefault("unembed.weight", state.get("embed.weight", torch.empty(0)))
    check_weights(decoder, {name: weight.shape for name, weight in state.items()}, str(folder))
    # Copied: how a product rounds depends on where its weights begin in memory, and in a mapped file that is behind a header of any length.
    decoder.load_state_dict({name: weight.to(device, dtype, copy=True) for name, weight in state.items()}, assign=True)
    return decoder.tie().eval()


def check_weights(decoder: Decoder, shapes: dict[str, torch.Size], source: str) -> None:
    """Raise :class:`SourceError` that names the first weight that `source` lacks, has too many, or has in another shape."""
    wanted = {name: weight.shape for name, weight in decoder.state_dict().items()}
    for what, names in (("lacks the weight", wanted.keys() - shapes.keys()), ("holds an unknown weight,", shapes.keys() - wanted.keys())):
        if names:
            raise SourceError(f"{source} {what} {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise SourceError(f"{source} holds {name} of shape {list(shapes[name])}, where its config needs {list(shape)}")


def _read_config(folder: Path) -> DecoderConfig:
    file = folder / _CONFIG
    try:
        return DecoderConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise SourceError(f"{folder} holds no {_CONFIG}") from error
    except (json.JSONDecodeError, AttributeError, InputError) as error:
        raise SourceError(f"{file} is no config of a decoder: {error}") from error


def _is_copy(config: DecoderConfig, name: str) -> bool:
    return config.tied and name == "unembed.weight"
