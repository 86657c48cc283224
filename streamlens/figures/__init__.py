"""Figures for papers and notebooks: a table in, matplotlib Axes out. No pyplot state, no torch.

Every function takes `ax=`; without it the Axes are on a figure of their own, which Jupyter shows as `ax.figure`.
"""

from streamlens.figures.ablation import removal
from streamlens.figures.attribution import heads, waterfall
from streamlens.figures.effects import effects
from streamlens.figures.lens import lens
from streamlens.figures.maps import depth_use, norm_map
from streamlens.figures.norms import growth
from streamlens.figures.parts import norm_parts
from streamlens.figures.promotes import promotes
from streamlens.figures.style import save, style
from streamlens.figures.writes import gradients, writes

__all__ = [
    "depth_use",
    "effects",
    "gradients",
    "growth",
    "heads",
    "lens",
    "norm_map",
    "norm_parts",
    "promotes",
    "removal",
    "save",
    "style",
    "waterfall",
    "writes",
]
