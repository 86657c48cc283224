"""Open what the user names: a model of `named`, a hub name, a folder, a GGUF file, a loaded module or a TransformerBridge.

Only opening happens here. Where the stream is read and written is `anatomy`'s part, and proving it is `verify`'s.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from streamlens.decoder.folder import is_decoder_folder, load_decoder
from streamlens.decoder.model import Decoder
from streamlens.errors import InputError, SourceError, UnsupportedModelError
from streamlens.models import named, pretrained
from streamlens.models.adapters import adapted_module, is_peft
from streamlens.models.bridge import is_bridge, wrapped_module
from streamlens.models.checks import check_finite, check_head, is_transformers_model

_LEGAL = "a model's name, a folder, a GGUF file, a transformers model, a TransformerBridge or a Decoder"


@dataclass(frozen=True)
class Opened:
    """A causal language model with its head, and what it is.

    `name` is short, for tables; `source` says what it is and where it came from; `revision` is the hub's commit.
    `trusted` holds only for the default model's converted copy and the package's own models, where their bytes are known.
    """

    module: nn.Module = field(repr=False)
    tokenizer: object | None = field(repr=False)
    name: str
    source: str
    revision: str | None = None
    trusted: bool = False


def open_source(source, *, tokenizer=None, device=None, dtype=None, revision=None, trust_remote_code=False, native: bool = False) -> Opened:
    """Open `source`; what is loaded here comes in eval mode, what was loaded already is neither moved nor cast.

    `tokenizer` is an object, or the name or folder of one; None takes the one beside the weights. `device` None takes
    CUDA where present, `dtype` None keeps the checkpoint's (float32 for the models of `named`). `native` gives the native
    decoder with the same weights.
    Raises :class:`SourceError` for what cannot be found or read, :class:`InputError` for parameters that do not fit,
    :class:`UnsupportedModelError` for what is no decoder-only language model with a head and finite weights.
    """
    kind, device, dtype = _kind(source), _device(device), _dtype(dtype)
    if revision is not None and kind != "hub":
        raise InputError(f"revision must be None unless source is a name on the Hugging Face hub; got {revision!r}")
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = _named_tokenizer(tokenizer, trust_remote_code)
    if kind == "decoder":
        opened = Opened(source, tokenizer, "Decoder", "Decoder in memory")
        _check_as_loaded(source, device, dtype)
    elif kind in ("module", "bridge"):
        opened = _open_loaded(source, tokenizer)
        _check_as_loaded(opened.module, device, dtype)
    elif kind == "named":
        model = named.by_name(str(source))
        opened = (_open_packaged if isinstance(model, named.PackagedModel) else _open_named)(model, tokenizer, device, dtype)
    elif kind == "gguf":
        opened = _open_gguf(Path(source).expanduser(), tokenizer, device, dtype)
    elif kind == "folder":
        opened = _open_folder(Path(source).expanduser(), tokenizer, device, dtype, trust_remote_code)
    else:
        opened = _open_hub(source, tokenizer, device, dtype, revision=revision, trust_remote_code=trust_remote_code)
    if not isinstance(opened.module, Decoder):
        check_head(opened.module)
    if not opened.trusted:
        check_finite(opened.module)
    return _as_native(opened, copy=kind in ("module", "bridge")) if native and kind != "decoder" else opened


def _as_native(opened: Opened, copy: bool) -> Opened:
    """The native decoder in the place of a transformers model; what the user holds keeps tensors of its own."""
    if isinstance(opened.module, Decoder):
        return opened
    from streamlens.models.native import to_native

    return replace(opened, module=to_native(opened.module, copy=copy), source=f"native Decoder of {opened.source}")


def _kind(source) -> str:
    if isinstance(source, Decoder):
        return "decoder"
    if is_bridge(source):
        return "bridge"
    if isinstance(source, nn.Module):
        return "module"
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"source must be {_LEGAL}; got a {type(source).__name__}")
    text = str(source)
    if not text.strip():
        raise InputError(f"source must be {_LEGAL}; got an empty name")
    if named.by_name(text) and not Path(text).exists():
        return "named"
    if text.lower().endswith(".gguf"):
        return "gguf"
    return "folder" if isinstance(source, os.PathLike) or _is_path(text) else "hub"


def _is_path(text: str) -> bool:
    """True for what exists on disk or can only be meant as a path: hub names have at most one slash, inside."""
    rooted = text.startswith((os.sep, ".", "~")) or Path(text).is_absolute()
    return rooted or (os.sep != "/" and os.sep in text) or text.count("/") > 1 or Path(text).exists()


def _open_named(model: named.NamedModel, tokenizer, device: torch.device | None, dtype: torch.dtype | None) -> Opened:
    copy, source, known = named.open_copy(model)
    module = pretrained.load_folder(copy, dtype=dtype).to(_place(device))
    tokenizer = pretrained.load_tokenizer(str(copy)) if tokenizer is None else tokenizer
    module.config._name_or_path = model.name  # the cache folder would say nothing to a reader
    return Opened(module, tokenizer, model.name, source, trusted=known and dtype in (None, torch.float32))


def _open_packaged(model: named.PackagedModel, tokenizer, device: torch.device | None, dtype: torch.dtype | None) -> Opened:
    known = model.is_known and dtype in (None, torch.float32)
    module = load_decoder(model.folder, dtype or torch.float32, _place(device))
    tokenizer = pretrained.load_tokenizer(str(model.folder)) if tokenizer is None else tokenizer
    return Opened(module, tokenizer, model.name, f"{model.what} (part of streamlens)", trusted=known)


def _open_gguf(file: Path, tokenizer, device: torch.device | None, dtype: torch.dtype | None) -> Opened:
    if not file.is_file():
        raise SourceError(f"no such GGUF file: {file}")
    module = pretrained.load_gguf(file, dtype=dtype).to(_place(device)).eval()
    tokenizer = pretrained.load_tokenizer(str(file.parent), gguf_file=file.name) if tokenizer is None else tokenizer
    return Opened(module, tokenizer, file.stem, f"{type(module).__name__}, dequantised GGUF weights ({file})")


def _open_folder(folder: Path, tokenizer, device: torch.device | None, dtype: torch.dtype | None, trust_remote_code: bool) -> Opened:
    if not folder.is_dir():
        raise SourceError(f"{folder} is neither a model folder nor a GGUF file" if folder.exists() else f"no such folder: {folder}")
    if is_decoder_folder(folder):
        module = load_decoder(folder, dtype, _place(device))
    else:
        module = pretrained.load_folder(folder, dtype=dtype, trust_remote_code=trust_remote_code).to(_place(device))
    tokenizer = pretrained.load_tokenizer(str(folder), trust_remote_code=trust_remote_code) if tokenizer is None else tokenizer
    return Opened(module, tokenizer, folder.resolve().name, f"{type(module).__name__} from {folder}")


def _open_hub(name: str, tokenizer, device: torch.device | None, dtype: torch.dtype | None, **options) -> Opened:
    try:
        module = pretrained.load_hub(name, dtype=dtype, **options).to(_place(device))
    except SourceError as error:
        if (near := named.near(name)) is None:
            raise
        raise SourceError(f"{error}; did you mean {near!r}?") from error
    tokenizer = pretrained.load_tokenizer(name, **options) if tokenizer is None else tokenizer
    revision = getattr(module.config, "_commit_hash", None) or options["revision"]
    return Opened(module, tokenizer, name.rsplit("/", 1)[-1], f"{type(module).__name__} from the Hugging Face hub ({name})", revision)


def _open_loaded(source: nn.Module, tokenizer) -> Opened:
    """A transformers model as it is, or the one inside a TransformerBridge or a PEFT model."""
    if is_bridge(source):
        module, held = wrapped_module(source), f"the {type(source).__name__}'s "
        tokenizer = source.tokenizer if tokenizer is None else tokenizer
    elif is_peft(source):
        module, held = adapted_module(source), f"the {type(source).__name__}'s "
    else:
        module, held = source, ""
    if not is_transformers_model(module):
        raise InputError(f"source must be {_LEGAL}; got the module {type(module).__name__}")
    _check_present(module)
    name = type(module).__name__
    origin = getattr(module.config, "_name_or_path", "")
    return Opened(module, tokenizer, name, f"{held}{name} in memory" + (f" ({origin})" if origin else ""))


def _check_present(module: nn.Module) -> None:
    """Refuse weights that are elsewhere: accelerate fetches what it put on disk for the length of one module's forward pass only."""
    absent = next((name for name, weight in module.named_parameters() if weight.is_meta), None)
    if absent is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has weights that are not in memory ({absent} is offloaded or was never loaded); "
            "load it with a device_map without offloading"
        )


