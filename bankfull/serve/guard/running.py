"""Calls that are being answered: the server may have to end them before their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bankfull.errors import BankfullError
from bankfull.serve.telemetry.trace import Trace


class Running:
    def __init__(self) -> None:
        self._calls: dict[asyncio.Task[Any], Trace] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def during(self, task: asyncio.Task[Any] | None, trace: Trace | None) -> Iterator[None]:
        if task is None or trace is None:
            yield
            return
        self._calls[task] = trace
        try:
            yield
        finally:
            del self._calls[task]

    def end(self, error: BankfullError, which: Callable[[Trace], bool] = lambda trace: True) -> int:
        """Each of them is told of the error: streams as their last event, others as their answer. How many they are."""
        ended = [(task, trace) for task, trace in self._calls.items() if trace.ended is None and which(trace)]
        for task, trace in ended:
            trace.ended = error
            task.cancel()
        return len(ended)
