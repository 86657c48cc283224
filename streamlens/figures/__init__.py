"""Figures for papers and notebooks: a table in, matplotlib Axes out. No pyplot state, no torch.

Every function takes `ax=`; without it the Axes are on a figure of their own, which Jupyter shows as `ax.figure`.
"""

from .ablation import removal
from .attribution import heads, waterfall
from .norms import growth
from .style import save, style

__all__ = ["growth", "heads", "removal", "save", "style", "waterfall"]
