"""stub"""
from dataclasses import dataclass, replace
import torch
from streamlens.models.logits import fit_logit_map
from streamlens.stream.run import Run
@dataclass(frozen=True)
class Proof:
    a: int = 0
def probe_ids(module):
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, module.get_output_embeddings().weight.shape[0], (2, 7), generator=g)
@torch.no_grad()
def prove(module, anatomy, skip=False):
    ids = probe_ids(module)
    with Run(module, anatomy.block_paths, anatomy.unembed, anatomy.n_layers) as run:
        h = run.hidden(ids); y = run.logits(ids)
    u = module.get_submodule(anatomy.unembed)(h)
    return replace(anatomy, logits=fit_logit_map(module, u, y)), Proof()
