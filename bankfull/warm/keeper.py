"""The warm process, after its imports: it listens, and forks.

It ends when nobody has asked for so long, on SIGTERM, or once this installation's files have changed; commands that run
are waited for. A fork whose command is gone gets SIGTERM.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from bankfull.build_digest import PACKAGE, stamp_now
from bankfull.warm.handover import ANSWER, REFUSED, STARTED, inherited, peer_is_own, receive

ROOMS = tuple(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
MOST_FORKS = 32


class Keeper:
    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._files = stamp_now(*ROOMS)
        self._inherited = inherited()
        self._asked = time.monotonic()
        self._stopping = False
        self._clients: dict[int, socket.socket] = {}
        """Connection of each fork's command, by the fork's process number."""
        self._left_alone: set[int] = set()
        """Forks whose command has ended."""
        self._rung, self._rings = os.pipe()
        for end in (self._rung, self._rings):
            os.set_blocking(end, False)

    def keep(self) -> dict[str, Any] | None:
        """Serve until the end: None. In a fork, its request."""
        handlers: dict[int, Any] = {
            number: signal.signal(number, self._note) for number in (signal.SIGCHLD, signal.SIGTERM)
        }
        handlers[signal.SIGINT] = signal.default_int_handler
        signal.set_wakeup_fd(self._rings, warn_on_full_buffer=False)
        with _listening(self._path) as listener:
            while not self._ended():
                for file in self._ready(listener):
                    if file == self._rung:
                        os.read(self._rung, 4096)
                    elif file == listener.fileno():
                        request = self._accept(listener, handlers)
                        if request is not None:
                            return request
                    else:
                        self._left(file)
                self._reap()
            self._path.unlink(missing_ok=True)
        return None

    def _note(self, number: int, _: FrameType | None) -> None:
        self._stopping |= number == signal.SIGTERM

    def _ended(self) -> bool:
        if time.monotonic() - self._asked > self._seconds and not self._clients:
            self._stopping = True
        if self._stopping:
            self._path.unlink(missing_ok=True)  # nobody else comes
        return self._stopping and not self._clients

    def _ready(self, listener: socket.socket) -> list[int]:
        poll = select.poll()
        poll.register(self._rung, select.POLLIN)
        if not self._stopping and len(self._clients) < MOST_FORKS:
            poll.register(listener, select.POLLIN)
        for process, connection in self._clients.items():
            if process not in self._left_alone:
                poll.register(connection, 0)  # tells its end only: what it sends is for the fork
        left = self._seconds - (time.monotonic() - self._asked)
        return [file for file, _ in poll.poll(None if self._clients else 1e3 * max(0.01, left))]

    def _accept(self, listener: socket.socket, handlers: dict[int, Any]) -> dict[str, Any] | None:
        """In a fork, its request; in the warm process, and in a fork that is not to run, None or no return."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return None
        if not peer_is_own(connection):
            connection.close()
            return None
        self._asked = time.monotonic()
        if stamp_now(*ROOMS) != self._files:
            self._stopping = True
            connection.close()
            return None
        process = os.fork()
        if process:
            self._clients[process] = connection
            return None
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        listener.close()
        for other in self._clients.values():
            other.close()
        return self._taken(connection)

    def _taken(self, connection: socket.socket) -> dict[str, Any]:
        """The request, in a fork that runs it; a fork that does not ends here."""
        try:
            request, files = receive(connection)
            if not request["arguments"] or request["inherited"] != self._inherited or len(files) != 3:
                raise ValueError("the command begins by itself")
            os.chdir(request["folder"])
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            connection.sendall(ANSWER.pack(STARTED, os.getpid()))
            connection.close()  # the warm process tells the end
        except (OSError, ValueError, KeyError, TypeError):
            with suppress(OSError):
                connection.sendall(ANSWER.pack(REFUSED, os.getppid()))
            os._exit(0)
        return request

    def _left(self, file: int) -> None:
        """The command has ended without its fork."""
        for process, connection in self._clients.items():
            if connection.fileno() == file:
                self._left_alone.add(process)
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)

    def _reap(self) -> None:
        for process in list(self._clients):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self._left_alone.discard(process)
                with self._clients.pop(process) as connection, suppress(OSError):
                    connection.sendall(ANSWER.pack(STARTED, os.waitstatus_to_exitcode(status)))


def _listening(path: Path) -> socket.socket:
    """The socket, in a directory that only this user may enter (`control.begin`). Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen(8)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 2)  # whoever has started this process reads no more
    return listener
