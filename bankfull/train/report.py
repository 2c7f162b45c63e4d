"""What a trained drafter is worth: acceptance by position, tokens per step, and the gain to expect on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bankfull.decode.candidate_tree import MOST_NODES, CandidateTree, best_tree, chain_tree
from bankfull.limits.meter.step import StepShape
from bankfull.limits.meter.step_limit import StepLimit
from bankfull.train.run import TrainingOutcome

CONTEXT = 256
"""Tokens before the step whose cost is compared."""
SIZES = (2, 4, 8, 12, 16, 24, 32, 48, MOST_NODES)
"""Nodes of the trees that are compared."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A tree or a chain of drafts, and what to expect of it for one stream."""

    kind: str
    nodes: int
    tokens: float
    """Tokens per step, measured on held-out text."""
    cost: float | None
    """The step's time with drafting, relative to a step without drafts; None if the machine was not measured."""

    @property
    def gain(self) -> float | None:
        return None if self.cost is None else self.tokens / self.cost

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nodes": self.nodes,
            "tokens_per_step": self.tokens,
            "relative_cost": self.cost,
            "expected_gain": self.gain,
        }


@dataclass(frozen=True, slots=True)
class DrafterReport:
    outcome: TrainingOutcome
    choices: list[Choice]

    @property
    def best(self) -> Choice:
        """The highest gain; without costs, the most tokens per step."""
        return max(self.choices, key=lambda one: one.tokens if one.gain is None else one.gain)

    def as_json(self) -> dict[str, Any]:
        progress, acceptance = self.outcome.progress, self.outcome.acceptance
        assert acceptance is not None
        return {
            "steps": progress.step,
            "training_s": progress.seconds,
            "held_out_positions": len(acceptance.ranks),
            "acceptance_before": progress.measured[0]["acceptance"],
            "acceptance_by_position": acceptance.by_position,
            "acceptance_by_rank": acceptance.by_rank,
            "measured": progress.measured,
            "choices": [one.as_json() for one in self.choices],
            "best": self.best.as_json(),
            "files": {file.name: file.stat().st_size for file in self.outcome.files},
        }


def report_of(outcome: TrainingOutcome, limit: StepLimit | None, *, trees: bool = True) -> DrafterReport:
    """`limit` gives the shortest times of steps on this machine. `trees`: whether the drafter continues any of its
    drafts, and not only the best one of each depth."""
    acceptance = outcome.acceptance
    assert acceptance is not None
    depth = acceptance.ranks.shape[1]
    compared = [("chain", chain_tree(n)) for n in range(1, depth + 1)]
    if trees:
        whole = best_tree(acceptance.by_rank, MOST_NODES)
        sizes = sorted({*(n for n in SIZES if n < len(whole)), len(whole)})
        compared += [("tree", whole.first(n)) for n in sizes]
    return DrafterReport(outcome, [_choice(outcome, kind, tree, limit) for kind, tree in compared])


def _choice(outcome: TrainingOutcome, kind: str, tree: CandidateTree, limit: StepLimit | None) -> Choice:
    assert outcome.acceptance is not None and outcome.trainer is not None
    tokens, cost = outcome.acceptance.tokens_per_step(tree), None
    if limit is not None:
        drafting = limit.drafting(outcome.trainer.draft_cost(tree.depth))
        cost = (drafting + _verify_seconds(limit, len(tree))) / _verify_seconds(limit, 0)
    return Choice(kind, len(tree), tokens, cost)


def _verify_seconds(limit: StepLimit, drafts: int) -> float:
    return limit.least(limit.form.cost(StepShape((1 + drafts,), (CONTEXT + drafts,), 1 + drafts)))


def total_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)
