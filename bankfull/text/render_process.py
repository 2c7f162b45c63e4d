"""Starts the worker processes that render chat templates (`render_worker`), sends them one call at a time, and replaces
a worker that has ended.

There are two workers, so that a short conversation never waits behind a long one.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from bankfull.errors import BankfullError, ModelError, RequestError
from bankfull.text.render_wire import (
    COMPILED,
    CPU_SECONDS,
    LIMITED,
    MADE,
    MEMORY,
    NO_MEMORY,
    RAISED,
    REQUEST,
    STARTED,
    TOO_MUCH,
    receive,
    send,
)

SHORT = 64 << 10
"""Largest size of a short call in bytes."""
TEMPLATES = 16
"""Compiled templates that a worker keeps; a program rarely has more than one model."""
PATIENCE = 60.0
"""Time-out of a call in seconds, for a worker that has not used up its CPU time."""
LOOK = 0.02
"""Seconds between two checks of a worker's memory on systems without a memory limit."""
BASE, PER_CHARACTER = 1 << 20, 8
"""Characters that a template may generate: a constant, plus a multiple of its input (JSON escapes are six long)."""
_FAILED = "the model's chat template failed: "
_PASSED_ON = ("PATH", "LANG", "TZ", "TZDIR", "HOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


T = TypeVar("T")


class Source:
    """The source of a template, and its name in messages to the worker."""

    __slots__ = ("name", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class RenderProcess:
    """One worker process, for any thread, one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._started = self._limited = False
        self._known: dict[str, frozenset[str]] = {}
        """Templates compiled by the worker, least recently used first, with the variables that they read."""
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """Start the worker if there is none, without waiting for it."""
        with self._lock:
            if not self._alive():
                self._start()

    def at_once(self, source: Source) -> bool:
        """Whether a call would start at once: the worker is idle and has compiled the template."""
        return not self._lock.locked() and source.name in self._known and self._alive()

    def variables(self, source: Source) -> frozenset[str]:
        """The variables that a template reads without setting them first. Raises ModelError for a broken template."""
        return self._try(lambda: self._compiled(source))

    def render(self, source: Source, values: Mapping[str, object], given: int) -> str:
        """Render with `values`: plain data with `given` characters in total."""
        longest = BASE + PER_CHARACTER * given

        def ask() -> tuple[bytes, str]:
            self._compiled(source)
            return self._ask({"name": source.name, "values": values, "longest": longest}, longest)

        kind, text = self._try(ask)
        if kind == MADE:
            return text
        if kind == RAISED:
            raise RequestError(f"the model's chat template refused the messages: {text}")
        raise RequestError(_FAILED + text)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _try(self, call: Callable[[], T]) -> T:
        """A worker that ended before it received the call is replaced, and the call is sent again."""
        with self._lock:
            for _ in range(2):
                if not self._alive():
                    self._start()
                with suppress(OSError):
                    return call()
                self._end()
        raise BankfullError("The process for chat templates ends right after its start; is enough memory free?")

    # -- the caller holds the lock

    def _compiled(self, source: Source) -> frozenset[str]:
        name = source.name
        if name in self._known:
            self._known[name] = self._known.pop(name)
            return self._known[name]
        forgotten = list(self._known)[: max(0, len(self._known) + 1 - TEMPLATES)]
        for other in forgotten:
            del self._known[other]
        kind, text = self._ask({"name": name, "source": source.text, "forget": forgotten}, BASE + len(source.text))
        if kind == LIMITED:
            raise ModelError(f"the model's chat template cannot be compiled: {text}")
        if kind != COMPILED:
            raise ModelError(f"the model's chat template {text}")
        self._known[name] = frozenset(json.loads(text))
        return self._known[name]

    def _ask(self, request: Mapping[str, object], longest: int) -> tuple[bytes, str]:
        """Raises OSError if the worker had ended before."""
        assert self._connection is not None
        try:
            message = json.dumps(request, ensure_ascii=False)
        except ValueError as error:  # an integer with more digits than Python converts
            raise RequestError(f"the values for the model's chat template cannot be encoded as JSON: {error}") from None
        try:
            self._wait_started()
            send(self._connection, REQUEST, message)
            answer = self._await(4 * longest + 4096) or (LIMITED, self._reason())
        except BaseException:  # also after an interrupt: the next call must not receive this call's response
            self._end()
            raise
        if answer[0] == LIMITED:
            self._start()  # now, so that the next call need not wait for it
        return answer

    def _await(self, most: int | None = None) -> tuple[bytes, str] | None:
        """The next message; None if the worker has ended."""
        assert self._connection is not None and self._process is not None
        poll, waited = select.poll(), 0.0
        poll.register(self._connection, select.POLLIN)
        looks = self._started and not self._limited
        step = LOOK if looks else PATIENCE
        try:
            while not poll.poll(1e3 * step):
                waited += step
                if waited >= PATIENCE or (looks and _resident(self._process.pid) > MEMORY):
                    self._process.kill()
            return receive(self._connection, most)
        except OSError:
            return None

    def _wait_started(self) -> None:
        if self._started:
            return
        answer = self._await(4096)
        if answer is None or answer[0] != STARTED:
            raise BrokenPipeError
        self._started, self._limited = True, answer[1] == "limited"

    def _reason(self) -> str:
        """Why the worker sent no response."""
        assert self._process is not None
        self._process.kill()
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it runs for more than {CPU_SECONDS:g} second"
        if status == -signal.SIGKILL:
            return f"{TOO_MUCH}, or {PATIENCE:g} seconds"
        if status == NO_MEMORY:
            return TOO_MUCH
        return f"its process ended {f'by signal {-status}' if status < 0 else f'with status {status}'}"

    def _alive(self) -> bool:
        # A forked child shares the socket and must not use it.
        return self._process is not None and self._owner == os.getpid() and self._process.poll() is None

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        # An empty environment: templates must not see secrets such as API keys.
        environment = {k: v for k, v in os.environ.items() if k in _PASSED_ON or k.startswith(("PYTHON", "LC_"))}
        with theirs:
            # -P: a file in the current directory must not shadow a module of this package.
            command = [sys.executable, "-P", "-m", "bankfull.text.render_worker", str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                )
            except OSError as error:
                ours.close()
                raise BankfullError(f"The process for chat templates cannot be started: {error}.") from None
        self._connection, self._owner = ours, os.getpid()
        self._started = self._limited = False
        self.starts += 1

    def _end(self) -> None:
        self._known = {}
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None


def _resident(pid: int) -> int:
    """Resident memory of a process in bytes, on any Unix."""
    try:
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False).stdout
        return int(told) << 10
    except (OSError, ValueError):
        return 0


short_calls, long_calls = RenderProcess(), RenderProcess()


@atexit.register
def _close() -> None:
    for process in (short_calls, long_calls):
        with suppress(OSError):
            process.close()
