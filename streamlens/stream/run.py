"""One forward pass of a borrowed model up to the unembedding, with hooks that know which layer they are in.

Everything that streamlens does to a model happens through a :class:`Run`, and a run leaves nothing behind: no hook, no
changed flag, no changed mode, also after an exception or Ctrl-C.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from streamlens.errors import InputError
from streamlens.models.anatomy import Anatomy

Place = tuple[int, str]
"""(layer, module path): a module in one application of its block; embeddings have layer -1."""

InputHook = Callable[[int, dict[str, Any]], dict[str, Any] | None]
OutputHook = Callable[[int, Tensor, Tensor | None], Tensor | None]


class _Reached(Exception):
    """The unembedding was reached; nobody asked for the logits."""


@contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """The model in eval mode and without trainable parameters; afterwards as it was. One thread at a time has it.

    Raises :class:`InputError` under autocast, which would multiply in another dtype than the one that every limit is for.
    """
    device = next(module.parameters()).device.type
    if torch.is_autocast_enabled(device):
        raise InputError(f"autocast is on for {device}: leave it around streamlens' calls, or load the model in that dtype")
    with _lock_of(module):
        training = [m for m in module.modules() if m.training]
        # What was made under inference_mode takes no flag, and needs none.
        trainable = [p for p in module.parameters() if p.requires_grad and not p.is_inference()]
        try:
            for m in training:
                m.training = False
            for p in trainable:
                p.requires_grad_(False)
            yield
        finally:
            for m in training:
                m.training = True
            for p in trainable:
                p.requires_grad_(True)


_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def _lock_of(module: nn.Module) -> threading.RLock:
    """Hooks of two runs in one module would see each other's tensors."""
    with _locks_lock:
        return _locks.setdefault(module, threading.RLock())


