"""The cost of a step as a formula: fitted to the meter once per model, then evaluated in microseconds.

Every operation's cost is linear in a few sums over the step's sequences. The features, in order: one per step; one if
the step computes logits; tokens; rows of logits; sequences; recurrent states kept; for each window class (layers
with the same attention window, None = full attention) the query-key pairs and the cached tokens read; and for each
routing class (layers whose tokens use the same share of their experts) the expected share of experts that the step's
tokens use. Tokens of a block may see each other (`PagedMeta.block`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bankfull.errors import ModelError
from bankfull.limits.meter.step import StepShape
from bankfull.ops import RoutingRule
from bankfull.ops.attention.sight import live_tokens, visible_pairs
from bankfull.ops.cost import NUMBERS, Cost
from bankfull.ops.meter import Ledger
from bankfull.state.mask import Mask, Sight, extent_of

if TYPE_CHECKING:
    from bankfull.limits.meter.metered import MeteredModel

Windows = tuple[Sight, ...]
Shares = tuple[float, ...]
"""Shares of the experts that one token uses."""
STEPS, TOKENS = 0, 2
"""Indices of features."""
TOLERANCE = 1e-6
"""Relative error above which a model's cost does not count as linear in the features."""


def features(step: StepShape, windows: Windows, shares: Shares = (), block: int = 0) -> np.ndarray:
    """Features of a step. They add up over steps: the cost of the sum is the sum of the costs."""
    row: list[float] = [1, int(step.logits > 0), step.tokens, step.logits, len(step.counts), sum(step.kept)]
    pairs = list(zip(step.counts, step.lengths, strict=True))
    for window in windows:
        row.append(sum(visible_pairs(count, length, window, block) for count, length in pairs))
        row.append(sum(live_tokens(count, length, window) for count, length in pairs))
    row += experts_used(step.tokens, shares)
    return np.array(row, np.float64)


def shares_of(model: MeteredModel) -> Shares:
    """The routing classes of a model."""
    rules = (getattr(block.feed, "rule", None) for block in model.model.blocks)
    return tuple(sorted({rule.share for rule in rules if isinstance(rule, RoutingRule)}))


def experts_used(tokens: float, shares: Shares) -> list[float]:
    """The expected share of experts that tokens use, for each routing class."""
    return [1.0 - (1.0 - share) ** tokens for share in shares]


@dataclass(frozen=True, slots=True)
class ClosedForm:
    windows: Windows
    coefficients: np.ndarray
    """Shape (features, numbers of a cost): see `Cost.vector`."""
    shares: Shares = ()
    block: int = 0
    """Tokens of a block that see each other; 0 = causal."""

    def features(self, step: StepShape) -> np.ndarray:
        return features(step, self.windows, self.shares, self.block)

    def cost(self, step: StepShape) -> Cost:
        return self.cost_of(self.features(step))

    def cost_of(self, summed: np.ndarray) -> Cost:
        """The cost of features, which may be summed over steps."""
        return Cost(*(summed @ self.coefficients).tolist())


def closed_form(model: MeteredModel) -> ClosedForm:
    return _fit(model, lambda ledger: {"": ledger.sum()})[""]


def forms_by_operation(model: MeteredModel) -> dict[str, ClosedForm]:
    """One form per operation of the model's ledger."""
    return _fit(model, lambda ledger: ledger.total)


def _fit(model: MeteredModel, costs_of: Callable[[Ledger], Mapping[str, Cost]]) -> dict[str, ClosedForm]:
    """One form per cost name; a step without the name has zero cost there."""
    windows: Windows = tuple(sorted({g.window for g in model.layout.paged}, key=_order))
    shares, block = shares_of(model), 0 if model.model.diffusion is None else model.model.diffusion.block
    steps = list(_probes(windows))
    known = np.stack([features(step, windows, shares, block) for step in steps])
    per_step = [costs_of(model.cost(step)) for step in steps]
    names = list(dict.fromkeys(name for costs in per_step for name in costs))
    rows = [[costs.get(name, Cost()) for name in names] for costs in per_step]
    measured = np.array([[number for cost in row for number in cost.vector] for row in rows])
    # Columns span twelve orders of magnitude; scaling each to 1 makes the fit exact up to rounding.
    scale = np.maximum(np.abs(known).max(0), 1.0)
    solved = np.linalg.lstsq(known / scale, measured, rcond=None)[0] / scale[:, None]
    # A cost far below the largest in its column carries the rounding error of the largest.
    error = np.abs(known @ solved - measured) / np.maximum(measured, np.maximum(measured.max(0) * 1e-6, 1.0))
    if error.max() > TOLERANCE:
        raise ModelError(
            f"The cost of architecture {model.config.get('model_type')!r} does not follow from tokens, rows and "
            f"context lengths (off by {error.max():.2%}); use MeteredModel.cost for each step instead."
        )
    by_name = {name: solved[:, NUMBERS * i : NUMBERS * (i + 1)] for i, name in enumerate(names)}
    return {name: ClosedForm(windows, coefficients, shares, block) for name, coefficients in by_name.items()}


def _order(sight: Sight) -> tuple[bool, int, str]:
    return sight is None, extent_of(sight) or 0, repr(sight) if isinstance(sight, Mask) else ""


def _probes(windows: Windows) -> Iterator[StepShape]:
    """Steps that determine all features, and more that check the fit."""
    yield StepShape.decode(1, 1)
    yield StepShape.decode(1, 1000)
    yield StepShape.decode(5, 64)
    yield StepShape((4, 3), (90, 3), 0)
    yield StepShape((4, 3), (90, 3), 0, (3, 2))
    yield StepShape((6, 2, 1), (6, 40, 7), 5)
    yield StepShape.prefill(64)
    yield StepShape.prefill(33, 2, past=70)
    for window in windows:
        reach = extent_of(window) or 512
        yield StepShape.decode(2, reach)
        yield StepShape.decode(3, 2 * reach + 5)
        yield StepShape.prefill(7, past=reach + 1)
        yield StepShape.prefill(reach + 9)
        yield StepShape.prefill(3, past=max(reach - 2, 0))
    yield StepShape((1, 1, 12, 9), (300, 5, 12, 411), 3, (1, 1, 4, 9))
