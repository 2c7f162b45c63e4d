"""Generate one answer: stream its text, then return the result with the shapes of the steps that it took."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bankfull.frontend import Prompt
from bankfull.limits.meter.step import StepShape
from bankfull.llm import LLM, advance
from bankfull.outputs import Delta, RequestOutput
from bankfull.sample.params import SamplingParams
from bankfull.types import Finish, StepPlan


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    result: RequestOutput
    prompt_steps: list[StepShape]
    """Steps up to the one that produced the first token."""
    decode_steps: list[StepShape]
    interrupted: bool = False


class StepLog:
    """Records the shape of each step that the engine launches."""

    def __init__(self, llm: LLM) -> None:
        self._shapes: list[StepShape] = []
        llm.loaded.frontend.engine.on_launch.append(self._note)

    def _note(self, plan: StepPlan) -> None:
        if plan.work:
            self._shapes.append(StepShape.of(plan.work))

    def take(self) -> list[StepShape]:
        """The steps recorded since the last call."""
        taken, self._shapes = self._shapes, []
        return taken


def answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, watch: StepLog, show: Callable[[Delta], None] | None = None
) -> FinishedAnswer:
    """Ctrl-C ends the answer between two steps; the result is the text generated so far."""
    front = llm.loaded.frontend
    watch.take()
    request = front.submit(prompt, params)
    result = front.pending[request].result
    prompt_steps: list[StepShape] = []
    begun = False
    try:
        with interrupts() as interrupted:
            while not result.finished and not interrupted():
                for delta in advance(front):
                    if delta.request_id != request:
                        continue
                    if delta.token_ids and not begun:
                        begun, prompt_steps = True, watch.take()
                    if show is not None:
                        show(delta)
            stopped = interrupted()
    finally:
        front.abort(request)
        front.pending.pop(request, None)
    rest = watch.take()
    return FinishedAnswer(result, prompt_steps, rest, stopped) if begun else FinishedAnswer(result, rest, [], stopped)


def cut_off(result: RequestOutput, context: int, *, more: str, when_full: str) -> str | None:
    """Why an answer was cut off, in one sentence; None if it was not. `more` explains how to raise the limit,
    `when_full` what to do when the context is full."""
    for output in result.outputs:
        if output.finish_reason == Finish.LENGTH.value:
            if len(result.prompt_token_ids) + len(output.token_ids) >= context:
                return f"the context of {context} tokens is full, so the answer ends; {when_full}."
            return f"the answer was cut off after {len(output.token_ids)} tokens; {more}."
    return None


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Within the block, Ctrl-C only sets a flag, so that it never interrupts a step; a second Ctrl-C raises."""
    flagged = False

    def flag(number: int, frame: object) -> None:
        nonlocal flagged
        if flagged:
            raise KeyboardInterrupt
        flagged = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: flagged  # Python delivers signals to the main thread only
        return
    before = signal.signal(signal.SIGINT, flag)
    try:
        yield lambda: flagged
    finally:
        signal.signal(signal.SIGINT, before)
