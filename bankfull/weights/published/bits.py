"""Codes out of 32-bit words."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 (rows, n) as uint8 (rows, n * 32 / bits): a stream of codes of `bits` bits, the lowest bits first. Codes of
    3 bits may lie in two words; n is then padded to whole groups of 32 codes."""
    rows, count = words.shape
    if missing := -count % bits if WORD % bits else 0:
        words = torch.nn.functional.pad(words, (0, missing))
    each = bits if WORD % bits else 1  # words after which the pattern repeats
    groups = words.reshape(rows, -1, each)
    codes = torch.empty(rows, groups.shape[1], each * WORD // bits, dtype=torch.uint8)
    for code in range(codes.shape[-1]):
        word, start = divmod(code * bits, WORD)
        low = min(bits, WORD - start)
        # Shifts of negative words bring in ones, so that the mask comes last.
        value = (groups[..., word] >> start) & ((1 << low) - 1)
        if low < bits:
            value = value | ((groups[..., word + 1] & ((1 << (bits - low)) - 1)) << low)
        codes[..., code] = value
    return codes.flatten(1)


def unpack_whole(words: Tensor, bits: int) -> Tensor:
    """Unpack as `unpack_words` does, for words that hold only whole codes: ten of 3 bits, the upper bits unused."""
    each = WORD // bits
    codes = torch.empty(*words.shape, each, dtype=torch.uint8)
    for code in range(each):
        codes[..., code] = (words >> (code * bits)) & ((1 << bits) - 1)
    return codes.flatten(1)
