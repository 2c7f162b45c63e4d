"""What a diffusion model is evaluated on: windows of text with some of their tokens masked.

A model that predicts masked tokens has no probability of the next token. It has a bound instead. Mask l of L tokens, l
uniform in 1 .. L: the mean of -log p over the masked tokens, averaged over l and the choice of positions, is at least
the negative log-likelihood per token. Its exponential is reported as the perplexity: an upper bound, and comparable
between versions of one model, but not with models that predict the next token.

A block-causal model is trained to see finished blocks before the one with masks. So only the last block of a sample has
masks, and a window yields several samples, each up to the end of one of its blocks.

The numbers of masks are spread evenly over the samples and positions are drawn from a fixed seed, so that all models
see the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from bankfull.layers.decoder import MaskedDiffusion
from bankfull.ops.attention.body import WHOLE_SEQUENCE
from bankfull.quality.windows import EvaluationWindow

MOST_BLOCKS = 4
"""Samples of a window of a block-causal model."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly over any number of samples."""


def masked_windows(windows: Sequence[EvaluationWindow], diffusion: MaskedDiffusion) -> list[EvaluationWindow]:
    """The windows with masked tokens, which are those to predict."""
    random, with_masks = Random(0), list[EvaluationWindow]()
    for window in windows:
        for first, end in _spans(window, diffusion.block):
            share = (0.5 + GOLDEN * len(with_masks)) % 1.0
            count = 1 + int(share * (end - first))
            masked = tuple(sorted(random.sample(range(first, end), count)))
            tokens = window.tokens[:end]
            with_masks.append(EvaluationWindow(tokens, first, masked, diffusion.mask, diffusion.shifted))
    return with_masks


def _spans(window: EvaluationWindow, block: int) -> list[tuple[int, int]]:
    """Positions first .. end whose tokens may be masked; the sample ends there."""
    length = len(window.tokens)
    whole = 0 if block == WHOLE_SEQUENCE else length // block
    if not whole:
        return [(window.first, length)]
    chosen = {(2 * i + 1) * whole // (2 * MOST_BLOCKS) for i in range(MOST_BLOCKS)}
    spans = [(max(number * block, window.first), (number + 1) * block) for number in sorted(chosen)]
    return [(first, end) for first, end in spans if first < end] or [(window.first, length)]
