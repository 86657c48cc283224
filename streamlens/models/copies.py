"""Converted copies of GGUF files in the user's cache folder.

Unpacking a GGUF takes some fifteen seconds, so the first load keeps a float32 copy; later loads map that copy into
memory. The copy is keyed by the hash of the GGUF and by the transformers version that wrote it, appears under its name
in one rename, and carries a manifest of its files' hashes by which a damaged one is noticed and made again.
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
from collections.abc import Sequence
from pathlib import Path

from streamlens.errors import SourceError
from streamlens.models.pretrained import load_gguf, load_tokenizer
from streamlens.models.quiet import quiet_transformers

_MANIFEST = "streamlens.json"
_UNFINISHED = ".unfinished-"
_ABANDONED_AFTER = 24 * 3600  # seconds after which another process's unfinished folder counts as left behind
_log = logging.getLogger("streamlens")


def cache_folder() -> Path:
    """Where converted copies are kept: $STREAMLENS_CACHE, else the user's cache folder of the system."""
    if own := os.environ.get("STREAMLENS_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "streamlens"
    system = {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(sys.platform, ".cache")
    return Path.home() / system / "streamlens"


def converted_copy(name: str, parts: Sequence[Path], digest: str) -> Path:
    """A folder with the float32 model and the tokenizer of a GGUF file, converted now where no sound copy is kept.

    The file is whole or in parts that are joined for the conversion; `digest` is the sha256 of all its bytes.
    """
    import transformers

    copy = cache_folder() / f"{name}-{digest[:16]}-transformers-{transformers.__version__}"
    if not is_sound(copy):
        _log.info("converting %s once, which may take a minute; the copy is kept in %s", name, copy)
        _convert(name, parts, copy)
    return copy


def is_sound(copy: Path) -> bool:
    """True where the folder holds every file of its manifest, with the same bytes."""
    try:
        files = json.loads((copy / _MANIFEST).read_text())["files"]
        return all(digest_of(copy / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError):
        return False


def digest_of(*parts: Path) -> str:
    """The sha256 of these files' bytes, one after another."""
    sha = hashlib.sha256()
    for part in parts:
        with open(part, "rb") as file:
            while block := file.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()


def join(parts: Sequence[Path], whole: Path) -> Path:
    """Write these files' bytes, one after another, into the new file `whole`."""
    with open(whole, "xb") as out:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    return whole


def _convert(name: str, parts: Sequence[Path], copy: Path) -> None:
    """Write the copy into a folder of its own and rename it, so that no other process ever sees half of it."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        _sweep(copy.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=copy.parent))
    except OSError as error:
        raise SourceError(f"cannot keep a copy in {copy.parent} ({error}); set STREAMLENS_CACHE to another folder") from error
    try:
        gguf = parts[0] if len(parts) == 1 else join(parts, unfinished / f"{name}.gguf")
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
    files = {path.name: digest_of(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"files": files}, indent=1))


def _sweep(cache: Path) -> None:
    """Remove what a killed process left behind."""
    for folder in cache.glob(_UNFINISHED + "*"):
        with contextlib.suppress(FileNotFoundError):  # its owner may be done with it by now
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(folder, ignore_errors=True)
