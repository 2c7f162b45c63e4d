"""Tasks for small language models: associative recall, copying, and text.

A batch is a function of the seed and its number, on the host, so that every device trains on the same sequences.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bankfull.errors import ConfigError

IGNORED = -100
"""Target of places whose prediction does not count."""
HELD_OUT = 1 << 40
"""Numbers of batches from here on are held out of the training."""
POWER = 0.01
"""Exponent of the distances between a pair and its query: most are short, some are long."""


@dataclass(frozen=True, slots=True)
class TaskBatch:
    tokens: Tensor
    """(sequences, tokens)"""
    targets: Tensor
    """(sequences, tokens) the token after each place; IGNORED where any will do."""


class Task(Protocol):
    name: str
    length: int
    """Tokens of a sequence."""

    def batch(self, number: int, count: int) -> TaskBatch: ...

    def facts(self) -> dict[str, Any]:
        """Everything that determines the batches beside their number."""
        ...

    def words(self) -> list[str] | None:
        """The text of each token id; None: text has a tokenizer of its own."""
        ...


class RecallTask:
    """Multi-query associative recall: pairs of a key and a value, then some of the keys again; each asks for the value
    that followed it. Places without a query hold a filler."""

    name = "recall"

    def __init__(self, vocab: int, length: int, pairs: int, seed: int) -> None:
        self.keys = (vocab - 1) // 2
        self.length, self.pairs, self._seed = length, pairs, seed
        if not 1 <= pairs <= self.keys:
            raise ConfigError(
                f"--pairs {pairs} needs as many keys, and a vocabulary of {vocab} tokens has {max(0, self.keys)}; give "
                "fewer pairs or a larger 'vocab_size'."
            )
        if length < 4 * pairs:
            raise ConfigError(f"--length {length} cannot hold {pairs} pairs and their queries; give {4 * pairs}.")

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "length": self.length, "pairs": self.pairs}

    def words(self) -> list[str]:
        return ["_", *(f"k{i}" for i in range(self.keys)), *(f"v{i}" for i in range(self.keys))]

    def batch(self, number: int, count: int) -> TaskBatch:
        generator = _generator(self._seed, number)
        keys = 1 + torch.rand(count, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = 1 + self.keys + torch.randint(self.keys, (count, self.pairs), generator=generator)
        tokens = torch.zeros(count, self.length, dtype=torch.long)
        tokens[:, : 2 * self.pairs] = torch.stack((keys, values), 2).flatten(1)
        # Drawing without replacement by weight: the highest of log-weight plus Gumbel noise.
        slots = (self.length - 2 * self.pairs) // 2
        weights = (POWER - 1) * torch.arange(1, slots + 1).log()
        noise = -torch.rand(count, slots, generator=generator).log_().neg_().log_()
        places = 2 * self.pairs + 2 * (weights + noise).topk(self.pairs, 1).indices
        order = torch.rand(count, self.pairs, generator=generator).argsort(1)
        tokens.scatter_(1, places, keys.gather(1, order))
        targets = torch.full_like(tokens, IGNORED).scatter_(1, places, values.gather(1, order))
        return TaskBatch(tokens, targets)


class CopyTask:
    """Random symbols, a separator, and the same symbols again."""

    name = "copy"

    def __init__(self, vocab: int, length: int, seed: int) -> None:
        self.symbols, self.length, self._seed = vocab - 1, length, seed
        if self.symbols < 2:
            raise ConfigError(f"Copying needs a vocabulary of 3 tokens, and the configuration has {vocab}; enlarge it.")
        if length < 3 or not length % 2:
            raise ConfigError(f"--length {length} must be odd and at least 3: symbols, a separator, and the symbols.")

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "length": self.length}

    def words(self) -> list[str]:
        return ["|", *(f"s{i}" for i in range(self.symbols))]

    def batch(self, number: int, count: int) -> TaskBatch:
        generator, half = _generator(self._seed, number), self.length // 2
        symbols = 1 + torch.randint(self.symbols, (count, half), generator=generator)
        tokens = torch.cat((symbols, torch.zeros(count, 1, dtype=torch.long), symbols), 1)
        targets = torch.full_like(tokens, IGNORED)
        targets[:, half:-1] = symbols
        return TaskBatch(tokens, targets)


class TextWindows:
    """Windows of a text; its last twentieth is held out."""

    name = "text"

    def __init__(self, ids: Tensor, length: int, seed: int, digest: str) -> None:
        """`digest`: identifies the text and its tokenizer."""
        self.length, self._seed, self._digest = length, seed, digest
        border = len(ids) - max(len(ids) // 20, length + 1)
        if border < length + 1:
            raise ConfigError(
                f"The text has {len(ids)} tokens; training on windows of {length} tokens needs {2 * length + 2}."
            )
        self._parts = ids[:border], ids[border:]

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "length": self.length, "text": self._digest}

    def words(self) -> None:
        return None

    def batch(self, number: int, count: int) -> TaskBatch:
        part = self._parts[number >= HELD_OUT]
        starts = torch.randint(len(part) - self.length, (count, 1), generator=_generator(self._seed, number))
        windows = part[starts + torch.arange(self.length + 1)]
        return TaskBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def _generator(seed: int, number: int) -> torch.Generator:
    # The generator on the host uses 32 bits of a seed: numbers that differ above them would give equal batches.
    return torch.Generator().manual_seed(random.Random(f"{seed} {number}").getrandbits(32))
