"""Neurons in the readout: what each hands to its MLP's down projection, times the direction in which that output is read."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.models.anatomy import Anatomy
from streamlens.models.structure import bias_of
from streamlens.stream.run import Place, Run, tensor_name
from streamlens.stream.tap import Places, Tap


class NeuronTap(Tap):
    """Keeps the input of the down projections `down`, by the place of the write that each makes."""

    def __init__(self, module: nn.Module, down: dict[Place, str], places: Places):
        super().__init__(places)
        self.module, self.down = module, down
        self._post: dict[Place, Tensor] = {}
        self._leaf = {(layer, path): (layer, leaf) for (layer, leaf), path in down.items()}

    def plant(self, run: Run, anatomy: Anatomy) -> None:
        for path in dict.fromkeys(self.down.values()):
            run.on_input(path, lambda layer, named, path=path: self._see((layer, path), named))

    def close(self) -> None:
        self._post.clear()

    def _see(self, at: Place, named: dict) -> None:
        if at in self._leaf:
            x = named[tensor_name(named)]
            self._post[self._leaf[at]] = self.places.keep(x.reshape(-1, x.shape[-1]))

    def shares(self, place: Place, g: Float[Tensor, "row d_model"], at: Int[Tensor, " row"]) -> Float[Tensor, "row d_mlp"]:
        """Each neuron's share, `g` being the direction in which the MLP's output is read at the positions `at`."""
        post = self._post[place][self.places.index(at)].to(g.dtype)
        return pulled_through(self.module.get_submodule(self.down[place]), g, post).mul_(post)

    def bias_share(self, place: Place, g: Float[Tensor, "row d_model"]) -> Float[Tensor, " row"] | None:
        """The share of the down projection's bias, None where it has none."""
        bias = bias_of(self.module.get_submodule(self.down[place]))
        return None if bias is None else g @ bias.to(g)


def pulled_through(linear: nn.Module, g: Float[Tensor, "row d_out"], x: Float[Tensor, "row d_in"]) -> Float[Tensor, "row d_in"]:
    """The direction `g` at a linear map's output, seen from its input; packed and adapted maps are asked by differentiating them."""
    if type(linear) is nn.Linear:
        return g @ linear.weight.to(g.dtype)
    if type(linear).__name__ == "Conv1D":
        return g @ linear.weight.T.to(g.dtype)
    with torch.enable_grad():
        x = x.to(next((p.dtype for p in linear.parameters() if p.is_floating_point()), x.dtype)).requires_grad_()
        out = linear.forward(x)  # not called: the hooks of the pass that is under way are still there
        return torch.autograd.grad(out, x, g.to(out.dtype))[0].to(g.dtype)
