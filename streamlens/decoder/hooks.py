"""TransformerLens' hook points at a decoder's places: the one file of the decoder that imports it, and only when asked to.

Names are TransformerLens' own. `hook_resid_mid` is what stands between the sublayers before any norm on the stream itself,
and `hook_resid_post` is what a block hands on; `hook_attn_out` and `hook_mlp_out` are what is added, after branch norm and
multiplier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from streamlens.decoder.hookable import Hookable, passed
from streamlens.decoder.model import Decoder

NORMS = {"norm1": "ln1", "norm2": "ln2", "norm1_post": "ln1_post", "norm2_post": "ln2_post", "final_norm": "ln_final"}
"""TransformerLens' names of norms where ours differ."""


class HookedDecoder(HookedRootModule):
    """A decoder with hook points, on the decoder's own weights: `run_with_cache`, `run_with_hooks`, `add_hook`.

    Called on token ids it gives logits. A point without hooks is not in the pass.
    """

    def __init__(self, decoder: Decoder):
        super().__init__()
        self._points: list[tuple[Hookable, str, HookPoint]] = []
        for path, module in decoder.named_modules():
            if isinstance(module, Hookable):
                for place in module.places:
                    point = HookPoint()
                    _put(self, (*(NORMS.get(part, part) for part in path.split(".") if part), place), point)
                    self._points.append((module, place, point))
        self.setup()  # it names every module that is here already, and the decoder's are not ours to name
        self.decoder = decoder

    def forward(self, input_ids: Tensor, **kwargs) -> Float[Tensor, "batch pos vocab"]:
        with self._planted():
            return self.decoder(input_ids, **kwargs).logits

    @contextmanager
    def _planted(self) -> Iterator[None]:
        """The points that have hooks at their places, for the length of a pass."""
        # Not by setattr: a module set so would become part of the decoder.
        used = [(vars(module), place, point) for module, place, point in self._points if point.has_hooks()]
        try:
            for attributes, place, point in used:
                attributes[place] = point
            yield
        finally:
            for attributes, place, _ in used:
                attributes[place] = passed


def _put(root: nn.Module, parts: tuple[str, ...], point: HookPoint) -> None:
    """The point at its dotted name below `root`, in modules made on the way."""
    for part in parts[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    root.add_module(parts[-1], point)
