"""`bankfull generate`: answer a file of requests offline."""

from __future__ import annotations

import json as json_text
import time
from collections import deque
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import EngineOptions, NoLimit, SamplingOptions

if TYPE_CHECKING:
    from bankfull.cli.batchfile import Record
    from bankfull.llm import LLM
    from bankfull.outputs import RequestOutput
    from bankfull.sample.params import SamplingParams

WINDOW_ROWS = 4
"""Requests per row that run or wait for an earlier result to be written; bounds the memory."""


def generate(
    input: Annotated[Path, typer.Option("-i", "--input", help="A file with one JSON object per line.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The file for the results, in the order of the input.")
    ],
    engine: EngineOptions,
    sampling: SamplingOptions,
    *,
    no_limit: NoLimit = False,
) -> int | None:
    """Answer a file of requests.

    Each input line has a "prompt" (used as it is), "messages" (formatted with the chat template) or "prompt_token_ids",
    and may have an "id" and its own sampling "params". Each output line has the index and the id of its request, and a
    text, or an "error" if the request cannot be served. Errors do not stop the other requests: the exit code is 0, and
    the last line on stderr counts them. To resume an interrupted run, run it again.
    """
    from bankfull.torch_parts import leave_out

    leave_out()
    from bankfull.cli.batchfile import Results, count_records, read_records
    from bankfull.cli.terminal import progress, say
    from bankfull.errors import ConfigError

    if not input.exists():
        raise ConfigError(f"The input {input} does not exist; give a file with one JSON object per line.")
    if output.exists() and output.samefile(input):
        raise ConfigError(f"{output} is both input and output; choose another output.")
    setting = json_text.dumps({"model": engine.model, **engine.rounding(), **sampling.given()}, sort_keys=True)
    with Results(output) as results:
        records = read_records(input, setting)
        done, errors = results.resume(records)
        total = count_records(input)
        if done:
            say(f"bankfull: {done} results are already in {output}; resuming after them.")
        if done == total:
            say(f"bankfull: nothing left to do ({errors} errors).")
            return None
        llm = engine.load()
        batch = OfflineBatch(llm, sampling.params(llm), wants_limit=not no_limit)
        with progress("requests", total, done) as advance:
            for result in batch.results(records):
                results.append(result)
                done, errors = done + 1, errors + ("error" in result)
                advance(done, batch.note())
    say(batch.summary(done, errors))
    return None


class OfflineBatch:
    """Runs requests through the engine, a window of them at a time."""

    def __init__(self, llm: LLM, params: SamplingParams, *, wants_limit: bool) -> None:
        from bankfull.cli.answer import StepLog
        from bankfull.cli.speed import limit_of

        self._llm, self._params = llm, params
        self._window = WINDOW_ROWS * llm.loaded.sizes.rows
        self._watch, self._limit = StepLog(llm), limit_of(llm, wants_limit)
        if self._limit is not None:
            self._limit.seconds([])  # measure the machine before the clock of the batch starts
        self._begun = time.monotonic()
        self._tokens, self._steps, self._limit_seconds = 0, 0, 0.0

    def results(self, records: Iterator[Record]) -> Iterator[dict[str, Any]]:
        """Results in the order of the records, each as soon as it and all earlier ones are complete."""
        from bankfull.cli.answer import interrupts
        from bankfull.llm import advance

        front = self._llm.loaded.frontend
        open_: deque[tuple[Record, Hashable | None, dict[str, Any] | None]] = deque()
        more, front.engine.scheduler.sealed = True, False
        try:
            with interrupts() as interrupted:
                while True:
                    while more and len(open_) < self._window:
                        record = next(records, None)
                        if record is None:
                            more, front.engine.scheduler.sealed = False, True
                        else:
                            open_.append((record, *self._submit(record)))
                    while open_ and (ready := self._ready(*open_[0])) is not None:
                        open_.popleft()
                        yield ready
                    if not open_ and not more:
                        return
                    if interrupted():
                        raise KeyboardInterrupt
                    if open_:
                        advance(front)
                        self._account()
        finally:
            front.engine.scheduler.sealed = True
            for _, request, _ in open_:
                if request is not None:
                    front.abort(request)
                    front.pending.pop(request, None)

    def _submit(self, record: Record) -> tuple[Hashable | None, dict[str, Any] | None]:
        """The id of the request, or the error if it cannot be served."""
        from bankfull.cli.sampling import params_from
        from bankfull.errors import BankfullError

        front = self._llm.loaded.frontend
        try:
            if record.problem is not None:
                return None, record.result(error=record.problem)
            prompt = record.prompt if record.messages is None else front.encode_chat(record.messages)
            return front.submit(prompt, params_from(self._params, record.params or {})), None
        except BankfullError as error:
            return None, record.result(error=str(error))

    def _ready(self, record: Record, request: Hashable | None, refused: dict[str, Any] | None) -> dict[str, Any] | None:
        if refused is not None:
            return refused
        front = self._llm.loaded.frontend
        if not front.pending[request].result.finished:
            return None
        result = front.take(request)
        self._tokens += result.metrics.output_tokens
        return _as_result(record, result)

    def _account(self) -> None:
        """Add up the steps' limits at once, so that the list of shapes stays short."""
        steps = self._watch.take()
        self._steps += len(steps)
        if self._limit is not None:
            self._limit_seconds += self._limit.seconds(steps) or 0.0

    def note(self) -> str:
        return f"{self._tokens / max(1e-9, time.monotonic() - self._begun):.0f} tokens/s"

    def summary(self, done: int, errors: int) -> str:
        from bankfull.cli.speed import percentage

        busy = self._llm.loaded.frontend.engine.totals.busy
        known = self._limit_seconds > 0 and busy > 0
        near = f", {percentage(100 * self._limit_seconds / busy)} of this machine's limit" if known else ""
        return (
            f"bankfull: {done} results, {errors} of them errors; {self._tokens} tokens, {self.note()} "
            f"in {self._steps} steps{near}"
        )


def _as_result(record: Record, result: RequestOutput) -> dict[str, Any]:
    if problem := next((o.error for o in result.outputs if o.error), None):
        return record.result(error=problem)
    samples = [{"text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason} for o in result.outputs]
    several = {"samples": samples} if len(samples) > 1 else {}
    usage = {
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.metrics.cached_tokens,
        "completion_tokens": result.metrics.output_tokens,
    }
    return record.result(**samples[0], **several, usage=usage)
