"""The size of a draft model: layers and width with the highest gain to expect on this machine.

The cost is known before anything is trained: `StepLimit` gives the shortest time of the target's steps, and a pass of
the draft model reads its weights once. Its acceptance is not known. It is assumed to depend on its size relative to the
target's, so the choice is a beginning, and the report after training has the measured acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bankfull.layers.attention import Attention
from bankfull.layers.decoder import Decoder
from bankfull.limits.meter.step import StepShape
from bankfull.limits.meter.step_limit import StepLimit
from bankfull.limits.model.speculation import tokens_per_step
from bankfull.ops.cost import Cost

LAYERS = (1, 2, 3, 4)
WIDTHS = (1 / 8, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0)
"""Widths that are compared, relative to the target's hidden size."""
ALIGNED = 64
"""Widths are multiples of it, so that kernels and quantization groups fit."""
DEPTHS = range(1, 9)
CONTEXT = 256
"""Tokens before the step whose cost is compared."""
ASSUMED_ACCEPTANCE, ASSUMED_SHARE = 0.7, 0.1
"""The acceptance of a draft model as wide as the target whose layers have a tenth of the target's weights or more."""
LAYERS_POWER, WIDTH_POWER = 0.15, 0.2
"""The assumed acceptance falls with these powers: of the layers' share below a tenth, and of the relative width, since
a narrow head tells fewer tokens apart."""
STORED_BYTES = 2
"""Bytes of a weight."""


@dataclass(frozen=True, slots=True)
class DraftSize:
    layers: int
    width: int
    heads: int
    kv: int
    """Key heads. With `of_head` they are the target's, so that both models' keys and values share pages."""
    of_head: int
    vocab: int

    @property
    def inner(self) -> int:
        """Width of the feed-forward layers."""
        return -(-self.width * 8 // 3 // ALIGNED) * ALIGNED

    @property
    def layer_weights(self) -> int:
        attention = 2 * self.width * (self.heads + self.kv) * self.of_head
        return self.layers * (attention + 3 * self.width * self.inner)

    def pass_cost(self, tokens: int = 1) -> Cost:
        """The cost of a pass: layers and head are read once; keys and values are left out."""
        weights = self.layer_weights + self.vocab * self.width
        return Cost(2.0 * tokens * weights, float(STORED_BYTES * weights), 4.0 * self.vocab)

    def drafting_cost(self, depth: int) -> Cost:
        """The cost of a proposal: one pass for each draft; the first one has two tokens."""
        cost = self.pass_cost(2)
        for _ in range(depth - 1):
            cost = cost + self.pass_cost()
        return cost


def size_of(target: Decoder, layers: int, width: int) -> DraftSize:
    """Key heads and their size are those of the target's last layer with attention: states that are equal in both
    models form one group of pages. Lighter ones would form a second group, with more tokens in a page, and the prefix
    cache would only find prefixes of whole pages of it."""
    attention = [mixer.heads for mixer in target.mixers if isinstance(mixer, Attention)]
    kv, of_head = (attention[-1].kv, attention[-1].size) if attention else (max(1, width // ALIGNED), ALIGNED)
    return DraftSize(layers, width, kv * max(1, width // (kv * of_head)), kv, of_head, target.vocab)


@dataclass(frozen=True, slots=True)
class ExpectedGain:
    size: DraftSize
    depth: int
    gain: float


def assumed_acceptance(share: float, width: float) -> float:
    """`share`, `width`: weights of the draft model's layers and its hidden size, relative to the target's."""
    return ASSUMED_ACCEPTANCE * min(1.0, share / ASSUMED_SHARE) ** LAYERS_POWER * min(1.0, width) ** WIDTH_POWER


def best_size(target: Decoder, limit: StepLimit) -> ExpectedGain:
    """The best size for one stream."""
    return max(_candidates(target, limit), key=lambda one: (one.gain, -one.size.layer_weights))


def usual_size(target: Decoder) -> DraftSize:
    """The size for a machine that cannot be measured."""
    return size_of(target, 2, _aligned(target.hidden / 3))


def _candidates(target: Decoder, limit: StepLimit) -> Iterator[ExpectedGain]:
    plain = _seconds(limit, 0)
    whole = limit.form.cost(StepShape((1,), (CONTEXT,), 0)).flops / 2  # multiplications of the layers for one token
    for width in sorted({_aligned(share * target.hidden) for share in WIDTHS}):
        for layers in LAYERS:
            size = size_of(target, layers, width)
            chance = assumed_acceptance(size.layer_weights / whole, width / target.hidden)
            for depth in DEPTHS:
                spent = limit.drafting(size.drafting_cost(depth)) + _seconds(limit, depth)
                yield ExpectedGain(size, depth, tokens_per_step([chance] * depth) * plain / spent)


def _seconds(limit: StepLimit, drafts: int) -> float:
    return limit.least(limit.form.cost(StepShape((1 + drafts,), (CONTEXT + drafts,), 1 + drafts)))


def _aligned(width: float) -> int:
    return max(ALIGNED, round(width / ALIGNED) * ALIGNED)
