"""Which norm a module is: found by calling it, and refused where it is none that can be frozen."""

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from streamlens.models import limits
from streamlens.models.norms import fit, looks_like_norm

D_MODEL = 24
NORMS = {  # the module, whether it centres, its epsilon, and its gain from its weight
    "LayerNorm": (lambda: nn.LayerNorm(D_MODEL, eps=1e-3), True, 1e-3, lambda w: w),
    "LayerNorm without gain": (lambda: nn.LayerNorm(D_MODEL, eps=1e-5, elementwise_affine=False), True, 1e-5, None),
    "LayerNorm without bias": (lambda: nn.LayerNorm(D_MODEL, eps=1e-5, bias=False), True, 1e-5, lambda w: w),
    "Llama": (lambda: LlamaRMSNorm(D_MODEL, eps=1e-6), False, 1e-6, lambda w: w),
    "Gemma": (lambda: Gemma2RMSNorm(D_MODEL, eps=1e-4), False, 1e-4, lambda w: 1 + w),
    "OLMo": (lambda: OlmoLayerNorm(D_MODEL), True, 1e-5, None),
    "torch RMSNorm": (lambda: nn.RMSNorm(D_MODEL, eps=1e-2), False, 1e-2, lambda w: w),
}


@torch.no_grad()
def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    module = NORMS[name][0]()
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape) * 0.5 + 0.3)
    return module.to(dtype)


@pytest.mark.parametrize("name", NORMS)
def test_form_is_found(name):
    module, (_, centred, eps, gain) = made(name), NORMS[name]
    form = fit(module, D_MODEL, torch.float32, torch.device("cpu"))
    assert form.centred == centred
    assert form.eps == pytest.approx(eps, rel=1e-3)
    if gain is None:
        assert form.gain is None
    else:
        assert torch.equal(form.gain, gain(module.weight.detach()))
    if getattr(module, "bias", None) is None:
        assert form.bias is None
    else:
        assert torch.allclose(form.bias, module.bias, atol=1e-6)


@pytest.mark.parametrize("dtype", list(limits.NORM))
@pytest.mark.parametrize("name", NORMS)
def test_form_gives_what_the_module_gives(name, dtype):
    module = made(name, dtype)
    form = fit(module, D_MODEL, dtype, torch.device("cpu"))
    x = torch.randn(5, 3, D_MODEL).to(dtype) * 4 + 1
    expected = module(x).detach().double()
    found = form(x.to(torch.promote_types(dtype, torch.float32))).double()
    assert float((found - expected).abs().max()) <= limits.NORM[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("name", NORMS)
def test_frozen_map_is_affine_and_pull_back_its_transpose(name):
    form = fit(made(name), D_MODEL, torch.float32, torch.device("cpu"))
    x, dx, g = torch.randn(3, 4, D_MODEL).unbind(0)
    assert torch.allclose((form.push_forward(dx, x) * g).sum(-1), (dx * form.pull_back(g, x)).sum(-1), atol=1e-4)
    assert torch.allclose(form.push_forward(3 * dx, x), 3 * form.push_forward(dx, x), atol=1e-4)
    bias = 0 if form.bias is None else form.bias
    assert torch.allclose(form(x), form.push_forward(x, x) + bias)


@pytest.mark.parametrize("name", ["LayerNorm", "Llama"])
def test_pull_back_does_not_differentiate_sigma(name):
    """The derivative of the norm itself is another: it takes out what a longer vector would not change."""
    form = fit(made(name), D_MODEL, torch.float32, torch.device("cpu"))
    x, g = torch.randn(2, 1, D_MODEL).unbind(0)
    x.requires_grad_()
    (full,) = torch.autograd.grad((form(x) * g).sum(), x)
    frozen = form.pull_back(g, x.detach())
    assert float((full * x).sum().detach()) == pytest.approx(0, abs=1e-3)
    assert abs(float((frozen * x).sum().detach())) > 0.1


class Module(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D_MODEL))
        self.forward = forward


@pytest.mark.parametrize(
    "forward",
    [
        torch.tanh,
        lambda x: x,
        lambda x: nn.functional.normalize(x, dim=-1),  # its gain would be 1 / sqrt(d_model), which it does not have
        lambda x: x / x.abs().mean(-1, keepdim=True),
        lambda x: x / x.std(-1, keepdim=True),
        lambda x: nn.functional.rms_norm(x, (D_MODEL,)).clamp(-1, 1),
        lambda x: nn.functional.rms_norm(x, (D_MODEL,)) + x,
        lambda x: x[..., :4],
        lambda x: (x, x),
        lambda x, gate: x * gate,
        lambda x: x @ torch.ones(3, 3),
    ],
    ids=["tanh", "identity", "l2", "mean abs", "not centred but std", "clamped", "residual", "narrow", "tuple", "gated", "wrong width"],
)
def test_what_is_no_norm_is_refused(forward):
    assert fit(Module(forward), D_MODEL, torch.float32, torch.device("cpu")) is None


def test_names_only_propose():
    assert looks_like_norm(nn.LayerNorm(4))
    assert looks_like_norm(LlamaRMSNorm(4))
    assert not looks_like_norm(nn.Linear(4, 4))
    assert not looks_like_norm(nn.Sequential(nn.LayerNorm(4)))
