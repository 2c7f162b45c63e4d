"""Carries state to engines that share no memory with this one: over TCP connections to their listeners
(`state.page_listener`).

A page is carried when the other engine has answered that it lies in its exchange. An engine that does not answer in
time, or that refuses the connection, rests for a moment: what goes to it meanwhile fails at once.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from contextlib import suppress

from bankfull.errors import ConfigError
from bankfull.handshake.calling import CUT_OFF_PAUSE
from bankfull.handshake.link_tls import LinkTls
from bankfull.state.disk import DamagedPlace
from bankfull.state.page_frames import REFUSED, WRITTEN, BrokenFrame, Frame, PageLine, SealedLine, claim

Address = tuple[str, int]
CONNECT_SECONDS = 2.0
"""Time for a connection and its handshake."""
PAGE_SECONDS = 5.0
"""Time for a page and its answer."""
REST_SECONDS = 1.0
KEPT_SECONDS = 60.0
"""A connection that was not used for so long is opened anew."""


class SocketCarrier:
    def __init__(self, secret: bytes, identity: bytes, tls: LinkTls | None = None) -> None:
        """`secret`: the server's own. `identity`: the form of the state, which must be that of the receivers."""
        self._secret, self._identity, self._tls = secret, identity, tls
        self._receivers: dict[int, _Receiver] = {}

    def locate(self, exchange: int, address: Address) -> None:
        """Note where the engine with this exchange listens. It may have been started again since the last call."""
        known = self._receivers.get(exchange)
        if known is None or known.address != address:
            self._receivers[exchange] = _Receiver(address, self._secret, self._identity, self._tls)
            if known is not None:
                known.close()

    def carry(self, exchange: int, kind: str, place: int, key: bytes, content: memoryview) -> None:
        receiver = self._receivers.get(exchange)
        if receiver is None:
            raise DamagedPlace("The address of the engine that decodes is not known.")
        receiver.send(Frame(kind, place, len(content), key), content)

    def close(self) -> None:
        while self._receivers:
            self._receivers.popitem()[1].close()


class _Receiver:
    """One engine, and connections to it that no thread uses right now."""

    def __init__(self, address: Address, secret: bytes, identity: bytes, tls: LinkTls | None) -> None:
        self.address = address
        self._secret, self._identity, self._tls = secret, identity, tls
        self._idle: deque[tuple[SealedLine, float]] = deque()
        self._rests_until = 0.0
        self._closed = False

    def send(self, frame: Frame, content: memoryview) -> None:
        if time.monotonic() < self._rests_until:
            raise DamagedPlace(f"The engine that decodes, at {self._where}, has not answered a moment ago.")
        try:
            answer = self._send_on(self._kept(), frame, content)
            if answer is None:  # the other end may have closed a connection that was kept: once more on a fresh one
                answer = self._send_on(self._opened(), frame, content)
        except (OSError, DamagedPlace) as error:
            self._rests_until = time.monotonic() + REST_SECONDS
            if isinstance(error, DamagedPlace):
                raise
            why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise DamagedPlace(f"The engine that decodes, at {self._where}, gets no state: {why}.") from error
        if answer is None:
            self._rests_until = time.monotonic() + REST_SECONDS
            raise DamagedPlace(f"The engine that decodes, at {self._where}, has closed the connection.")
        if answer != WRITTEN:
            raise DamagedPlace(f"The engine that decodes, at {self._where}, has not taken what was sent.")

    def _send_on(self, line: SealedLine | None, frame: Frame, content: memoryview) -> bytes | None:
        """The answer; None: there is no such connection any more. Raises TimeoutError."""
        if line is None:
            return None
        ends = time.monotonic() + PAGE_SECONDS
        try:
            line.send(frame.head(), content, ends=ends)
            answer = line.receive(1, ends)
        except TimeoutError:
            line.close()
            raise
        except BrokenFrame:
            line.close()
            raise
        except OSError as error:
            line.close()
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise
            return None
        if answer not in (WRITTEN, REFUSED):
            line.close()
            raise DamagedPlace(f"The engine that decodes, at {self._where}, gives an unknown answer.")
        self._idle.append((line, time.monotonic()))
        if self._closed:
            self.close()
        return answer

    def _kept(self) -> SealedLine | None:
        with suppress(IndexError):
            while True:
                line, used = self._idle.pop()
                if time.monotonic() - used < KEPT_SECONDS:
                    return line
                line.close()
        return None

    def _opened(self) -> SealedLine:
        ends = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                return self._opened_once(ends)
            except (ConnectionResetError, BrokenPipeError):  # the listener had to make room
                if time.monotonic() + CUT_OFF_PAUSE >= ends:
                    raise
            time.sleep(CUT_OFF_PAUSE)

    def _opened_once(self, ends: float) -> SealedLine:
        try:
            context = None if self._tls is None else self._tls.calling()
        except ConfigError as error:
            raise DamagedPlace(f"The engine that decodes, at {self._where}, gets no state: {error}") from None
        line = PageLine(socket.create_connection(self.address, timeout=CONNECT_SECONDS))
        try:
            sealed = claim(line, self._secret, self._identity, ends)
            if context is not None:
                sealed.secure(context, ends)
            return sealed
        except BaseException:
            line.close()
            raise

    @property
    def _where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def close(self) -> None:
        self._closed = True
        with suppress(IndexError):
            while True:
                self._idle.pop()[0].close()
