"""The only door from arrays to DataFrames: codes and categories, never one string a row."""

from streamlens.frames.ablation import ablation
from streamlens.frames.attribution import attribution
from streamlens.frames.columns import Labels
from streamlens.frames.effects import effects
from streamlens.frames.growth import depth_use, gradients, norm_parts
from streamlens.frames.lens import lens
from streamlens.frames.norms import norm_summary, norms
from streamlens.frames.promotes import promotes
from streamlens.frames.similarity import similarity
from streamlens.frames.stamp import card, stamp, versions
from streamlens.frames.training import training

__all__ = [
    "Labels",
    "ablation",
    "attribution",
    "card",
    "depth_use",
    "effects",
    "gradients",
    "lens",
    "norm_parts",
    "norm_summary",
    "norms",
    "promotes",
    "similarity",
    "stamp",
    "training",
    "versions",
]