def _check_as_loaded(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    weight = next(module.parameters())
    if dtype is not None and weight.dtype != dtype:
        raise InputError(f"dtype must be None or {weight.dtype} for a model that is loaded already; got {dtype}. Cast it yourself first")
    same = device is None or (device.type == weight.device.type and device.index in (None, weight.device.index))
    if not same:
        raise InputError(f"device must be None or {weight.device} for a model that is loaded already; got {device}. Move it yourself first")


def _dtype(dtype) -> torch.dtype | None:
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if (named is None and dtype is None) or (isinstance(named, torch.dtype) and named.is_floating_point):
        return named
    raise InputError(f"dtype must be None or a floating-point torch dtype such as torch.float32; got {dtype!r}")


def _device(device) -> torch.device | None:
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device must be None or a torch device such as 'cpu' or 'cuda'; got {device!r}") from error
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device must be one that is present, and {torch.cuda.device_count()} CUDA devices are; got {device!r}")
    return wanted


def _place(device: torch.device | None) -> torch.device:
    """Where weights that are loaded here go."""
    return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _named_tokenizer(tokenizer: str | os.PathLike, trust_remote_code: bool):
    folder = Path(tokenizer).expanduser()
    if (isinstance(tokenizer, os.PathLike) or _is_path(tokenizer)) and not folder.is_dir():
        raise SourceError(f"no such tokenizer folder: {folder}")
    found = pretrained.load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    if found is None:
        raise SourceError(f"{folder} holds no tokenizer")
    return found
