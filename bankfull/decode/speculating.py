"""The link between the loop and the chooser of widths: what a planned step could draft, and what a settled one has
drafted."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bankfull.decode.adaptive import DraftChoice, DraftedStep, DraftRow
from bankfull.types import Output, Request, StepPlan, StepResult, Work

Key = tuple[Hashable, int]


class Chooser(Protocol):
    """`AdaptiveWidth`."""

    def choose(self, rows: Sequence[DraftRow]) -> DraftChoice: ...
    def observe(self, step: DraftedStep) -> None: ...
    def took_prompt(self, tokens: int, seconds: float) -> None: ...
    def forget(self, key: Hashable) -> None: ...


class Drafter(Protocol):
    """The part of a strategy that is asked here."""

    def behind(self, row: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Planned:
    """What is known of a planned step until it settles."""

    keys: list[Key]
    """The sequence of each work."""
    caught_up: int


class Speculating:
    def __init__(self, chooser: Chooser, drafter: Drafter) -> None:
        self.chooser, self._drafter = chooser, drafter
        self.verifies: dict[int, int] = {}
        """Drafts that the next step verifies, by row: those that the newest planned step proposes."""
        self._running: dict[Key, Request] = {}
        """Requests of the sequences that have not ended."""
        self._planned: dict[int, Planned] = {}
        """Planned steps by their number."""

    def expect(self, request: Request) -> None:
        for child in range(request.samples):
            if child not in request.finished:
                self._running[request.id, child] = request

    def choose(self, plan: StepPlan, owners: Mapping[int, Key]) -> None:
        """Note in the plan which rows the strategy drafts for."""
        entering = {enter.row: enter.computed for enter in plan.enter}
        rows = [one for work in plan.work if (one := self._row(work, owners[work.row], entering)) is not None]
        choice = self.chooser.choose(rows)
        plan.proposes, plan.drafted = choice.width, sorted(choice.rows)
        chosen = [work for work in plan.work if work.row in choice.rows]
        self.verifies = {work.row: choice.width for work in chosen if work.sample} if choice.width else {}
        behind = {one.row: one.behind for one in rows if one.samples}
        ran = sum(work.count for work in chosen if work.count > 1 or not work.sample)
        ran += sum(max(0, behind[row]) for row in self.verifies)
        self._planned[plan.step] = Planned([owners[work.row] for work in plan.work], ran)

    def _row(self, work: Work, key: Key, entering: Mapping[int, int]) -> DraftRow | None:
        request = self._running.get(key)
        if request is None or request.drafts == 0:
            return None
        prompt = len(request.prompt) - work.start if work.count > 1 or not work.sample else 0
        behind = 0 if work.row in entering else self._drafter.behind(work.row)
        left = request.limit - work.start - work.count
        return DraftRow(work.row, key, work.sample, behind, max(prompt, 0), left)

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        planned = self._planned.pop(plan.step)
        if not plan.work:
            return
        lines = [
            (key if key in self._running else None, work.drafts, max(0, len(tokens) - 1))
            for work, key, tokens in zip(plan.work, planned.keys, result.tokens, strict=True)
            if work.sample
        ]
        drafted = set(plan.drafted or ())
        prompt = sum(work.count for work in plan.work if work.count > 1 or not work.sample)
        whole = not prompt and len(drafted) in (0, len(plan.work)) and (not planned.caught_up)
        if prompt and prompt == plan.tokens:
            self.chooser.took_prompt(prompt, max(0.0, seconds - result.drafting))
        self.chooser.observe(
            DraftedStep(
                lines,
                plan.proposes or 0,
                whole,
                planned.caught_up,
                bool(drafted),
                bool(prompt),
                seconds,
                result.drafting,
            )
        )

    def drop(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.finish is not None:
                key = (output.request, output.child)
                self.chooser.forget(key)
                self._running.pop(key, None)
