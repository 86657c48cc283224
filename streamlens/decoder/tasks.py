"""Tasks whose answers are known: rows of tokens of which some follow from those before them, and these alone are scored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamlens.decoder.data import Batch
from streamlens.errors import InputError, choice, whole


@dataclass(frozen=True)
class RepeatedTokens:
    """A first token, then different random tokens that are repeated over and over, with a period of its own for each row.

    Scored is what the tokens before it tell: everything from the second token of the second round on. Only looking up what
    followed a token last time, an induction head's work (Olsson et al. 2022), solves it: the period varies.
    """

    n_tokens: int = 64
    length: int = 64
    shortest: int = 8
    longest: int = 32

    def __post_init__(self) -> None:
        whole("shortest", self.shortest, 2)
        if not self.shortest <= self.longest <= self.n_tokens:
            raise InputError(f"longest must be from shortest = {self.shortest} to n_tokens = {self.n_tokens}; got {self.longest}")
        whole("length", self.length, self.longest + 3)

    @property
    def n_vocab(self) -> int:
        return self.n_tokens + 1

    @property
    def first(self) -> int:
        """The id that every row starts with."""
        return self.n_tokens

    def draw(self, n: int, generator: torch.Generator) -> Batch:
        different = _shuffled(n, self.n_tokens, generator)
        period = torch.randint(self.shortest, self.longest + 1, (n, 1), generator=generator)
        at = torch.arange(self.length - 1)
        ids = torch.cat((torch.full((n, 1), self.first), different.gather(1, at % period)), dim=1)
        return Batch(ids, torch.arange(self.length) > period + 1)


@dataclass(frozen=True)
class ModularAddition:
    """a, b, =, (a + b) mod p. A share of all pairs, chosen by `seed`, is for training; `part` "test" draws from the others."""

    p: int = 113
    train_share: float = 0.5
    part: str = "train"
    seed: int = 0

    def __post_init__(self) -> None:
        whole("p", self.p, 2)
        choice("part", self.part, ("train", "test"))
        if not 0 < int(self.train_share * self.p**2) < self.p**2:
            raise InputError(f"train_share must leave pairs for both parts, of {self.p**2}; got {self.train_share!r}")

    @property
    def n_vocab(self) -> int:
        return self.p + 1

    @property
    def length(self) -> int:
        return 4

    @property
    def equals(self) -> int:
        """The id of the sign between question and answer."""
        return self.p

    def pairs(self) -> Tensor:
        """All pairs of this part, `[pair, 2]`."""
        order = torch.randperm(self.p**2, generator=torch.Generator().manual_seed(self.seed))
        n = int(self.train_share * self.p**2)
        chosen = (order[:n] if self.part == "train" else order[n:]).sort().values
        return torch.stack((chosen // self.p, chosen % self.p), dim=1)

    def rows(self, pairs: Tensor) -> Batch:
        """Questions with their answers."""
        a, b = pairs.unbind(1)
        ids = torch.stack((a, b, torch.full_like(a, self.equals), (a + b) % self.p), dim=1)
        return Batch(ids, torch.arange(4).expand_as(ids) == 3)

    def draw(self, n: int, generator: torch.Generator) -> Batch:
        pairs = self.pairs()
        return self.rows(pairs[torch.randint(len(pairs), (n,), generator=generator)])


@dataclass(frozen=True)
class BracketMatching:
    """Brackets of some kinds, opened and closed at random, then a sign, and then what closes those still open, and an end.

    Ids: 2k opens kind k and 2k + 1 closes it; then come `close_all`, `end` and `first`. Scored is all after the sign up to the end.
    """

    n_kinds: int = 2
    n_brackets: int = 16

    def __post_init__(self) -> None:
        whole("n_kinds", self.n_kinds, 1)
        whole("n_brackets", self.n_brackets, 1)

    @property
    def close_all(self) -> int:
        """The id of the sign that asks for the closing brackets."""
        return 2 * self.n_kinds

    @property
    def end(self) -> int:
        """The id behind the last bracket, also of the padding."""
        return 2 * self.n_kinds + 1

    @property
    def first(self) -> int:
        """The id that every row starts with."""
        return 2 * self.n_kinds + 2

    @property
    def n_vocab(self) -> int:
        return 2 * self.n_kinds + 3

    @property
    def length(self) -> int:
        return 2 * self.n_brackets + 3

    def draw(self, n: int, generator: torch.Generator) -> Batch:
        kinds = torch.randint(self.n_kinds, (n, self.n_brackets), generator=generator)
        closes = torch.rand(n, self.n_brackets, generator=generator) < 0.4
        ids = torch.full((n, self.length), self.end)
        scored = torch.zeros(n, self.length, dtype=torch.bool)
        for row in range(n):
            brackets, closing = _matched(kinds[row].tolist(), closes[row].tolist())
            ids[row, : 2 + len(brackets) + len(closing)] = torch.tensor([self.first, *brackets, self.close_all, *closing])
            scored[row, 2 + len(brackets) : 3 + len(brackets) + len(closing)] = True
        return Batch(ids, scored)


def _matched(kinds: list[int], closes: list[bool]) -> tuple[list[int], list[int]]:
    """Brackets, each closing the last open one where it closes, and those that close the rest."""
    brackets, open_ones = [], []
    for kind, closing in zip(kinds, closes, strict=True):
        if closing and open_ones:
            brackets.append(2 * open_ones.pop() + 1)
        else:
            open_ones.append(kind)
            brackets.append(2 * kind)
    return brackets, [2 * kind + 1 for kind in reversed(open_ones)]


@dataclass(frozen=True)
class KeyValueRecall:
    """Pairs of a key and a value, then each key again in another order, with its value, which is scored.

    Ids: keys, then values, then the first token of every row.
    """

    n_keys: int = 16
    n_values: int = 16
    n_pairs: int = 8

    def __post_init__(self) -> None:
        whole("n_values", self.n_values, 1)
        whole("n_pairs", self.n_pairs, 1)
        if self.n_pairs > self.n_keys:
            raise InputError(f"n_pairs must be at most n_keys = {self.n_keys}, since keys differ; got {self.n_pairs}")

    @property
    def first(self) -> int:
        """The id that every row starts with."""
        return self.n_keys + self.n_values

    @property
    def n_vocab(self) -> int:
        return self.n_keys + self.n_values + 1

    @property
    def length(self) -> int:
        return 4 * self.n_pairs + 1

    def draw(self, n: int, generator: torch.Generator) -> Batch:
        keys = _shuffled(n, self.n_keys, generator)[:, : self.n_pairs]
        values = self.n_keys + torch.randint(self.n_values, (n, self.n_pairs), generator=generator)
        order = _shuffled(n, self.n_pairs, generator)
        told = torch.stack((keys, values), dim=2).flatten(1)
        asked = torch.stack((keys.gather(1, order), values.gather(1, order)), dim=2).flatten(1)
        ids = torch.cat((torch.full((n, 1), self.first), told, asked), dim=1)
        at = torch.arange(self.length)
        return Batch(ids, ((at > 2 * self.n_pairs) & (at % 2 == 0)).expand_as(ids))


def _shuffled(n: int, size: int, generator: torch.Generator) -> Tensor:
    """`n` orders of the numbers below `size`."""
    return torch.rand(n, size, generator=generator).argsort(dim=1)
