"""TLS for what crosses between machines, from the end of the handshake on. Both ends show a certificate that the same
authority has signed. The files are read for each connection, so replaced ones are used by the next."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bankfull.errors import ConfigError
from bankfull.handshake.calling import HANDSHAKE_SECONDS

CERTIFICATE, KEY, AUTHORITY = FILES = ("tls.crt", "tls.key", "ca.crt")
"""The names that a Kubernetes secret for TLS gives them."""
CLOSING_SECONDS = 2.0
"""Time for what is written and for TLS's farewell, before a connection is cut."""


@dataclass(frozen=True, slots=True)
class LinkTls:
    folder: Path
    """The folder with FILES, on every machine."""

    @staticmethod
    def of(folder: str) -> LinkTls | None:
        """TLS with the folder that an option gives; None: without TLS."""
        return LinkTls(Path(folder)) if folder else None

    def calling(self) -> ssl.SSLContext:
        """The context for the end that has connected. Raises ConfigError."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def answering(self) -> ssl.SSLContext:
        """The context for the end that listens. Raises ConfigError."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no connection continues another one
        return context

    def _context(self, role: int) -> ssl.SSLContext:
        for name in FILES:
            if not (self.folder / name).is_file():
                raise ConfigError(
                    f"--link-tls {self.folder} has no file {name}: it needs {', '.join(FILES)} on every machine."
                )
        context = ssl.SSLContext(role)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Machines have addresses that change; which process this is, the handshake before has proven.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            # Without a password callback OpenSSL would prompt at the terminal.
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, lambda: "")
            context.load_verify_locations(self.folder / AUTHORITY)
        except (OSError, ValueError) as error:  # includes ssl.SSLError
            raise ConfigError(f"The files of --link-tls {self.folder} cannot be used: {error}.") from None
        return context


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def streams(connection: socket.socket, context: ssl.SSLContext | None) -> AsyncIterator[Streams]:
    """The listener's end of a connection after its handshake. Raises OSError."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    patience = None if context is None else HANDSHAKE_SECONDS
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=context, ssl_handshake_timeout=patience
    )
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        yield reader, writer
    finally:
        await leave(writer)


async def leave(writer: asyncio.StreamWriter) -> None:
    """Close it when all is written, or soon."""
    writer.close()
    try:
        with suppress(OSError):
            async with asyncio.timeout(CLOSING_SECONDS):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


async def relay(outer: Streams, inner: socket.socket) -> None:
    """Pass on what arrives, both ways, until one end has closed."""
    reader, writer = await asyncio.open_unix_connection(sock=inner)
    ways = [asyncio.ensure_future(_pass(outer[0], writer)), asyncio.ensure_future(_pass(reader, outer[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)  # a lost connection ends both ways
        await leave(writer)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(1 << 18):
        writer.write(part)
        await writer.drain()
