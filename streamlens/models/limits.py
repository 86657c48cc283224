"""Every tolerance of the package, once: what a dtype can keep, and what more than that is an error."""

import torch
from torch import nn

from streamlens.decoder.model import Decoder

SUM = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""|sum of contributions - logit| / sum|parts|; a float64 model of transformers still computes its RMSNorms in float32."""

NATIVE_SUM = 1e-12
"""The same of a native decoder in float64, whose norms compute in their input's dtype."""

FIT = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""A block's fitted program, relative to the largest coordinate of the stream; the proof then holds it to its rounding."""

NORM = {torch.float64: 2e-6, torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""A norm's fitted form, relative to its largest output."""

LOGIT_MAP = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""The map from the unembedding's output to the printed logits, relative to the largest logit."""


def of_sum(module: nn.Module) -> float:
    """The limit of the sum rule for a model in its dtype."""
    dtype = module.get_output_embeddings().weight.dtype
    return NATIVE_SUM if dtype == torch.float64 and isinstance(module, Decoder) else SUM[dtype]


def room(dtype: torch.dtype) -> float:
    """What an intervention, a replay or a printed logit may be off by, of the largest value: 1e-4, or a few roundings of a narrow dtype."""
    return max(1e-4, 8 * torch.finfo(dtype).eps)
