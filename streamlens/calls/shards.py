"""What a sweep has finished, in a folder: one Parquet file a batch and stretch of variants, whole or not there at all.

The folder of a sweep is named after everything that its numbers depend on, so that another model, prompt or argument never finds them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from streamlens import __version__, schema
from streamlens.errors import InputError
from streamlens.measure.ablation import Removal
from streamlens.measure.readings import Readings
from streamlens.models.loaded import Model
from streamlens.prompts import Readouts


@dataclass(frozen=True)
class Shards:
    """Named arrays of numbers in one folder."""

    folder: Path

    def get(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays of this name, float64 and flat; None where they are not finished."""
        path = self.folder / f"{name}.parquet"
        if not path.is_file():
            return None
        df = pd.read_parquet(path)
        return {str(array): values.to_numpy(np.float64) for array, values in df.groupby("array", observed=True, sort=False)["value"]}

    def put(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        flat = {array: np.asarray(values, dtype=np.float64).reshape(-1) for array, values in arrays.items()}
        codes = np.repeat(np.arange(len(flat), dtype=np.int32), [len(v) for v in flat.values()])
        array = pd.Categorical.from_codes(codes, categories=list(flat))
        values = np.concatenate([*flat.values(), np.zeros(0)])
        schema.write_parquet(pd.DataFrame({"array": array, "value": values}), self.folder / f"{name}.parquet")


def opened_shards(folder: str | os.PathLike, model: Model, facts: Mapping[str, object]) -> Shards:
    """The folder of one sweep within `folder`, made where it is missing. Raises InputError where `folder` is a file."""
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise InputError(f"resume must be a folder; got {os.fspath(folder)!r}, which is a file")
    told = json.dumps({"version": __version__, "model": fingerprint(model), **facts}, sort_keys=True, default=str)
    own = root / hashlib.sha256(told.encode()).hexdigest()[:16]
    own.mkdir(parents=True, exist_ok=True)
    return Shards(own)


@torch.no_grad()
def fingerprint(model: Model) -> str:
    """What tells this model's numbers from another's: class, dtype, config, and two sums over every parameter."""
    config = getattr(model.module, "config", None)
    digest = hashlib.sha256(f"{type(model.module).__name__} {model.dtype} {config}".encode())
    for name, p in model.module.named_parameters():
        weights = torch.arange(1, p.shape[-1] + 1, device=p.device).sqrt() if p.dim() else torch.ones((), device=p.device)
        sums = p.sum(dtype=torch.float64), (p.reshape(-1, weights.numel()).sum(0, dtype=torch.float64) * weights).sum()
        digest.update(f"{name} {tuple(p.shape)} {[float(s).hex() for s in sums]}".encode())
    return digest.hexdigest()


def as_arrays(removal: Removal) -> dict[str, np.ndarray]:
    """What a batch's numbers are, without what is known beforehand."""
    out = {f"readouts/{name}": getattr(removal.readouts, name) for name in ("prompt", "position", "target", "versus")}
    out["overflowed"] = np.array([removal.overflowed])
    out |= _flat("", Readings(removal.at_position, removal.at_target))
    return out if removal.corrupted is None else out | _flat("corrupted/", removal.corrupted)


def from_arrays(arrays: Mapping[str, np.ndarray], like: Removal) -> Removal:
    """The numbers of :func:`as_arrays`; places and the rest as in `like`."""
    ids = [arrays.get(f"readouts/{name}", np.zeros(0)).astype(np.int64) for name in ("prompt", "position", "target", "versus")]
    table = _table("", arrays)
    corrupted = _table("corrupted/", arrays) if any(name.startswith("corrupted/") for name in arrays) else None
    bad = int(arrays["overflowed"][0])
    return Removal(like.prompt, like.position, table.at_position, Readouts(*ids), table.at_target, bad, corrupted, like.made_at)


def joined(parts: list[Removal]) -> Removal:
    """Stretches of the variants of one batch as one."""
    one = parts[0]
    tables = [
        {name: (clean, np.concatenate([getattr(p, kind)[name][1] for p in parts])) for name, (clean, _) in getattr(one, kind).items()}
        for kind in ("at_position", "at_target")
    ]
    bad = sum(p.overflowed for p in parts)
    return Removal(one.prompt, one.position, tables[0], one.readouts, tables[1], bad, one.corrupted, one.made_at)


def _flat(prefix: str, table: Readings) -> dict[str, np.ndarray]:
    out = {}
    for kind in ("at_position", "at_target"):
        for name, (clean, changed) in getattr(table, kind).items():
            out |= {f"{prefix}{kind}/{name}/clean": clean, f"{prefix}{kind}/{name}/changed": changed}
    return out


def _table(prefix: str, arrays: Mapping[str, np.ndarray]) -> Readings:
    kinds: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {"at_position": {}, "at_target": {}}
    for kind, metrics in kinds.items():
        start = f"{prefix}{kind}/"
        for name in (
            array.removeprefix(start).removesuffix("/clean") for array in arrays if array.startswith(start) and array.endswith("/clean")
        ):
            clean = arrays[f"{start}{name}/clean"]
            metrics[name] = clean, arrays[f"{start}{name}/changed"].reshape(-1, len(clean))
    return Readings(**kinds)
