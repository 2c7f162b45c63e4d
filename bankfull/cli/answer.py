"""One answer from start to end: its text as it comes, then the whole result with the shapes of the steps it took."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bankfull.frontend import Frontend, Prompt
from bankfull.limits.meter.step import StepShape
from bankfull.llm import LLM
from bankfull.outputs import Delta, RequestOutput
from bankfull.sample.params import SamplingParams
from bankfull.types import Finish, StepPlan

NAP = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    result: RequestOutput
    prompt_steps: list[StepShape]
    """Up to the one that gave the first token."""
    decode_steps: list[StepShape]
    interrupted: bool = False


class Watch:
    """Notes the shape of each step that the engine launches."""

    def __init__(self, llm: LLM) -> None:
        self._shapes: list[StepShape] = []
        llm.loaded.frontend.engine.on_launch.append(self._note)

    def _note(self, plan: StepPlan) -> None:
        if plan.work:
            self._shapes.append(StepShape.of(plan.work))

    def take(self) -> list[StepShape]:
        """The steps since the last call."""
        taken, self._shapes = self._shapes, []
        return taken


def answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, watch: Watch, show: Callable[[Delta], None] | None = None
) -> Answer:
    """Ctrl-C ends the answer between two steps: what has come so far is its result."""
    front = llm.loaded.frontend
    watch.take()
    request = front.submit(prompt, params)
    result = front.pending[request].result
    prompt_steps: list[StepShape] = []
    begun = False
    try:
        with interrupts() as interrupted:
            while not result.finished and not interrupted():
                for delta in step(front):
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
    return Answer(result, prompt_steps, rest, stopped) if begun else Answer(result, rest, [], stopped)


def cut_off(result: RequestOutput, context: int, *, more: str, anew: str) -> str | None:
    """Why an answer ended that the model would have continued, in a sentence. `more` says what raises the limit, `anew`
    what helps when the context is full."""
    for output in result.outputs:
        if output.finish_reason == Finish.LENGTH.value:
            if len(result.prompt_token_ids) + len(output.token_ids) >= context:
                return f"the context of {context} tokens is full, so the answer ends; {anew}."
            return f"the answer was cut off after {len(output.token_ids)} tokens; {more}."
    return None


def step(front: Frontend) -> list[Delta]:
    """One step of the engine; a short nap when nothing can run yet."""
    deltas = front.step()
    if not deltas and front.engine.busy and (wake := front.engine.wake_at()) is not None:
        time.sleep(max(0.0, min(wake - time.monotonic(), NAP)))
    return deltas


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C only raises a flag, so that the engine is never left in mid-step; a second one leaves."""
    flagged = False

    def flag(number: int, frame: object) -> None:
        nonlocal flagged
        if flagged:
            raise KeyboardInterrupt
        flagged = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: flagged  # only the main thread may ask for signals
        return
    before = signal.signal(signal.SIGINT, flag)
    try:
        yield lambda: flagged
    finally:
        signal.signal(signal.SIGINT, before)
