"""Random numbers without state: a number is a function of (seed, child, position, purpose), in a race also of the token
id, and of nothing else.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the 64-bit key is
the seed, the 128-bit counter holds position (64 bits), child (32 bits), and in its last word the purpose (7 bits), a
flag for low words, and the number of the call (24 bits). It is written in int64 tensor arithmetic, so every device
gives the same bits and nothing waits for a device.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_FLAG = 1 << 7
_CALL_SHIFT = 8
_RUN = 16
"""Tokens whose words come from the same four calls of Philox."""


class Purpose(IntEnum):
    """What a number is drawn for. Two uses at the same position must not share a number."""

    TOKEN = 0
    """The token at a position; a drafter that uses it too draws the same token whenever the distributions agree."""
    DRAFT = 1
    """Draft tokens for the rejection rule, which must not depend on the numbers of acceptance."""
    ACCEPT = 2
    """Acceptance of a draft token by the rejection rule."""
    RESIDUAL = 3
    """The token that replaces rejected drafts."""
    REMASK = 4
    """The order in which masked positions of a diffusion model are fixed, where it is random."""


class NumberKey(NamedTuple):
    """The key of random numbers, one per line: int64 tensors [n]. Position is the index of the token to choose."""

    seed: Tensor
    child: Tensor
    position: Tensor


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter; all words are non-negative int64 below 2**32. The arguments have as many
    dimensions as each other and are broadcast.

    The two lanes of a round run as one tensor, since on small batches the cost is the number of kernels. An int64
    product wraps modulo 2**64, and an arithmetic shift smears its sign: both are cut off by the one mask at the end of
    a round, so the low words may travel unmasked until then.
    """
    multipliers, steps = _constants(counter[0].device, counter[0].ndim)
    first, second, third, fourth = torch.broadcast_tensors(*counter)
    factors = torch.stack((first, third))
    others = torch.stack((second, fourth))
    for round_key in ((torch.stack(key) + steps) & _WORD).unbind(0):
        products = (factors * multipliers).flip(0)
        factors = (products >> 32).bitwise_xor_(others).bitwise_xor_(round_key).bitwise_and_(_WORD)
        others = products
    others = others & _WORD
    return factors[0], others[0], factors[1], others[1]


@cache
def _constants(device: torch.device, dimensions: int) -> tuple[Tensor, Tensor]:
    """Kept per device, because sending them would make a step wait."""
    steps = torch.tensor([[number * step for step in _KEY_STEPS] for number in range(_ROUNDS)], device=device)
    ones = (1,) * dimensions
    return torch.tensor(_MULTIPLIERS, device=device).view(2, *ones), steps.view(_ROUNDS, 2, *ones)


def uniform(seed: Tensor, child: Tensor, position: Tensor, purpose: int) -> Tensor:
    """float64 in [0, 1), 53 random bits each. The int64 arguments have one shape [n]."""
    counter = (position & _WORD, (position >> 32) & _WORD, child & _WORD, torch.full_like(position, purpose & _WORD))
    high, low, _, _ = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return ((high >> 5) * 2**26 + (low >> 6)).double() * 2.0**-53


def high_words(key: NumberKey, purpose: int, vocab: int) -> Tensor:
    """The high word of every token's number, int64 [n, vocab] below 2**32.

    Token 4 w + i of a run of sixteen takes word w of call i, so that kernels with vectors over calls find words in the
    order of ids.
    """
    calls = torch.arange(-(-vocab // _RUN) * 4, device=key.seed.device)
    words = _words(key, purpose, calls.unsqueeze(0))
    return torch.stack([word.unflatten(1, (-1, 4)) for word in words], 2).flatten(1)[:, :vocab]


def words_of(key: NumberKey, purpose: int, ids: Tensor, *, low: bool) -> Tensor:
    """The high or low word of the numbers of some tokens: int64, ids and result [n, k]."""
    words = _words(key, purpose | _LOW_FLAG if low else purpose, ids >> 4 << 2 | ids & 3)
    return torch.stack(words, -1).gather(-1, (ids >> 2 & 3).unsqueeze(-1)).squeeze(-1)


def _words(key: NumberKey, purpose: int, calls: Tensor) -> tuple[Tensor, ...]:
    seed, child, position = (part.unsqueeze(-1) for part in key)
    counter = (position & _WORD, (position >> 32) & _WORD, child & _WORD, calls << _CALL_SHIFT | purpose)
    return philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
