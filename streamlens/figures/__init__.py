"""Figures for papers and notebooks: a table in, matplotlib Axes out. No pyplot state, no torch.

Every function takes `ax=`; without it the Axes are on a figure of their own, which Jupyter shows as `ax.figure`.
"""

from streamlens.figures.ablated import ablated_heads, ablated_positions, spans
from streamlens.figures.ablation import removal
from streamlens.figures.agreement import agreement
from streamlens.figures.attribution import heads, waterfall
from streamlens.figures.effects import effects
from streamlens.figures.lens import lens
from streamlens.figures.maps import depth_use, norm_map
from streamlens.figures.neurons import experts, neurons
from streamlens.figures.norms import growth
from streamlens.figures.parts import norm_parts
from streamlens.figures.promotes import promotes
from streamlens.figures.pruning import pruning
from streamlens.figures.sources import sources, tokens
from streamlens.figures.style import save, style
from streamlens.figures.writes import gradients, writes

__all__ = [
    "ablated_heads",
    "ablated_positions",
    "agreement",
    "depth_use",
    "effects",
    "experts",
    "gradients",
    "growth",
    "heads",
    "lens",
    "neurons",
    "norm_map",
    "norm_parts",
    "promotes",
    "pruning",
    "removal",
    "save",
    "sources",
    "spans",
    "style",
    "tokens",
    "waterfall",
    "writes",
]
