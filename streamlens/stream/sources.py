"""Source positions in the readout: attention weight times value, times the direction in which attention's output is read.

Attention is taken where a family looks its function up. What stands between that function and the concatenated heads z
(an output gate, a norm inside the sublayer) is frozen at this pass, as every norm on the residual path is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.attention import eager_attention, replaced_attention
from streamlens.stream.inner_norms import freeze_inside
from streamlens.stream.patterns import by_value, pattern_at
from streamlens.stream.readout import Key
from streamlens.stream.run import Run
from streamlens.stream.tap import Places, Tap


@dataclass
class _Attention:
    """One call of an attention function."""

    output: Float[Tensor, "batch pos head d_v"]  # a leaf
    value: Float[Tensor, "batch kv_head source d_v"]
    pattern: Float[Tensor, "place head source"]
    z: Tensor | None = None  # the concatenated heads, a function of `output`


class SourceTap(Tap):
    """Keeps attention's weights and values, and how its output becomes z."""

    def __init__(self, module: nn.Module, places: Places):
        super().__init__(places)
        self.module = module
        self._calls: dict[tuple[int, str], list[_Attention]] = {}  # by layer and sublayer, as they end
        self._found: dict[Key, _Attention] = {}

    def plant(self, run: Run, anatomy: Anatomy) -> None:
        self._writes = {(layer, "write", w.leaf): w for layer, w in anatomy.writes() if w.kind == "attn"}
        readers = dict.fromkeys(w.reader for w in self._writes.values())
        self._reader_of = {part: path for path in readers for part in self.module.get_submodule(path).modules()}
        run.within(replaced_attention(self.module, partial(self._attend, run)))
        freeze_inside(run, self.module, readers)

    def close(self) -> None:
        self._calls.clear()
        self._found.clear()

    def entered(self, key: Key, value: Tensor) -> None:
        write = self._writes.get(key)
        calls = self._calls.pop((key[0], write.reader), []) if write is not None else []
        if len(calls) == 1 and value.requires_grad:
            calls[0].z = value
            self._found[key] = calls[0]

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def check(self) -> None:
        """Raise :class:`UnsupportedModelError` where an attention did not come by, or does not have one pattern a head."""
        for key, write in self._writes.items():
            if (reason := self._unseen(key, write)) is not None:
                kind = type(self.module.get_submodule(write.reader)).__name__
                raise UnsupportedModelError(f"{type(self.module).__name__} cannot be split by source: {kind} of layer {key[0]} {reason}")

    def _unseen(self, key: Key, write: Write) -> str | None:
        if key not in self._found:
            return "does not attend through a function that it looks up, once a pass"
        return None if self._found[key].output.shape[2] == write.n_heads else "has heads that are not one attention pattern each"

    def shares(
        self, key: Key, g: Float[Tensor, "... width"], at: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, "row head source"], Float[Tensor, "row head source"]]:
        """Each source's share in each head, and the attention weights; `g` is the direction in which z is read."""
        call = self._found[key]
        read = torch.autograd.grad(call.z, call.output, g.reshape(call.z.shape), retain_graph=True)[0].flatten(0, 1)[at]
        pattern = call.pattern[torch.searchsorted(self.places.flat.to(at.device), at)]
        wide = torch.promote_types(g.dtype, torch.float32)
        shares = torch.empty(pattern.shape, dtype=wide, device=pattern.device)
        batch = at // call.output.shape[1]
        for prompt in batch.unique():
            rows = batch == prompt
            shares[rows] = by_value(read[rows].to(wide), call.value[prompt].to(wide))
        return shares.mul_(pattern), pattern.to(wide)

    # -- hooks ---------------------------------------------------------------------------------------------------
    def _attend(self, run: Run, function: Callable, part: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
        output, pattern = function(part, query, key, value, *args, **kwargs)
        shape = (*run.shape, query.shape[1], value.shape[-1])
        if part not in self._reader_of or output.shape != shape or key.shape[2] != shape[1] or eager_attention(part) is None:
            return output, pattern
        leaf = output.detach().requires_grad_()
        rows = []
        for prompt, t in self.places.by_prompt(run.shape[1], query.device):
            own = partial(_of_prompt, prompt, run.shape[0])
            given, named = [own(x) for x in (query, key, value, *args)], {name: own(x) for name, x in kwargs.items()}
            rows.append(pattern_at(t, None if pattern is None else pattern[prompt], output[prompt], part, *given, **named))
        call = _Attention(leaf, value.detach(), torch.cat(rows).detach())
        self._calls.setdefault((run.now, self._reader_of[part]), []).append(call)
        return leaf.clone(), pattern


def _of_prompt(prompt: int, n_prompts: int, x: Any) -> Any:
    """One prompt's own of an argument that has one for each."""
    return x[prompt : prompt + 1] if isinstance(x, Tensor) and x.dim() == 4 and len(x) == n_prompts else x
