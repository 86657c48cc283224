"""Training: AdamW, warm-up and a cosine, clipped gradients, checkpoints; a run that is taken up again is the run itself."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import nn

from streamlens.decoder.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from streamlens.decoder.data import Batch, Data, batch_of
from streamlens.decoder.history import History, Log
from streamlens.decoder.look import look
from streamlens.decoder.loss import scored_loss
from streamlens.decoder.model import Decoder
from streamlens.errors import InputError, NumericError, whole

_LOOKED_AT = 4  # rows of a batch


@dataclass(frozen=True)
class TrainConfig:
    """How to train. A step is one update with the gradient of one batch; a checkpoint is taken up only with the same values."""

    steps: int
    batch: int = 32  # rows
    learning_rate: float = 1e-3  # at its highest, after warm-up
    final_share: float = 0.1  # of it, at the last step
    warm_up: int = 100  # steps
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; gains, biases and sinks have none
    clip: float | None = 1.0  # the largest norm that all gradients have together; None: any
    seed: int = 0  # of the data and of whatever the model draws
    bf16: bool = False  # forward passes in bf16 where autocast says so; weights and their updates stay as they are
    look_every: int = 100  # steps between two looks inside; 0: none
    checkpoint_every: int = 0  # steps between two checkpoints; 0: one at the end, where a folder is given

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, least in (("steps", 1), ("batch", 1), ("warm_up", 0), ("seed", 0), ("look_every", 0), ("checkpoint_every", 0)):
            whole(name, getattr(self, name), least)
        for name, bound in (("learning_rate", math.inf), ("final_share", 1), ("weight_decay", math.inf)):
            if not 0 <= getattr(self, name) <= bound:
                raise InputError(f"{name} must be a number from 0 to {bound}; got {getattr(self, name)!r}")
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip must be a positive number or None; got {self.clip!r}")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, from 0: a line up, then half a cosine down to `final_share` (Loshchilov and Hutter 2017)."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        past = (step - self.warm_up) / max(1, self.steps - 1 - self.warm_up)
        return self.learning_rate * (self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * past)) / 2)


def train(
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    *,
    folder: str | os.PathLike | None = None,
    until: int | None = None,
    watch: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> History:
    """Train a model in place on what `data` draws, and say how it went, from the first step on.

    `model` is a :class:`Decoder`, or any module whose output for token ids `[batch, pos]` has `logits` (without looks inside). With a
    `folder`, checkpoints are kept there, and the last one is where training goes on: losses and weights are those of an unbroken run.
    `until` ends it early, after so many steps in all; the steps pass through `watch`, a progress bar. Raises :class:`InputError` for
    data that the model cannot read and a folder that holds another run, and :class:`NumericError`, before the update, for a loss or
    gradient that is not finite.
    """
    _check(model, data, config, until)
    end = config.steps if until is None else min(until, config.steps)
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, config)
    with _training(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        done, log = _taken_up(folder, model, optimizer, data, config)
        for step in watch(range(done, end)):
            batch = batch_of(data, config.batch, config.seed, step).to(device)
            if isinstance(model, Decoder) and config.look_every and step % config.look_every == 0:
                attention_logit, stream_norm = look(model, batch.ids[:_LOOKED_AT])
                log.add(looked=step, attention_logit=attention_logit, stream_norm=stream_norm)
            rate = config.rate_at(step)
            loss, gradient_norm = _update(model, optimizer, batch, config, rate, step)
            log.add(step=step, loss=loss, gradient_norm=gradient_norm, learning_rate=rate)
            due = config.checkpoint_every and (step + 1) % config.checkpoint_every == 0
            if folder is not None and (due or step + 1 == end):
                write_checkpoint(folder, step + 1, _state(model, optimizer, data, config, log))
    return log.history()


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) in two groups: what has two axes or more decays, gains, biases and sinks do not."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
    )


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, config: TrainConfig, rate: float, step: int):
    """One step; gives its loss and the norm of its gradient."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    precision = torch.autocast(batch.ids.device.type, torch.bfloat16) if config.bf16 else nullcontext()
    with precision:
        out = model(batch.ids)
    loss = scored_loss(out.logits, batch)
    balance = getattr(out, "aux_loss", None)
    (loss if balance is None else loss + model.config.aux_loss * balance).backward()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    norm = nn.utils.clip_grad_norm_(weights, math.inf if config.clip is None else config.clip)
    values = loss.item(), norm.item()
    if not all(map(math.isfinite, values)):
        raise NumericError(
            f"step {step} gives a loss of {values[0]:.4g} and a gradient of norm {values[1]:.4g}; the weights are those before it"
        )
    optimizer.step()
    optimizer.zero_grad()
    return values


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Training mode inside; the mode from before and no gradients afterwards."""
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was_training)
        model.zero_grad()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, config: TrainConfig, log: Log) -> dict:
    return {
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if next(model.parameters()).is_cuda else None,
        "history": log.history().to_dict(),
        "run": _run(model, data, config),
        "decoder": model.config.to_dict() if isinstance(model, Decoder) else None,
    }


def _run(model: nn.Module, data: Data, config: TrainConfig) -> dict:
    """What makes a run this run and no other, by name."""
    return (
        asdict(config) | {"data": repr(data)} | (model.config.to_dict() if isinstance(model, Decoder) else {"model": type(model).__name__})
    )


def _taken_up(folder, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, config: TrainConfig) -> tuple[int, Log]:
    """The steps done and the log so far, with model, optimizer and generators as they were then."""
    kept = {} if folder is None else checkpoints(folder)
    if not kept:
        return 0, Log()
    done, path = list(kept.items())[-1]
    state = read_checkpoint(path)
    for name, value in _run(model, data, config).items():
        if state["run"].get(name) != value:
            raise InputError(
                f"folder must hold checkpoints of the same run: {path.name} has {name} {state['run'].get(name)!r}; got {value!r}"
            )
    model.load_state_dict(state["weights"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] is not None:
        torch.cuda.set_rng_state(state["random_cuda"])
    return done, Log(state["history"])


def _check(model: nn.Module, data: Data, config: TrainConfig, until: int | None) -> None:
    if until is not None:
        whole("until", until, 1)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise InputError("model must have a weight that requires a gradient; got none")
    if isinstance(model, Decoder):
        c = model.config
        if data.n_vocab > c.n_vocab:
            raise InputError(f"data must have at most n_vocab = {c.n_vocab} token ids; got {data.n_vocab}")
        if data.length > c.max_length:
            raise InputError(f"data must have rows of at most max_length = {c.max_length} tokens; got {data.length}")
