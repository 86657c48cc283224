"""What the benchmarks share: sides that alternate in one process, ratios within a round, peaks in fresh processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch

MODEL = "smollm2-135m"

Seconds = dict[str, list[float]]
"""By side, one number a round."""


def tokens(model, batch: int, pos: int) -> torch.Tensor:
    """Random ordinary tokens: timing does not depend on which."""
    return torch.randint(1000, model.anatomy.n_vocab, (batch, pos), generator=torch.Generator().manual_seed(0))


def wide():
    """A random Llama, eight layers as wide as those of a 1B model: its weights change no timing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=1024)).eval()


@torch.no_grad()
def plain(model, ids: torch.Tensor, logits: bool = True) -> torch.Tensor:
    """A plain forward pass of transformers (sdpa, no cache)."""
    module = model.module if logits else model.module.get_decoder()
    return module(input_ids=ids, use_cache=False)[0]


def settle() -> None:
    """Let glibc's allocator come to rest: what lies free above a threshold goes back to the system and is paged in anew.

    The threshold follows the largest block that was ever freed (up to 32 MiB). Below it a plain pass of the default model pages in between
    nothing and 200,000 pages (up to a tenth of its time and more), by chance and on either side; above it, none on either.
    """
    torch.zeros(31 * 2**20, dtype=torch.uint8)


def alternate(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: Sequence[Callable[[], object]] = (),
) -> Seconds:
    """Seconds of each side in each round, after a warm-up: one of each side where none is given."""
    settle()
    for call in warm_up or sides.values():
        call()
    seconds: Seconds = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = clock()
            side()
            seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: Seconds, one: str, other: str) -> float:
    """The median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def report(what: str, measured: float, asked: float, at_least: bool = False) -> None:
    met = measured >= asked if at_least else measured <= asked
    print(f"{measured:6.3f}  ({'at least' if at_least else 'at most'} {asked:.2f}: {'met' if met else 'MISSED'})  {what}", flush=True)


def peaks_of(script: str, sides: tuple[str, ...], rounds: int) -> dict[str, float]:
    """The median of each side's peak memory in MiB, every round in a fresh process of `script`, which prints :func:`peak`."""
    peaks: dict[str, list[int]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, seen in peaks.items():
            seen.append(int(subprocess.check_output([sys.executable, script, f"--memory-of={side}"], text=True).split()[-1]) // 1024)
    print(f"    MiB in each fresh process: {peaks}")
    return {side: statistics.median(seen) for side, seen in peaks.items()}


def peak(call: Callable[[], object]) -> int:
    """The peak resident set of a call, its result included, less what is resident before it, in KiB (Linux)."""
    before = _status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:  # the high-water mark starts anew from what is resident now
        file.write("5")
    result = call()
    highest = _status("VmHWM")
    del result
    return highest - before


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))
