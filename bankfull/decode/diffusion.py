"""Denoising: the strategy of diffusion language models.

The drafts of a row are its canvas: mask tokens, and tokens of the current block that earlier steps have fixed. A step
predicts every masked position of the block, fixes some of the predicted tokens, and leaves the others masked. When no
position of the block is masked, its tokens are accepted, all at once; until then none is.

Which predictions are fixed: the most confident ones (or random ones), a number in each step, and with a threshold also
every one whose confidence is above it. Confidence is the probability of the predicted token under the model's own
distribution, before temperature and noise. One token per step and a threshold of 1 is the sampler of the papers.

Random numbers are keyed by seed, sample, position and masked positions left, so each step of a block draws anew, and a
preempted sequence repeats its block with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bankfull.choices import DENOISING
from bankfull.config import DiffusionChoice
from bankfull.declared import Trait
from bankfull.decode.strategy import Draft, DraftTree, Sampling, Scores, Strategy, Verdict, View, stack
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder, MaskedDiffusion
from bankfull.ops.attention.body import WHOLE_SEQUENCE
from bankfull.sample.logits import NO_TOKEN, Sampled, sample
from bankfull.sample.random import Purpose, uniform
from bankfull.sample.table import CHILD, SEED
from bankfull.types import CanvasShape

LINES = 512
"""Positions whose logits are in memory at once."""
TURN_SHIFT = 32
"""Bits of a position in the key of random numbers; the masked positions left are in the bits above."""


def canvas_shape(diffusion: MaskedDiffusion, choice: DiffusionChoice) -> CanvasShape:
    """The blocks of a model under these options; raises ConfigError where they do not go together."""
    whole = diffusion.block == WHOLE_SEQUENCE
    if not whole:
        if choice.given("length") or choice.given("cache") or choice.given("refresh"):
            raise ConfigError(
                f"diffusion={choice.text!r}: length, cache and refresh are for models that see the whole sequence; "
                "this one sees blocks, and its cache is exact without them."
            )
        block = choice.block or diffusion.block
        if diffusion.block % block:
            raise ConfigError(
                f"diffusion={choice.text!r}: block must divide the {diffusion.block} tokens of the model's own blocks."
            )
        return CanvasShape(diffusion.block, False, block, diffusion.block, diffusion.shifted)
    block = choice.block or DiffusionChoice.USUAL_BLOCK
    cached = choice.cache == "block"
    return CanvasShape(
        diffusion.block,
        True,
        block,
        max(block, choice.length),
        diffusion.shifted,
        cached,
        choice.refresh if cached else 0,
    )


Watch = Callable[[Sequence[int], Tensor, Tensor], None]
"""Called with the rows, the positions and the logits of masked positions, before any of them is fixed."""


class Denoising(Strategy):
    def __init__(self, choice: DiffusionChoice) -> None:
        self.choice = choice
        self.watch: Watch | None = None

    def prepare(self, target: Decoder) -> None:
        DENOISING.refuse(f"diffusion={self.choice.text!r}", {Trait.DIFFUSION: target.diffusion is not None})
        assert target.diffusion is not None
        self.mask, self.canvas = target.diffusion.mask, canvas_shape(target.diffusion, self.choice)

    def width(self, load: int) -> int:
        return 0

    def propose(self, view: View) -> Draft | None:
        return None

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        assert self.mask is not None and self.canvas is not None, "the strategy has not been prepared"
        ship, widths = sampling.ship, sampling.widths
        rows, places = sampling.rows, sampling.length - (0 if self.canvas.shifted else 1)
        held = sampling.tokens[rows, places]
        masked = held == self.mask
        owner, within = (
            ship([i for i, width in enumerate(widths) for _ in range(width)]),
            DraftTree.within(widths, ship),
        )
        open_places = stack(masked, widths, False)
        turn = open_places.sum(1)[owner]
        keys = places + (turn << TURN_SHIFT)
        predicted, confidence = self._predict(scores, sampling, places, keys)
        rank = confidence
        if self.choice.order == "random":
            wholes = sampling.table.wholes[rows]
            rank = uniform(wholes[:, SEED], wholes[:, CHILD], keys, Purpose.REMASK).to(confidence.dtype)
        # A position without a usable prediction ends the request: it is fixed first.
        rank = torch.where(predicted == NO_TOKEN, torch.inf, rank).masked_fill(~masked, -torch.inf)
        order = stack(rank, widths, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        fixed = (order.argsort(1) < self.choice.tokens)[owner, within]
        if self.choice.threshold is not None:
            fixed = fixed | (confidence > self.choice.threshold)
        fixed = fixed & masked
        tokens = torch.where(fixed, predicted, held)
        sampling.tokens[rows, places] = tokens.clamp_min(0)
        # Places beyond a row's own block are masked, in the canvas, too.
        chosen = stack(tokens, widths, self.mask)
        real = torch.arange(chosen.shape[1], device=chosen.device) < ship(widths)[:, None]
        waits = ((chosen == self.mask) & real).any(1) & ~(chosen == NO_TOKEN).any(1)
        return Verdict(chosen, torch.where(waits, 0, ship(widths)), Sampled(tokens), denoised=True)

    def _predict(self, scores: Scores, sampling: Sampling, places: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted token and its confidence for each line."""
        tokens, confidences = [], []
        for first in range(0, len(scores.hidden), LINES):
            part = slice(first, first + LINES)
            logits = scores.head(scores.hidden[part])
            logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
            logits[:, self.mask] = -torch.inf
            if self.watch is not None:
                self.watch(sampling.host_rows[part], places[part], logits)
            picked = sample(
                logits,
                sampling.rows[part],
                sampling.table,
                sampling.tokens,
                keys[part],
                host_rows=sampling.host_rows[part],
            ).tokens
            picked_logits = logits.gather(1, picked.clamp_min(0)[:, None])[:, 0]
            tokens.append(picked)
            confidences.append((picked_logits - logits.logsumexp(1)).exp())
        return torch.cat(tokens), torch.cat(confidences)
