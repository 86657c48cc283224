"""A mixture of experts: each token goes through the few MLPs that a router picks for it, weighed by the router.

Softmax over all experts, the top k chosen and (as Mixtral does) renormalised; shared experts run for every token besides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.hookable import Hookable
from streamlens.decoder.mlp import MLP, GatedMLP, activation


class Experts(nn.Module):
    """All routed experts of a layer, fused: gates and ups `[expert, d_mlp, d_model]`, downs `[expert, d_model, d_mlp]`."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        inward = (config.n_experts, config.mlp_width, config.d_model)
        self.act = activation(config)
        self.gate_proj = nn.Parameter(torch.empty(inward)) if config.gated else None
        self.up_proj = nn.Parameter(torch.empty(inward))
        self.down_proj = nn.Parameter(torch.empty(config.n_experts, config.d_model, config.mlp_width))

    def forward(
        self, x: Float[Tensor, "token d_model"], top_k_index: Int[Tensor, "token slot"], top_k_weights: Float[Tensor, "token slot"]
    ) -> Float[Tensor, "token d_model"]:
        """The weighed sum of each token's chosen experts; arguments as transformers' families name theirs."""
        out = torch.zeros_like(x)
        for expert in range(len(self.up_proj)):
            token, slot = torch.where(top_k_index == expert)
            if len(token):
                out = out.index_add(0, token, self._one(expert, x[token]) * top_k_weights[token, slot, None])
        return out

    def _one(self, expert: int, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.up_proj[expert])
        hidden = self.act(hidden) if self.gate_proj is None else self.act(F.linear(x, self.gate_proj[expert])) * hidden
        return F.linear(hidden, self.down_proj[expert])


class MoE(Hookable):
    """Router, experts and shared experts; a pass in training leaves its load-balancing loss to be taken."""

    PLACES = ("hook_expert_weights", "hook_expert_indices")

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.experts = Experts(config)
        width = config.n_shared_experts * config.mlp_width
        kind = GatedMLP if config.gated else MLP
        self.shared_experts = kind(config, width) if width else None
        self._aux_loss: Tensor | None = None

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        tokens = x.flatten(0, 1)
        probability = self.router(tokens).softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, index = probability.topk(self.config.n_experts_active, dim=-1)
        if self.config.expert_weights_sum_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        weights, index = self.hook_expert_weights(weights), self.hook_expert_indices(index)
        self._aux_loss = load_balancing_loss(probability, index) if self.training else None
        out = self.experts(tokens, index, weights.to(x.dtype)).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def take_aux_loss(self) -> Float[Tensor, ""]:
        """The last pass's load-balancing loss, once: kept, its graph would be."""
        loss, self._aux_loss = self._aux_loss, None
        return loss


def load_balancing_loss(probability: Float[Tensor, "token expert"], index: Int[Tensor, "token slot"]) -> Float[Tensor, ""]:
    """n * sum_e f_e P_e: the share of slots that an expert got times its mean probability; 1 when all is even (Fedus et al. 2021)."""
    n = probability.shape[-1]
    share = F.one_hot(index, n).to(probability).mean((0, 1))
    return n * (share * probability.mean(0)).sum()


def make_mlp(config: DecoderConfig) -> nn.Module | None:
    """The MLP of a block; None for attention-only models."""
    if config.mlp == "none":
        return None
    if config.n_experts:
        return MoE(config)
    return GatedMLP(config) if config.gated else MLP(config)
