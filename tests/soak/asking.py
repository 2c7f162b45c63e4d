"""Clients by the hundred: plain sockets, because a comfortable client would cost more than the server that it asks."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

HEAD = (
    "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    "content-length: {size}\r\n\r\n"
)
LONGEST_ANSWER = 600.0


@dataclass
class Answer:
    status: int
    seconds: float
    """From the first byte sent to the last received."""
    first: float
    """To the first byte received."""
    body: bytes

    @property
    def events(self) -> int:
        """Pieces of a stream that carry text."""
        return self.body.count(b'"finish_reason":null')

    @property
    def whole(self) -> bool:
        return self.status == 200 and b"data: [DONE]" in self.body


def completion(tokens: int, *, prompt: str = "The river", **others: Any) -> dict[str, Any]:
    """A streamed call that gives exactly so many tokens."""
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, **others}


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)


def send(writer: asyncio.StreamWriter, body: dict[str, Any], path: str = "/v1/completions") -> None:
    data = json.dumps(body).encode()
    writer.write(HEAD.format(path=path, size=len(data)).encode() + data)


async def ask(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Answer:
    begun = time.monotonic()
    reader, writer = await connect(port)
    try:
        send(writer, body, path)
        pieces = [await asyncio.wait_for(reader.read(1 << 16), LONGEST_ANSWER)]
        first = time.monotonic() - begun
        while piece := await asyncio.wait_for(reader.read(1 << 20), LONGEST_ANSWER):
            pieces.append(piece)
    finally:
        writer.close()
    received = b"".join(pieces)
    status = int(received[9:12]) if received.startswith(b"HTTP/1.1 ") else 0
    return Answer(status, time.monotonic() - begun, first, received)
