"""Weights on disk or on the Hugging Face hub: a folder, a GGUF file or a hub name, opened by transformers.

What goes wrong there becomes one line of :class:`SourceError`; the original error stays attached as its cause.
"""

from __future__ import annotations

import contextlib
import io
import struct
from pathlib import Path

from torch import nn

from streamlens.decoder.tokenizer import saved_tokenizer
from streamlens.errors import SourceError, StreamLensError
from streamlens.models.checks import check_decoder
from streamlens.models.quiet import quiet_transformers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def load_folder(folder: Path, *, dtype=None, trust_remote_code: bool = False) -> nn.Module:
    """The causal language model in a local `folder`; the hub is never asked."""
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} holds no config.json, so it is no model folder (a GGUF file is opened by its own path)")
    return _load(str(folder), dtype, local_files_only=True, trust_remote_code=trust_remote_code)


def load_hub(name: str, *, dtype=None, revision: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The causal language model that the hub (or its local cache) has under `name`."""
    return _load(name, dtype, revision=revision, trust_remote_code=trust_remote_code)


def _load(source: str, dtype, **options) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with one_line(source), quiet_transformers():
        config = AutoConfig.from_pretrained(source, **options)
        check_decoder(config)
        module, info = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype or "auto", output_loading_info=True, **options
        )
    _check_complete(source, module, info)
    return module


def load_gguf(file: Path, *, dtype=None) -> nn.Module:
    """The model in a GGUF `file`, every weight unpacked to `dtype` (None: float32, or the file's own 16 bits)."""
    from transformers import AutoModelForCausalLM, GgufConfig

    # transformers draws this bar with plain tqdm, which no switch of its own reaches.
    with one_line(str(file)), quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        module, info = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
        )
    _check_complete(str(file), module, info)
    if not module.config.architectures:  # a GGUF header names none, and TransformerLens asks for it
        module.config.architectures = [type(module).__name__]
    return module


def _check_complete(source: str, module: nn.Module, info: dict) -> None:
    """Refuse a checkpoint that leaves parameters at their random initial values; transformers only warns of it."""
    absent = sorted(info["missing_keys"]) + sorted(str(entry) for entry in info["mismatched_keys"])
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise SourceError(f"{source} does not hold all weights of a {type(module).__name__}: {absent[0]}{more} would be random")


def load_tokenizer(source: str, *, gguf_file: str | None = None, **options):
    """The tokenizer of a folder or hub name; None for a local folder that holds none."""
    folder = Path(source)
    if gguf_file is None and (own := saved_tokenizer(folder)) is not None:
        return own
    from transformers import AutoTokenizer

    if gguf_file is None and folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    if folder.is_dir():
        options["local_files_only"] = True
    with one_line(f"the tokenizer of {source}"), quiet_transformers():
        return AutoTokenizer.from_pretrained(source, **options)


@contextlib.contextmanager
def one_line(source: str):
    """Turn what transformers, the hub client or a file reader raises while opening `source` into a :class:`SourceError`."""
    try:
        yield
    except StreamLensError:
        raise
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, struct.error) as error:
        raise SourceError(f"cannot open {source}: {_reason(error)}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("safetensors", "safetensors_rust", "huggingface_hub"):
            raise
        raise SourceError(f"cannot open {source}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    kinds = {type(link).__name__ for link in _chain(error)}
    if "GatedRepoError" in kinds:
        return "the hub asks you to accept this model's terms and to log in first (hf auth login)"
    if "RevisionNotFoundError" in kinds:
        return "the hub has no such revision of it"
    if "RepositoryNotFoundError" in kinds:
        return "no local folder and no public model on the Hugging Face hub has this name"
    if "LocalEntryNotFoundError" in kinds or "OfflineModeIsEnabled" in kinds:
        from huggingface_hub import constants

        unreached = "HF_HUB_OFFLINE keeps the hub from being asked" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return f"it is neither a local folder nor in the local Hugging Face cache, and {unreached}"
    if "HFValidationError" in kinds:
        return "it is neither a local folder nor a possible name on the Hugging Face hub"
    text = str(error)
    if "trust_remote_code" in text:
        return "it comes with code of its own; read that code, then pass trust_remote_code=True"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[0] if lines else 'no reason given'} ({type(error).__name__})"


def _chain(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
