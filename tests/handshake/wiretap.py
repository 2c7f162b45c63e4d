"""The network between two ends: it keeps what passes, and may change it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Address = tuple[str, int]


class Wiretap:
    def __init__(self, target: Address) -> None:
        self.heard = bytearray()
        """In both directions."""
        self.change: Callable[[bytes], bytes] = bytes
        """What arrives instead of a part that the caller has sent."""
        self.change_answers: Callable[[bytes], bytes] = bytes
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._server.getsockname()[:2]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                listener = socket.create_connection(self._target)
                self._open += [caller, listener]
                for source, sink, asks in ((caller, listener, True), (listener, caller, False)):
                    threading.Thread(target=self._pass, args=(source, sink, asks), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, asks: bool) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                self.heard += part
                sink.sendall(self.change(part) if asks else self.change_answers(part))
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        for one in [self._server, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextmanager
def tapped(target: Address) -> Iterator[Wiretap]:
    tap = Wiretap(target)
    try:
        yield tap
    finally:
        tap.close()
