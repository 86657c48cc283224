"""What the proof at load saw of a block: which norms, where, and which multipliers. From the anatomy, not from names."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from streamlens.models.anatomy import Anatomy, Layer
from streamlens.models.norms import NormForm
from streamlens.stream.run import Run
from streamlens.stream.sites import watch_sites


def placement_facts(module: nn.Module, anatomy: Anatomy, ids: Tensor) -> dict[str, object]:
    """Norm kind and placement, parallel or not, writes a layer, and the multipliers of embedding, residual and logits.

    `norm_placement`: "pre" (only what a sublayer reads is normed), "sandwich" (and what it writes), "reordered" (only what it
    writes), "post" (the stream itself, after an addition), "none". Kinds and placements that differ between layers are joined by " and ".
    With several `streams`, vectors a token, what only writes and norms on their way can tell is "unknown".
    """
    factors = {round(f, 6) for layer in anatomy.layers for add in layer.adds for f in add.factors if add.norm is None or f != 1.0}
    scales = {round(s.scale, 6) for layer in anatomy.layers for s in layer.segments}
    facts = {
        "streams": anatomy.n_streams,
        "norm": _joined(_kind(form) for form in anatomy.norms.values()),
        "norm_placement": _joined(_placement(layer, anatomy) for layer in anatomy.layers),
        "final_norm": any(layer == anatomy.n_layers for layer, _ in anatomy.path_norms),
        "parallel": any({"attn", "mlp"} <= {w.kind for w in layer.writes} and not layer.reads_mid for layer in anatomy.layers),
        "writes_per_layer": _joined(str(len(layer.writes)) for layer in anatomy.layers),
        "embedding_multiplier": embedding_multiplier(module, anatomy, ids),
        "residual_multiplier": next(iter(factors)) if len(factors) == 1 else 1.0 if not factors else float("nan"),
        "stream_multiplier": next(iter(scales)) if len(scales) == 1 else float("nan"),
        "logit_multiplier": anatomy.logits.multiplier,
        "logit_softcap": float("nan") if anatomy.logits.cap is None else anatomy.logits.cap,
    }
    return facts if anatomy.n_streams == 1 else facts | _UNKNOWN


_UNKNOWN = dict.fromkeys(("norm_placement", "final_norm", "parallel", "writes_per_layer"), "unknown") | dict.fromkeys(
    ("residual_multiplier", "stream_multiplier"), float("nan")
)
"""What only an anatomy with writes can tell."""


@torch.no_grad()
def embedding_multiplier(module: nn.Module, anatomy: Anatomy, ids: Tensor) -> float:
    """What the token's row of the embedding matrix is multiplied with on its way into the stream; nan where it is more than that."""
    if anatomy.n_streams > 1:
        return float("nan")
    entered: list[Tensor] = []
    with Run.of(module, anatomy) as run:
        watch_sites(run, anatomy, ("resid_pre",), lambda site, layer, sub, x: entered.append(x.double()) if layer == 0 else None)
        run.hidden(ids)
    table = module.get_input_embeddings().weight
    rows = table[ids.to(table.device)].double()
    if rows.shape != entered[0].shape:
        return float("nan")
    factor = float((rows * entered[0]).sum() / rows.square().sum())
    exact = (rows * factor - entered[0]).abs().max() <= 1e-2 * entered[0].abs().max()
    return round(factor, 6) if bool(exact) else float("nan")


def _placement(layer: Layer, anatomy: Anatomy) -> str:
    index = anatomy.layers.index(layer)
    on_path = {path for number, path in anatomy.path_norms if number == index}
    reads = any(path.startswith(layer.path + ".") and path not in on_path for path in anatomy.norms)
    if layer.stream_norms:
        return "post"
    if any(add.norm for add in layer.adds):
        return "sandwich" if reads else "reordered"
    return "pre" if reads else "none"


def _kind(form: NormForm) -> str:
    name = "layernorm" if form.centred else "rmsnorm"
    return name if form.gain is not None else f"{name} without gain"


def _joined(values) -> str:
    return " and ".join(Counter(values)) or "none"
