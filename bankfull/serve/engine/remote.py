"""An engine process on another machine, behind the gateway of a replica."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from bankfull.errors import ConfigError
from bankfull.fleet.failures import PROBE_SECONDS, QUIET_SECONDS
from bankfull.handshake.calling import HANDSHAKE_SECONDS, reach
from bankfull.handshake.link_tls import LinkTls
from bankfull.handshake.proof import CONTROL, ENGINE, SUBJECT, TAG, HandshakeRefused, Seal, SessionKeys
from bankfull.serve.engine.gateway import HEARTBEAT, KILL, PROBE, RUNNING
from bankfull.serve.engine.process import EngineConnection, how_ended
from bankfull.serve.engine.wire import Failed, FromEngine

log = logging.getLogger("bankfull.serve")

SILENT_SECONDS = 5.0
"""Time without a heartbeat after which a gateway counts as gone although its machine acknowledges probes: processes may
have to wait for a processor, kernels do not. The death of a process is noticed at once, because its connections are
closed."""


class RemoteEngine(EngineConnection):
    """Connected by TCP. The gateway reports the engine's progress and kills it on request; when either connection is
    lost, the engine has ended."""

    def __init__(
        self,
        receive: Callable[[FromEngine], None],
        address: tuple[str, int],
        token: bytes,
        tls: LinkTls | None = None,
    ) -> None:
        super().__init__(receive)
        self._address, self._token, self._tls = address, token, tls
        self._control: ControlConnection | None = None
        self._problem = "before it began"
        """How the engine ended, if its gateway does not report a status."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        session = secrets.token_bytes(SUBJECT)
        try:
            secured: dict[str, Any] = {}
            if self._tls is not None:
                secured = {
                    "ssl": self._tls.calling(),
                    "server_hostname": "",
                    "ssl_handshake_timeout": HANDSHAKE_SECONDS,
                }
            control, keys = await self._open(CONTROL, session)
            _, self._control = await loop.create_connection(
                lambda: ControlConnection(self._lost, keys), sock=control, **secured
            )
            data, keys = await self._open(ENGINE, session)
            self.sealed(keys)
            await loop.create_connection(lambda: self, sock=data, **secured)
        except ConfigError as error:  # files for TLS may be replaced
            self._problem = f"without a connection to {self.where} ({error})"
            raise ConnectionError(str(error)) from None
        except HandshakeRefused as error:  # the same with every further attempt
            self._receive(Failed(f"{self.where}: {error}"))
            raise ConnectionError(str(error)) from None
        except OSError as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
            self._problem = f"without a connection to {self.where} ({why})"
            raise

    @property
    def where(self) -> str:
        host, port = self._address
        return f"{host}:{port}"

    @property
    def progress(self) -> int:
        return self._control.progress if self._control is not None else 0

    @property
    def pid(self) -> int:
        return self._control.pid if self._control is not None else 0

    def kill(self) -> None:
        if self._control is not None:
            self._control.kill()
        if self._transport is not None:
            self._transport.abort()

    async def finish(self, patience: float) -> str:
        if self._transport is not None:
            self._transport.close()
        if self._control is None:
            return self._problem
        if (status := await self._control.wait(patience)) is None:
            self._control.kill()
            status = await self._control.wait(HANDSHAKE_SECONDS)
        self._control.close()
        return self._problem if status is None else how_ended(status)

    def _lost(self, why: str) -> None:
        """The gateway is gone, and with it the watchdog: the engine is not used any longer."""
        self._problem = f"when {why} ({self.where})"
        if self._transport is not None:
            self._transport.abort()

    async def _open(self, purpose: bytes, session: bytes) -> tuple[socket.socket, SessionKeys]:
        return await reach(self._address, self._token, purpose, session)


class ControlConnection(asyncio.Protocol):
    """The control connection to a gateway."""

    def __init__(self, lost: Callable[[str], None], keys: SessionKeys) -> None:
        self._lost = lost
        self._own, self._theirs = Seal(keys.of_caller), Seal(keys.of_listener)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._read = bytearray()
        self._silence: asyncio.TimerHandle | None = None
        self._exited: asyncio.Future[int | None] = self._loop.create_future()
        """The exit status; None: it never became known."""
        self._closed = False
        self.progress = self.pid = 0

    def kill(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(KILL + self._own.tag(KILL))

    async def wait(self, seconds: float) -> int | None:
        """The exit status of the engine, if it comes in time."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self._exited), seconds)
        return None

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        self._read += data
        self._expect()
        while len(self._read) >= HEARTBEAT.size + TAG:
            said, tag = self._read[: HEARTBEAT.size], self._read[HEARTBEAT.size : HEARTBEAT.size + TAG]
            del self._read[: HEARTBEAT.size + TAG]
            if not self._theirs.opens(tag, said):
                log.error("A heartbeat is not what the gateway has sent; closing the connection.")
                assert self._transport is not None
                self._transport.abort()
                return
            self.pid, self.progress, status = HEARTBEAT.unpack(said)
            if status != RUNNING and not self._exited.done():
                self._exited.set_result(status)

    def connection_lost(self, error: Exception | None) -> None:
        if self._silence is not None:
            self._silence.cancel()
        if not self._exited.done():
            self._exited.set_result(None)
        if not self._closed:
            self._lost("the connection to its machine was lost")

    def _expect(self) -> None:
        """Restart the time-out for the next heartbeat."""
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self._loop.call_later(QUIET_SECONDS, self._probe, SILENT_SECONDS - QUIET_SECONDS)

    def _probe(self, left: float) -> None:
        """There was no heartbeat; `left`: the seconds in which there must be one."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(PROBE + self._own.tag(PROBE))
            pause = min(left, PROBE_SECONDS)
            self._silence = self._loop.call_later(pause, self._judge, left - pause)

    def _judge(self, left: float) -> None:
        # Before a timer is called, the event loop reads what has arrived: a pause of this process proves nothing.
        if self._transport is None:
            return
        if _unacknowledged(self._transport):
            log.error("The machine of a replica does not acknowledge any data: it has no power or network.")
        elif left <= 0:
            log.error("The gateway of a replica has sent no heartbeat for %g seconds.", SILENT_SECONDS)
        else:
            self._probe(left)
            return
        self._transport.abort()


def _unacknowledged(transport: asyncio.WriteTransport) -> bool:
    """Whether sent bytes have not reached the other machine's kernel; False where the system does not count them."""
    if transport.get_write_buffer_size():
        return True
    try:
        waiting = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return False
    return bool(int.from_bytes(waiting, sys.byteorder))
