"""The engine's way to the API: written at once where the socket takes it, else by a thread while the engine goes on."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable

MOST_WAITING = 32 << 20
"""Bytes that may wait for the API before the engine waits too: some ten thousand steps of streaming."""
PATIENCE = 60.0
"""Seconds after which an API that takes nothing counts as gone."""


class ApiGone(Exception):
    """Nobody reads what the engine says."""


class Outbox:
    def __init__(self, connection: socket.socket, give_up: Callable[[str, BaseException], None]) -> None:
        """`give_up` is told the thread's name and why it failed: nothing would be written any more."""
        self._connection, self._give_up = connection, give_up
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write_waiting, name="bankfull-writer", daemon=True).start()

    def send(self, message: bytes) -> None:
        """In the order of the calls. Returns at once unless MOST_WAITING bytes wait already."""
        with self._changed:
            if not self._waiting:
                message = message[self._write_now(message) :]
                if not message:
                    return
            deadline = time.monotonic() + PATIENCE
            while self._size and self._size + len(message) > MOST_WAITING:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise ApiGone
            self._waiting.append(memoryview(message))
            self._size += len(message)
            self._changed.notify_all()

    def _write_now(self, message: bytes) -> int:
        try:
            return self._connection.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ApiGone from error

    def _write_waiting(self) -> None:
        try:
            self._keep_writing()
        except BaseException as error:
            self._give_up(threading.current_thread().name, error)

    def _keep_writing(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                first = self._waiting[0]
            try:
                self._connection.sendall(first)
            except OSError:
                return  # the reader sees the same, and ends the process
            with self._changed:
                # Only now: while anything is listed here, nobody else writes.
                self._waiting.popleft()
                self._size -= len(first)
                self._changed.notify_all()
