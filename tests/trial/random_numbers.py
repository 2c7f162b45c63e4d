"""The numbers of docs/sampling.md, written out: Philox-4x32-10 under a key of (seed, child, position, purpose)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORD = np.uint64(0xFFFFFFFF)
TOKEN = 0
"""The purpose of the number that chooses a token."""


def philox(counter: list[NDArray[np.uint64]], seed: int) -> list[NDArray[np.uint64]]:
    a, b, c, d = counter
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    with np.errstate(over="ignore"):
        for _ in range(10):
            first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
            a, b, c, d = (
                (second >> np.uint64(32)) ^ b ^ np.uint64(low),
                second & WORD,
                (first >> np.uint64(32)) ^ d ^ np.uint64(high),
                first & WORD,
            )
            low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def gumbel_of(seed: int, child: int, position: int, vocab: int) -> NDArray[np.float64]:
    """-log(e) of every token's exponential variate e."""
    ids = np.arange(vocab, dtype=np.uint64)
    call = (ids >> np.uint64(4) << np.uint64(2)) | (ids & np.uint64(3))
    words = []
    for low in (0, 1):
        last = (call << np.uint64(8)) | np.uint64(low << 7 | TOKEN)
        shape = np.zeros_like(last)
        parts = [shape + np.uint64(position & 0xFFFFFFFF), shape + np.uint64(position >> 32), shape + np.uint64(child)]
        four = philox([*parts, last], seed)
        words.append(np.stack(four, -1)[np.arange(vocab), (ids >> np.uint64(2) & np.uint64(3)).astype(int)])
    bits = words[0] << np.uint64(20) | words[1] >> np.uint64(12)
    v = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log1p(-v))
