"""Verification of drafts as CUDA graphs: from a captured step's hidden states to tokens appended to their rows.

One graph computes the best or the drawn token after each line, finds the accepted paths, appends their tokens, and
moves the keys and values of accepted tree paths into place. It computes what `decode.verify` and `DeviceRunner` compute
for exact strategies, without a launch per operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.decode.strategy import Verdict
from bankfull.runtime.captured import DRAWN, GREEDY, Captured, StepKind
from bankfull.runtime.device import MoveTokens
from bankfull.runtime.graphs import record
from bankfull.runtime.rows import Rows
from bankfull.sample.logits import Sampled
from bankfull.state.storage import Storage
from bankfull.types import Work

DRAWN_LINES = 512
"""Lines of the largest captured choice of drawn tokens: their logits stay in the graphs' memory."""


@dataclass(slots=True)
class RecordedVerification:
    """The tensors that a graph writes, and the graph; None before it is recorded, or where nothing is captured."""

    path: Tensor
    tokens: Tensor
    counts: Tensor
    moves: list[tuple[Tensor, Tensor]]
    """KV slots of accepted drafts in each paged group: those that they have, and those that they must have."""
    sampled: Tensor | None = None
    """(rows * width) the token that was sampled after each line, in the graphs' memory."""
    graph: torch.cuda.CUDAGraph | None = None


class CapturedVerify:
    """A `VerifyingStep` for the steps of a `Captured` with drafts."""

    def __init__(self, steps: Captured, rows: Rows, storage: Storage, move: MoveTokens) -> None:
        self._steps, self._rows, self._storage, self._move = steps, rows, storage, move
        self._chooser = rows.sampling.chooser
        self._recorded: dict[tuple[StepKind, str], RecordedVerification] = {}

    def capture(self) -> None:
        """Record the verification of every captured step with drafts."""
        for kind in self._steps.steps:
            if kind.width == 1:
                continue
            self._record(kind, GREEDY)
            if self._chooser is not None and kind.rows * kind.width <= DRAWN_LINES:
                self._record(kind, DRAWN)
        torch.cuda.synchronize()

    def __call__(self, work: Sequence[Work]) -> Verdict | None:
        replayed = self._steps.replayed
        if replayed is None or replayed.work is not work:
            return None
        kind, lines = replayed.kind, [w.row for w in work]
        facts = self._rows.sampling.facts
        choice = GREEDY if all(facts[line].greedy for line in lines) else DRAWN
        recorded = self._recorded.get((kind, choice))
        if recorded is None:
            return None
        if recorded.graph is not None and self._steps.enabled:
            recorded.graph.replay()
        else:
            self._launch(kind, choice, recorded)
        assert recorded.sampled is not None
        count = len(lines)
        path = recorded.path[:count] if self._rows.trees is not None else None
        return Verdict(recorded.tokens[:count], recorded.counts[:count], Sampled(replayed.real(recorded.sampled)), path)

    def _record(self, kind: StepKind, choice: str) -> None:
        recorded = self._recorded[kind, choice] = self._blank(kind)
        self._launch(kind, choice, recorded)  # compiles the missing kernels, and makes what is made once
        recorded.graph, _ = record(lambda: self._launch(kind, choice, recorded), self._steps.pool)

    def _blank(self, kind: StepKind) -> RecordedVerification:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=self._rows.device)

        moved = (kind.rows, kind.width - 1)
        groups = self._rows.tables if self._rows.trees is not None else []
        return RecordedVerification(
            zeros(kind.rows, kind.width),
            zeros(kind.rows, kind.width),
            zeros(kind.rows),
            [(zeros(*moved), zeros(*moved)) for _ in groups],
        )

    def _launch(self, kind: StepKind, choice: str, recorded: RecordedVerification) -> None:
        from bankfull.ops.triton.accept import Accepted, accept_drafts, accepted_moves

        rows, steps = self._rows, self._steps
        step = steps.steps[kind]
        lines = steps.lines[: kind.rows]
        head = steps.eager.model.head
        if choice == GREEDY:
            sampled = head.best(step.hidden)
        else:
            assert self._chooser is not None
            owners = lines[:, None].expand(-1, kind.width).reshape(-1)
            sampled = self._chooser(head(step.hidden).float(), owners, rows.sampling, step.batch.positions + 1)
        recorded.sampled = sampled
        accepted = Accepted(recorded.path, recorded.tokens, recorded.counts)
        accept_drafts(
            lines,
            steps.counts[: kind.rows],
            sampled,
            step.batch.tokens,
            None if rows.trees is None else rows.trees.parents,
            rows.tokens,
            rows.known,
            rows.reached,
            accepted,
        )
        for group, (source, target) in enumerate(recorded.moves):
            table, page_tokens, segments = rows.tables[group], rows.page_tokens[group], self._storage.segments[group]
            accepted_moves(lines, accepted, rows.reached, table, page_tokens, source, target)
            self._move(self._storage.frames, segments, page_tokens, source, target)
