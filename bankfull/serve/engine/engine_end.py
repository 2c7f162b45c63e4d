"""The engine's end of its socket: the API's messages are read on the engine's own thread, and the answers are written
at once or by a thread."""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from bankfull.handshake.proof import TAG, Seal
from bankfull.serve.engine.wire import HEADER, ToEngine, body_length, decoder

READ_BYTES = 64 << 10
READING_SECONDS, MOST_READING_SECONDS = 0.002, 0.02
"""The least and the most time for messages in one turn of the engine's loop; running requests wait meanwhile."""
READING_SHARE = 0.1
"""Messages may take this fraction of the time since the last turn, within the two bounds above: more of them arrive
during a long step."""
MOST_WAITING = 32 << 20
"""Bytes queued for the API before the engine blocks: about ten thousand steps of streaming."""
PATIENCE = 60.0
"""Seconds after which an API that reads nothing counts as gone."""


class ApiGone(Exception):
    """The API process does not read the socket any more."""


class Outbox:
    """The engine's messages to the API: written at once where the socket takes them, else by a thread while the engine
    goes on."""

    def __init__(
        self, connection: socket.socket, give_up: Callable[[str, BaseException], None], seal: Seal | None = None
    ) -> None:
        """`give_up` is called with the writer thread's name and its error: nothing could be written any more."""
        self._connection, self._give_up, self._seal = connection, give_up, seal
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write_waiting, name="bankfull-writer", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message, in the order of the calls. Returns at once unless MOST_WAITING bytes wait already."""
        with self._changed:
            if self._seal is not None:
                message += self._seal.tag(message)
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
                return  # the reader gets the same error, and ends the process
            with self._changed:
                # Only now: while a message is listed here, no other thread writes.
                self._waiting.popleft()
                self._size -= len(first)
                self._changed.notify_all()


class MessageHead(msgspec.Struct):
    """The readable part of a message that cannot be decoded."""

    type: str = ""
    id: int | None = None


class NotAMessage(Exception):
    """The data on the socket is not a message."""


class Inbox:
    """The API's messages, read on the engine's own thread: the bell of its loop. Other threads ring it by a pipe."""

    def __init__(
        self, connection: socket.socket, take: Callable[[ToEngine | MessageHead], None], seal: Seal | None = None
    ) -> None:
        self._connection, self._take, self._seal = connection, take, seal
        self._behind = 0 if seal is None else TAG
        """Bytes behind each message."""
        self._owner = threading.get_ident()
        self._rung, self._rings = os.pipe()
        for end in (self._rung, self._rings):
            os.set_blocking(end, False)
        self._news, self._more = select.poll(), select.poll()
        self._news.register(connection, select.POLLIN)
        self._news.register(self._rung, select.POLLIN)
        self._more.register(connection, select.POLLIN)
        self._read = bytearray()
        self._decode = decoder(ToEngine).decode
        self._decode_head = decoder(MessageHead).decode
        self._waited_at = time.monotonic()

    def ring(self) -> None:
        if threading.get_ident() != self._owner:  # an action posted from within `wait` runs when that returns
            with suppress(BlockingIOError):  # the pipe is full: it rings anyway
                os.write(self._rings, b"!")

    def wait(self, seconds: float | None) -> None:
        """Handle the messages that have arrived. Raises ApiGone, or NotAMessage."""
        away = time.monotonic() - self._waited_at
        if self._whole() is not None:
            seconds = 0.0
        for file, _ in self._news.poll(None if seconds is None else math.ceil(1e3 * seconds)):
            if file == self._rung:
                os.read(self._rung, 4096)
            else:
                self._fill()
        ends = time.monotonic() + min(MOST_READING_SECONDS, max(READING_SECONDS, READING_SHARE * away))
        while (body := self._next()) is not None:
            self._take(self._decoded(body))
            if time.monotonic() > ends:
                break
            if self._whole() is None and self._more.poll(0):
                self._fill()
        self._waited_at = time.monotonic()

    def _fill(self) -> None:
        """Read at least one whole message, unless its end is late."""
        while self._whole() is None:
            try:
                got = self._connection.recv(READ_BYTES)
            except OSError as error:
                raise ApiGone from error
            if not got:
                raise ApiGone
            self._read += got
            if self._whole() is None and not self._more.poll(math.ceil(1e3 * READING_SECONDS)):
                return

    def _whole(self) -> int | None:
        """The end of the first message, if it has arrived."""
        if len(self._read) < HEADER:
            return None
        try:
            end = HEADER + body_length(self._read[:HEADER]) + self._behind
        except ValueError as error:
            raise NotAMessage(error) from None
        return end if len(self._read) >= end else None

    def _next(self) -> bytearray | None:
        end = self._whole()
        if end is None:
            return None
        behind = end - self._behind
        if self._seal is not None and not self._seal.opens(self._read[behind:end], self._read[:behind]):
            raise NotAMessage("it is not what the server has sent.")
        body = self._read[HEADER:behind]
        del self._read[:end]
        return body

    def _decoded(self, body: bytearray) -> ToEngine | MessageHead:
        try:
            message: ToEngine = self._decode(body)
            return message
        except msgspec.ValidationError as error:
            head = self._head(body)
            if head is None or head.id is None:
                raise NotAMessage(error) from None
            print(f"bankfull: a message of the API cannot be decoded: {error}", file=sys.stderr)
            return head
        except msgspec.MsgspecError as error:
            raise NotAMessage(error) from None

    def _head(self, body: bytearray) -> MessageHead | None:
        try:
            head: MessageHead = self._decode_head(body)
            return head
        except msgspec.MsgspecError:
            return None
