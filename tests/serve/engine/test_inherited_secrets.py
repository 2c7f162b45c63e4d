"""What engines prove to each other reaches them by an inherited file: no connection, command line or environment has
it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, cast

import pytest

from bankfull.handshake import inherited
from bankfull.handshake.calling import reach
from bankfull.handshake.inherited import Secrets, handed
from bankfull.handshake.proof import CONTROL, ENGINE, SUBJECT, derived
from bankfull.serve.engine import gateway as gateway_module
from bankfull.serve.engine.gateway import EXCHANGE, Gateway

TOKEN, RANKS = b"t" * 32, b"r" * 32
ENGINE_STAND_IN = """
import json, os, socket, sys
from bankfull.handshake import inherited
inherited.inherit(int(sys.argv[3]))
shown = open("/proc/self/environ", "rb").read() + open("/proc/self/cmdline", "rb").read()
own = inherited.INHERITED
try:
    os.fstat(int(sys.argv[3]))
    left = True
except OSError:
    left = False
told = {"exchange": own.exchange.hex(), "ranks": own.ranks.hex(), "shown": shown.hex(), "left": left}
socket.socket(fileno=int(sys.argv[1])).sendall(json.dumps(told).encode() + b"\\n")
"""


def test_an_engine_behind_a_gateway_inherits_its_secrets_and_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(*files: int) -> list[str]:
        return [sys.executable, "-c", ENGINE_STAND_IN, *map(str, files)]

    monkeypatch.setattr(gateway_module, "worker_command", stand_in)

    async def ask() -> dict[str, Any]:
        gateway = Gateway(TOKEN, dict(os.environ), RANKS)
        address = await gateway.start("127.0.0.1")
        try:
            control, _ = await reach(address, TOKEN, CONTROL, bytes(SUBJECT))
            engine, _ = await reach(address, TOKEN, ENGINE, bytes(SUBJECT))
            with control, engine:
                text = bytearray()
                while not text.endswith(b"\n"):
                    text += await asyncio.get_running_loop().sock_recv(engine, 1 << 16)
            return cast(dict[str, Any], json.loads(text))
        finally:
            await gateway.close()

    told = asyncio.run(asyncio.wait_for(ask(), 60))
    exchange = derived(TOKEN, EXCHANGE)
    assert bytes.fromhex(told["exchange"]) == exchange and bytes.fromhex(told["ranks"]) == RANKS
    assert not told["left"], "the file is closed, so no child inherits it"
    shown = bytes.fromhex(told["shown"])
    for secret in (TOKEN, RANKS, exchange):
        assert secret not in shown and secret.hex().encode() not in shown


def test_secrets_are_read_once_and_their_file_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inherited, "INHERITED", Secrets())
    with handed(Secrets(b"e" * 32, b"r" * 32)) as file:
        assert os.fstat(file).st_nlink == 0
        copy = os.dup(file)
        inherited.inherit(copy)
        assert inherited.inherited() == Secrets(b"e" * 32, b"r" * 32)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(copy)
