"""Summaries of the tables, DataFrame in and DataFrame out: means with bootstrap intervals, growth rates, the largest components.

The unit of resampling is the prompt, since the positions of one prompt depend on each other: a cluster bootstrap with percentile
intervals and a fixed seed.
"""

from streamlens.stats.depth import logit_by_depth, settled_layer, sink_rate
from streamlens.stats.forms import growth_forms, growth_ratios, growth_sources, initial_growth
from streamlens.stats.growth import growth_rate, log_norms
from streamlens.stats.means import mean_interval, top_components
from streamlens.stats.perplexity import perplexity
from streamlens.stats.ranks import rank_agreement

__all__ = [
    "growth_forms",
    "growth_rate",
    "growth_ratios",
    "growth_sources",
    "initial_growth",
    "log_norms",
    "logit_by_depth",
    "mean_interval",
    "perplexity",
    "rank_agreement",
    "settled_layer",
    "sink_rate",
    "top_components",
]
