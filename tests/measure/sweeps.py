"""The slow truth of a sweep: every prompt by itself, every variant a full forward pass under plain hooks."""

import numpy as np
import torch

from streamlens.measure import units
from streamlens.stream.changes import Change
from streamlens.stream.experts import experts_of
from tests import hooked
from tests.tolerances import REPLAY


def variants(model, unit, spans=(1,)):
    return units.variants(model.anatomy, unit, range(model.n_layers), spans, None, experts_of(model.module, model.anatomy))


def keys_of(found):
    return list(dict.fromkeys(key for v in found for key in v.keys))


def mean(model, keys, reference, positional=False):
    """Means over the reference prompts, in float64: of all tokens but first ones, or of each position."""
    runs = [hooked.values(model, keys, ids) for ids in reference]
    length = max(map(len, reference))
    out = {}
    for key in keys:
        if positional:
            rows = [torch.stack([run[key][0, t].double() for run in runs if run[key].shape[1] > t]).mean(0) for t in range(length)]
            out[key] = torch.stack(rows)
        else:
            out[key] = torch.cat([run[key][0, 1:].double() for run in runs]).mean(0)
    return out


def changes(variant, values, n, at=None):
    """The variant as changes, `values` by key (absent: zero), cut to `n` positions."""
    made = []
    for site in variant.sites:
        value = values.get(site.key)
        value = value[..., :n, :] if value is not None and value.dim() > 1 else value
        part = None if site.part is None else slice(*site.part)
        made.append(Change(site.layer, site.path, part, value if value is None or part is None else value[..., part], at, site.expert))
    return made


def check(df, model, prompts, found, values_of, target=11, at=lambda n: None):
    """`target_logit` at every position of every prompt, against plain hooks; `values_of(prompt, sample)` gives the values by key."""
    assert set(df.metric) == {"target_logit"}
    with torch.no_grad():
        clean = [model.module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double() for ids in prompts]
    n_rows, moved = 0, 0.0
    for variant in found:
        for i, ids in enumerate(prompts):
            made = changes(variant, values_of(i, variant.sample), len(ids), at(len(ids)))
            logits = hooked.logits(model, made, torch.tensor([list(ids)]))[0].double()
            rows = df[(df.prompt == i) & (df.layer == variant.layer) & (df.sublayer == variant.sublayer)]
            rows = rows[(rows["head"] == variant.head) & (rows.span == variant.span)]
            rows = rows[rows.expert == variant.expert] if "expert" in rows else rows
            rows = rows[rows["sample"] == variant.sample] if "sample" in rows else rows
            assert rows.position.tolist() == list(range(len(ids)))
            size = float(max(logits.abs().max(), clean[i].abs().max()))
            for column, expected in (("ablated", logits), ("clean", clean[i])):
                assert abs(rows[column].to_numpy() - expected[:, target].numpy()).max() <= REPLAY * size, (variant, i, column)
            moved = max(moved, abs(rows.delta).max())
            n_rows += len(rows)
    assert n_rows == len(df)
    assert moved > 1e-3
    assert np.isfinite(df.delta).all()
