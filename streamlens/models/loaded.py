"""`sl.load`: open a model, find its anatomy, prove it."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from streamlens.errors import InputError, StreamLensError, UnsupportedModelError
from streamlens.models.anatomy import Anatomy
from streamlens.models.bridge import make_bridge
from streamlens.models.discover import discover
from streamlens.models.positions import context_length
from streamlens.models.settings import setting
from streamlens.models.sources import open_source
from streamlens.models.structure import text_config
from streamlens.models.verify import Proof, probe_ids, prove


@dataclass(frozen=True)
class Model:
    """A model whose residual stream is understood: what every call of streamlens takes.

    `module` is the user's own Hugging Face module and stays as it is; `proof` holds what was measured at load.
    """

    module: nn.Module = field(repr=False)
    tokenizer: object | None = field(repr=False)
    name: str
    source: str
    revision: str | None
    anatomy: Anatomy = field(repr=False)
    proof: Proof = field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.module.get_output_embeddings().weight.dtype

    @property
    def n_layers(self) -> int:
        return self.anatomy.n_layers

    @property
    def max_length(self) -> int | None:
        """Tokens that the model can read; None where nothing limits them."""
        return context_length(self.module) or None

    @property
    def equal_lengths(self) -> bool:
        """Whether a batch must hold one length only: dynamic NTK and LongRoPE turn by the longest prompt of the batch."""
        settings = setting(text_config(self.module), "rope_parameters") or {}
        kinds = [settings.get("rope_type"), *(s.get("rope_type") for s in settings.values() if isinstance(s, dict))]
        return bool({"dynamic", "longrope"} & set(kinds))

    def bridge(self, copy: bool = False):
        """A TransformerBridge on a copy of the module tree that shares the parameter tensors; `copy=True` copies them too.

        Compatibility mode edits weights: take `copy=True` for it.
        """
        return make_bridge(self.module, self.tokenizer, copy=copy)


def load(source, tokenizer=None, device=None, dtype=None, revision=None, trust_remote_code=False, native=False, name=None) -> Model:
    """Open a model and prove that its stream can be read exactly.

    `source`: "smollm2-135m", "gemma-3-270m", "induction-2l", "bytes-4l", a Hugging Face name, a folder, a GGUF file, a loaded
    causal language model, a TransformerBridge or a Decoder. `dtype` None keeps the checkpoint's, `device` None takes CUDA where
    present. `native` gives the native Decoder with the same weights, where it can express the model. `name` is what tables and
    messages call the model, None for the source's own name; two models in memory need names to be told apart. A model already given to
    `load` may be given again.

    Raises :class:`SourceError` for what cannot be found, :class:`InputError` for parameters that do not fit, and
    :class:`UnsupportedModelError` for a model whose logits cannot be explained exactly, with what was measured.
    """
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise InputError(f"name must be text, or None; got {name!r}")
    if isinstance(source, Model):
        return source if name is None else replace(source, name=name)
    options = {"device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    opened = open_source(source, tokenizer=tokenizer, native=native, **options)
    anatomy, proof = understand(opened.module, trusted=opened.trusted)
    return Model(opened.module, opened.tokenizer, name or opened.name, opened.source, opened.revision, anatomy, proof)


def understand(module: nn.Module, trusted: bool = False) -> tuple[Anatomy, Proof]:
    """The proven anatomy of a causal language model.

    Raises :class:`UnsupportedModelError`, also for a model whose forward pass fails while it is watched.
    """
    try:
        return prove(module, discover(module, probe_ids(module)), skip=trusted)
    except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError, LookupError) as error:
        if isinstance(error, (StreamLensError, torch.OutOfMemoryError)) or _ours(error):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot be read: its forward pass fails while it is watched ({reason})"
        ) from error


def _ours(error: BaseException) -> bool:
    """Whether an error was raised by this package's code or by its shape checker, and so is a bug and no property of the model."""
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    return any(f"{os.sep}{package}{os.sep}" in where for package in ("streamlens", "jaxtyping", "beartype"))
