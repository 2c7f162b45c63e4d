"""Hundreds of clients over plain sockets, because an HTTP client library would cost more than the server under test."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

HEAD = (
    "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    "content-length: {size}\r\n{more}\r\n"
)
LONGEST_ANSWER = 600.0


@dataclass
class Answer:
    status: int
    seconds: float
    """Time from the first byte sent to the last byte received."""
    first: float
    """Time to the first byte received."""
    body: bytes

    @property
    def events(self) -> int:
        """Events of a stream that contain text."""
        return self.body.count(b'"finish_reason":null')

    @property
    def whole(self) -> bool:
        return self.status == 200 and b"data: [DONE]" in self.body


def completion(tokens: int, *, prompt: str = "The river", **others: Any) -> dict[str, Any]:
    """A streamed call that generates exactly `tokens` tokens."""
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, **others}


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)


def request_of(body: Any, path: str = "/v1/completions", key: str = "") -> bytes:
    data = json.dumps(body).encode()
    more = f"authorization: Bearer {key}\r\n" if key else ""
    return HEAD.format(path=path, size=len(data), more=more).encode() + data


def send(writer: asyncio.StreamWriter, body: Any, path: str = "/v1/completions", key: str = "") -> None:
    writer.write(request_of(body, path, key))


class _Answering(asyncio.Protocol):
    """Stores the received data and the time of the first byte; nothing else runs per packet."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self.pieces: list[bytes] = []
        self.first = 0.0
        self.closed: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.pieces:
            self.first = time.monotonic()
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def ask(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Answer:
    begun = time.monotonic()
    loop = asyncio.get_running_loop()
    transport, answering = await loop.create_connection(lambda: _Answering(request_of(body, path)), "127.0.0.1", port)
    try:
        async with asyncio.timeout(LONGEST_ANSWER):
            await answering.closed
    finally:
        transport.close()
    received = b"".join(answering.pieces)
    status = int(received[9:12]) if received.startswith(b"HTTP/1.1 ") else 0
    return Answer(status, time.monotonic() - begun, (answering.first or time.monotonic()) - begun, received)
