"""A server that computes nothing and timestamps its own events, as a reference for the client's measurements.

Each token's text is its write time, in the clock that all processes share; the first token's text begins with the
arrival time of the request. A request waits for service (`service` seconds each, one after another: an M/D/1 queue for
Poisson arrivals), then gets its tokens `gap` seconds apart. /notes returns the kernel's timestamps of the same events
(see witness.py), because the server's own times are sometimes late.

    python -m tests.bench.load.stamped_server --port 0 --service 0.005 --gap 0.01
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import select
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns, time_ns
from typing import Any

from httptools import HttpRequestParser

from bankfull.bench.load.stalls import StallWatch
from tests.bench.load.witness import Account, WitnessSocket


class Clock(selectors.EpollSelector):
    """Microsecond precision; separate from the client's implementation, so that they do not share a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = StallWatch()

    def select(self, timeout: float | None = None) -> Any:
        self.watch.goes_to_sleep(timeout)
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        self.watch.wakes()
        return super().select(0)


class Line:
    """One server, first come, first served; without a service time, unlimited concurrency."""

    def __init__(self, service: float, wait: float, gap: float) -> None:
        self.service, self.wait, self.gap = service, wait, gap
        self._free = 0.0

    def first_token(self, arrived: float) -> float:
        if not self.service:
            return arrived + self.wait
        self._free = max(self._free, arrived) + self.service
        return self._free + self.wait


@dataclass
class Notes:
    """The record returned after a run."""

    watch: StallWatch
    accounts: list[Account] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            # Timestamps use a clock ahead of the one that processes share; an interruption lowers the difference.
            "ahead": max(time_ns() - monotonic_ns() for _ in range(10)),
            "stalls": [(stall.begin, stall.end, stall.own) for stall in self.watch.stalls],
            "accounts": [account.as_json() for account in self.accounts],
        }


class Stamping(asyncio.Protocol):
    def __init__(
        self, line: Line, faults: Faults, notes: Notes | None = None, witness: WitnessSocket | None = None
    ) -> None:
        self._line, self._faults, self._notes, self._witness = line, faults, notes, witness
        self._parser = HttpRequestParser(self)
        self._body = b""
        self._account: Account | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url.decode(), b""

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        arrived = asyncio.get_running_loop().time()
        if self._path == "/v1/models":
            self._plain(200, {"object": "list", "data": [{"id": "stamps", "object": "model", "owned_by": "tests"}]})
        elif self._path in ("/v1/completions", "/v1/chat/completions"):
            call = json.loads(self._body)
            self._faults.asked(call)
            if self._faults.refuses():
                self._plain(429, {"error": {"message": "no room"}})
            elif self._faults.leaves():
                self._transport.abort()
            else:
                if self._notes is not None and self._witness is not None:
                    self._account = Account(self._witness)
                    self._notes.accounts.append(self._account)
                self._answer(call, arrived, "chat" in self._path)
        elif self._path == "/notes" and self._notes is not None:
            self._plain(200, self._notes.as_json())
        elif self._path == "/stop":
            self._plain(200, self._faults.calls)
            asyncio.get_running_loop().call_later(0.01, asyncio.get_running_loop().stop)
        else:
            self._plain(404, {"error": {"message": f"nothing at {self._path}"}})

    def _plain(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _answer(self, call: dict[str, Any], arrived: float, chat: bool) -> None:
        first = self._line.first_token(arrived)
        asyncio.get_running_loop().call_at(first, self._token, first, 0, arrived, call, chat)

    def _token(self, due: float, number: int, arrived: float | None, call: dict[str, Any], chat: bool) -> None:
        """Write one token and schedule the next: writing all at once would delay requests that arrive meanwhile."""
        if self._transport.is_closing():
            return
        last = number + 1 >= call["max_tokens"]
        if not last:
            after = due + self._line.gap
            asyncio.get_running_loop().call_at(after, self._token, after, number + 1, None, call, chat)
        parts = []
        if arrived is not None:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            parts.append(head)
        before = time_ns()
        stamp = f"{asyncio.get_running_loop().time():.6f} "
        text = stamp if arrived is None else f"{arrived:.6f} {stamp}"
        said = f'"delta": {{"content": "{text}"}}' if chat else f'"text": "{text}"'
        why = '"length"' if last else "null"
        events = f'data: {{"choices": [{{"index": 0, {said}, "finish_reason": {why}}}]}}\n\n'.encode()
        if last:
            prompt = call.get("prompt", "")
            tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
            usage = {"prompt_tokens": tokens, "completion_tokens": call["max_tokens"]}
            events += _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        parts.append(b"%x\r\n%b\r\n" % (len(events), events))
        if last:
            parts.append(b"0\r\n\r\n")
        self._transport.write(b"".join(parts))
        if self._account is not None:
            self._account.wrote(text, before)


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


class Faults:
    """Deliberate failures: every n-th request is rejected, or loses its connection."""

    def __init__(self, refuse: int, leave: int) -> None:
        self._refuse, self._leave, self.calls = refuse, leave, list[dict[str, Any]]()

    def asked(self, call: dict[str, Any]) -> None:
        self.calls.append({name: value for name, value in call.items() if name != "stream_options"})

    def refuses(self) -> bool:
        return bool(self._refuse) and len(self.calls) % self._refuse == 0

    def leaves(self) -> bool:
        return bool(self._leave) and len(self.calls) % self._leave == 0


async def _serve(arguments: argparse.Namespace, watch: StallWatch) -> None:
    line, faults = Line(arguments.service, arguments.wait, arguments.gap), Faults(arguments.refuse, arguments.leave)
    loop, notes = asyncio.get_running_loop(), Notes(watch)
    listening = socket.create_server(("127.0.0.1", arguments.port), backlog=1024)
    listening.setblocking(False)
    # A garbage collection would delay the timestamp of a request that has arrived.
    gc.collect()
    gc.freeze()
    gc.disable()
    print(listening.getsockname()[1], flush=True)
    while True:
        witness = WitnessSocket((await loop.sock_accept(listening))[0])
        await loop.connect_accepted_socket(partial(Stamping, line, faults, notes, witness), witness)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--service", type=float, default=0.0)
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--refuse", type=int, default=0)
    parser.add_argument("--leave", type=int, default=0)
    clock = Clock()
    with (
        suppress(RuntimeError, KeyboardInterrupt),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner,
    ):
        runner.run(_serve(parser.parse_args(), clock.watch))


if __name__ == "__main__":
    main()
