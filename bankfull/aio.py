"""The engine for asyncio: the loop runs on its own thread, and answers are async iterators."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from bankfull.errors import BankfullError
from bankfull.frontend import Frontend, Prompt
from bankfull.live_weights import Weights, WrittenWeights, stage_weights
from bankfull.llm import LLM
from bankfull.loop import EngineLoop
from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams

Listener = Callable[[Delta | BaseException], None]


class AsyncEngine:
    """Wraps an `LLM`, which only the loop's thread may use from then on."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._front: Frontend = llm.loaded.frontend
        self._loop = EngineLoop(self._front, self._tell)
        self._listeners: dict[Hashable, Listener] = {}
        self._numbers = count()
        self._ended: str | None = None
        """Why the engine no longer accepts requests."""
        self._writing = threading.Lock()
        self._waiting: dict[Hashable, Listener] = {}
        """All waiting callers, including those that the loop's thread has not received yet."""
        self._thread = threading.Thread(target=self._run, name="bankfull-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Hashable | None = None,
        **how: Any,
    ) -> AsyncIterator[Delta]:
        """The answer in pieces, as they are generated; leaving the iterator aborts the request."""
        params = sampling_params or self.llm.default_params()
        request = ("async", next(self._numbers)) if request_id is None else request_id
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

        def listen(item: Delta | BaseException) -> None:
            with suppress(RuntimeError):  # the caller's event loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        # Tokenizing and compiling a grammar may be slow, so neither the event loop nor the engine's loop waits for it.
        prepared = await asyncio.to_thread(self._front.prepare_prompt, prompt, params, id=request, **how)

        def submit() -> None:
            try:
                self._front.queue(prepared)
            except BankfullError as error:
                listen(error)
                return
            self._listeners[request] = listen

        self._waiting[request] = listen
        open_samples = params.n - len(prepared.request.finished)
        try:
            if self._ended is not None:
                raise RuntimeError(self._ended)
            self._loop.post(submit)
            while open_samples:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                open_samples -= item.finish_reason is not None
                yield item
        finally:
            self._waiting.pop(request, None)
            self._loop.post(lambda: self._forget(request))

    async def write_weights(self, weights: Weights, *, restart: bool = False) -> WrittenWeights:
        """`LLM.write_weights`: streams go on while the new weights are staged, and wait while they are copied."""
        return await asyncio.to_thread(self._write_weights, weights, restart)

    def _write_weights(self, weights: Weights, restart: bool) -> WrittenWeights:
        with self._writing:  # what is staged fits the weights that it will replace
            staged, written = stage_weights(self.llm.loaded, weights), Future[WrittenWeights]()

            def write() -> None:
                try:
                    written.set_result(staged.write(restart))
                except BaseException as error:  # the weights may be neither the old nor the new ones
                    written.set_exception(error)
                    raise

            def listen(item: Delta | BaseException) -> None:
                if isinstance(item, BaseException) and not written.done():
                    written.set_exception(item)

            self._waiting[written] = listen
            try:
                if self._ended is not None:
                    raise RuntimeError(self._ended)
                self._loop.post(write)
                return written.result()
            finally:
                self._waiting.pop(written, None)

    async def abort(self, request_id: Hashable) -> None:
        """Abort a request; its iterator gets a last piece with finish_reason "abort"."""
        self._loop.post(lambda: self._tell(self._front.abort(request_id)))

    def close(self) -> None:
        """Stop the loop; open iterators get an error."""
        self._loop.stop()
        self._thread.join()

    # -- on the loop's thread

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self._ended = f"the engine's thread has failed: {error!r}"
            self._fail(error)
            raise
        self._ended = "the engine was closed"
        self._fail(RuntimeError(self._ended))

    def _tell(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            listener = self._listeners.get(delta.request_id)
            if listener is not None:
                listener(delta)

    def _forget(self, request: Hashable) -> None:
        self._listeners.pop(request, None)
        if request in self._front.pending:
            self._front.abort(request)
            self._front.pending.pop(request, None)

    def _fail(self, error: BaseException) -> None:
        for listener in list(self._waiting.values()):
            listener(error)
        self._listeners.clear()
