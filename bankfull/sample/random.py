"""Random numbers without state: a number is a function of (seed, child, position, purpose), and of nothing else.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the 64-bit key is
the seed, the 128-bit counter holds position (64 bits), child and purpose (32 bits each). It is written in int64 tensor
arithmetic, so every device gives the same bits and nothing waits for a device.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a number is drawn for. Two uses at the same position must not share a number."""

    TOKEN = 0


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter; all words are non-negative int64 below 2**32.

    The two lanes of a round run as one tensor, since on small batches the cost is the number of kernels. An int64
    product wraps modulo 2**64, and an arithmetic shift smears its sign: both are cut off by the one mask at the end of
    a round, so the low words may travel unmasked until then.
    """
    multipliers, steps = _constants(counter[0].device)
    factors = torch.stack((counter[0], counter[2]))
    others = torch.stack((counter[1], counter[3]))
    for round_key in ((torch.stack(key) + steps) & _WORD).unbind(0):
        products = (factors * multipliers).flip(0)
        factors = (products >> 32).bitwise_xor_(others).bitwise_xor_(round_key).bitwise_and_(_WORD)
        others = products
    others = others & _WORD
    return factors[0], others[0], factors[1], others[1]


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept per device, because sending them would make a step wait."""
    steps = [[[number * step] for step in _KEY_STEPS] for number in range(_ROUNDS)]
    return torch.tensor(_MULTIPLIERS, device=device).unsqueeze(-1), torch.tensor(steps, device=device)


def uniform(seed: Tensor, child: Tensor, position: Tensor, purpose: int) -> Tensor:
    """float64 in [0, 1), 53 random bits each. The int64 arguments have one shape [n]."""
    counter = (position & _WORD, (position >> 32) & _WORD, child & _WORD, torch.full_like(position, purpose & _WORD))
    high, low, _, _ = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return ((high >> 5) * 2**26 + (low >> 6)).double() * 2.0**-53