class Run:
    """A context manager: plant hooks, then :meth:`hidden` as often as wanted.

    The layer given to a hook counts applications of blocks: -1 before the first, `n_layers` after the last.
    """

    def __init__(self, module: nn.Module, blocks: tuple[str, ...], unembed: str, n_layers: int | None = None):
        self.module, self.n_layers = module, n_layers
        self.layer, self.inside = -1, False
        self._handles: list[RemovableHandle] = []
        self._patched: list[tuple[nn.Module, Any]] = []
        self._borrow = borrowed(module)
        self._within = ExitStack()
        self._blocks, self._unembed = blocks, unembed
        self._shape = (0, 0)

    @classmethod
    def of(cls, module: nn.Module, anatomy: Anatomy) -> Run:
        """A run of a model whose anatomy is known."""
        return cls(module, anatomy.block_paths, anatomy.unembed, anatomy.n_layers)

    def __enter__(self) -> Run:
        self._borrow.__enter__()
        try:
            for path in self._blocks:
                block = self._part(path)
                self._handles.append(block.register_forward_pre_hook(self._enter_block))
                self._handles.append(block.register_forward_hook(self._leave_block))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._within.close()
        for handle in self._handles:
            handle.remove()
        for module, forward in self._patched:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
        self._borrow.__exit__(None, None, None)

    def _part(self, path: str) -> nn.Module:
        try:
            return self.module.get_submodule(path)
        except AttributeError as error:
            raise InputError(f"model has changed since it was loaded ({path} is gone): load it again") from error

    # -- hooks ---------------------------------------------------------------------------------------------------
    def on_input(self, path: str, hook: InputHook) -> None:
        """`hook(layer, named arguments)` before the module runs; it may return the arguments changed."""
        module = self.module.get_submodule(path)
        self._handles.append(module.register_forward_pre_hook(partial(self._before, hook, parameter_names(type(module))), with_kwargs=True))

    def on_output(self, path: str, hook: OutputHook) -> None:
        """`hook(layer, output, first input)` after the module ran; a tensor that it returns takes the output's place."""
        is_block = path in self._blocks
        self._handles.append(self.module.get_submodule(path).register_forward_hook(partial(self._after, hook, is_block), with_kwargs=True))

    def _before(self, hook: InputHook, names: tuple[str, ...], _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        named = dict(zip(names, args, strict=False))
        changed = hook(self.now, named | kwargs)
        if changed is None:
            return None
        return tuple(changed[n] for n in list(named)) + args[len(named) :], {k: changed[k] for k in kwargs}

    def _after(self, hook: OutputHook, is_block: bool, _: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        changed = hook(self.layer if is_block else self.now, first(output), given[0] if given else None)
        return None if changed is None else with_first(output, changed)

    def on_whole_output(self, path: str, hook: Callable[[int, Any], None]) -> None:
        """`hook(layer, output)` with all that the module returned, a tuple where it is one."""
        self._handles.append(self.module.get_submodule(path).register_forward_hook(lambda _, args, output: hook(self.now, output)))

    def replace(self, path: str, forward: Callable[..., Any]) -> None:
        """Put `forward(original, *args, **kwargs)` in the place of the module's own forward."""
        module = self.module.get_submodule(path)
        original = module.forward
        self._patched.insert(0, (module, module.__dict__.get("forward")))
        module.forward = lambda *args, **kwargs: forward(original, *args, **kwargs)

    def within(self, context: AbstractContextManager) -> None:
        """Enter a context that is left when the run ends."""
        self._within.enter_context(context)

    # -- the pass ------------------------------------------------------------------------------------------------
    @property
    def now(self) -> int:
        """The layer that runs; -1 before the first block, the number of layers after the last."""
        if self.inside or self.layer < 0 or self.n_layers is None or self.layer + 1 < self.n_layers:
            return self.layer
        return self.n_layers

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, pos) of the tokens that run."""
        return self._shape

    def hidden(self, ids: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None = None) -> Float[Tensor, "batch pos d_model"]:
        """The unembedding's input, right-padded positions included; the logits are never made."""
        kept: list[Tensor] = []
        handle = self.module.get_submodule(self._unembed).register_forward_pre_hook(partial(_keep_input, kept, True), with_kwargs=True)
        try:
            self._forward(ids, mask)
        except _Reached:
            pass
        finally:
            handle.remove()
        return kept[0]

    def logits(
        self, ids: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None = None
    ) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "batch pos vocab"]]:
        """The unembedding's input, and what the model itself prints."""
        kept: list[Tensor] = []
        handle = self.module.get_submodule(self._unembed).register_forward_pre_hook(partial(_keep_input, kept, False), with_kwargs=True)
        try:
            logits = self._forward(ids, mask).logits
        finally:
            handle.remove()
        return kept[0], logits

    def _forward(self, ids: Tensor, mask: Tensor | None) -> Any:
        self.layer, self.inside, self._shape = -1, False, tuple(ids.shape)
        device = self.module.get_input_embeddings().weight.device
        kwargs: dict[str, Any] = {"input_ids": ids.to(device)}
        accepted = parameter_names(type(self.module))
        # A mask of ones changes nothing but costs the fast causal path of scaled_dot_product_attention.
        if mask is not None and not bool(mask.all()) and "attention_mask" in accepted:
            kwargs["attention_mask"] = mask.to(device).long()
        if "use_cache" in accepted:
            kwargs["use_cache"] = False
        return self.module(**kwargs)

    def _enter_block(self, *_: object) -> None:
        self.layer, self.inside = self.layer + 1, True

    def _leave_block(self, *_: object) -> None:
        self.inside = False


class Planted:
    """A run with hooks of its own: a subclass plants them, and none is left behind, also where planting fails half-way."""

    def __init__(self, module: nn.Module, anatomy: Anatomy):
        self.module, self.anatomy = module, anatomy
        self._run = Run.of(module, anatomy)

    def __enter__(self) -> Planted:
        self._run.__enter__()
        try:
            self._plant()
        except BaseException:
            self._run.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._run.__exit__(*exc)

    def _plant(self) -> None:
        raise NotImplementedError


def _keep_input(kept: list[Tensor], stop: bool, _: nn.Module, args: tuple, kwargs: dict) -> None:
    kept.append(args[0] if args else next(iter(kwargs.values())))
    if stop:
        raise _Reached


def first(output: Any) -> Any:
    """The tensor of a module's output: most blocks return it bare, some as the first of a tuple."""
    return output[0] if isinstance(output, (tuple, list)) else output


def stream_of(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The stream among a module's arguments: the first floating-point tensor that is not one to be added to its output."""
    given = (*args, *(v for name, v in kwargs.items() if name != "residual"))
    return next(v for v in given if isinstance(v, Tensor) and v.is_floating_point())


def tensor_name(named: dict[str, Any]) -> str:
    """Which of a module's named arguments is its input: the first tensor."""
    return next(name for name, value in named.items() if isinstance(value, Tensor))


def with_first(output: Any, tensor: Tensor | None) -> Any:
    """The module's output with `tensor` in the tensor's place."""
    return type(output)((tensor, *output[1:])) if isinstance(output, (tuple, list)) else tensor


@cache
def parameter_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the positional parameters of a module's forward."""
    return tuple(p for p in inspect.signature(kind.forward).parameters if p != "self")
