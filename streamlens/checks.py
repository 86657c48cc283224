"""What a call found, held against the contract: sums, printed logits, replays, finite values."""

from __future__ import annotations

import warnings

import numpy as np

from streamlens.errors import AdditivityError, NumericError, StreamLensError
from streamlens.measure import ablation as removal
from streamlens.measure import attribution as dla
from streamlens.models import limits
from streamlens.models.loaded import Model
from streamlens.prompts import Prompts, TokenBatch


def demand_finite(model: Model, what: str, bad: int, check: bool | str) -> None:
    """Refuse (or warn of) `bad` values that are not numbers, as a float16 stream that overflows gives."""
    if bad and check is not False:
        complain(NumericError(f"{model.name}: {what} is not finite in {bad} places"), check)


def demand_replayed(model: Model, batch: TokenBatch, plan: removal.Plan) -> None:
    """The middle change of a batch, by replay and by a plainly hooked forward pass."""
    number = len(plan.changes) // 2
    error, limit = removal.replay_error(model.module, model.anatomy, batch, plan, number), limits.room(model.dtype)
    if not error <= limit:
        what = f"the change at layer {plan.changes[number].layer} by replay misses the hooked pass"
        raise NumericError(f"{model.name}: {what} by {error:.2g} (limit {limit:.0e})")


def demand_near(model: Model, what: str, error: float) -> None:
    """Refuse what misses the model's own forward pass by more than its dtype may."""
    limit = limits.room(model.dtype)
    if not error <= limit:
        raise NumericError(f"{model.name}: {what} misses the model's own forward pass by {error:.2g} (limit {limit:.0e})")


def complain(error: StreamLensError, check: bool | str) -> None:
    """Raise, or only warn where that was asked for."""
    if check != "warn":
        raise error
    warnings.warn(str(error), stacklevel=4)


def check_sums(model: Model, prompts: Prompts, shares: dla.Shares, check: bool | str) -> None:
    """The sum rule, at every row of a batch."""
    limit = limits.of_sum(model.module)
    worst = int(np.nan_to_num(shares.error, nan=np.inf).argmax())
    error = float(shares.error[worst])
    if error <= limit or check is False:
        return
    prompt, position = int(shares.readouts.prompt[worst]), int(shares.readouts.position[worst])
    missed = f"miss the logit by {error:.2g} of sum|parts| (limit {limit:.0e})" if np.isfinite(error) else "or the logit are not finite"
    message = f"{model.name}: contributions {missed} at position {position} of prompt {prompt} ({prompts.texts[prompt][:60]!r})"
    complain(AdditivityError(message), check)


def check_printed(model: Model, prompts: Prompts, batch: TokenBatch, shares: dla.Shares) -> None:
    """Every logit of a batch against what the model itself prints, to a few roundings of its dtype."""
    limit = limits.room(model.dtype)
    error = dla.printed_error(model.module, model.anatomy, batch, shares)
    worst = int(np.nan_to_num(error, nan=np.inf).argmax())
    if error[worst] <= limit:
        return
    prompt, position = int(shares.readouts.prompt[worst]), int(shares.readouts.position[worst])
    raise AdditivityError(
        f"{model.name}: the logit misses what the model prints by {error[worst]:.2g} of the largest (limit {limit:.0e}) "
        f"at position {position} of prompt {prompt} ({prompts.texts[prompt][:60]!r})"
    )
