"""The whole service in a process of its own, so that a test's own work does not hold up its event loop.

`python -m tests.serve.guarded MODEL KEYFILE` prints its port. /turn tells the most work that the event loop did in one
turn since somebody last asked.
"""

from __future__ import annotations

import asyncio
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tests.work import CALLS

START_SECONDS = 120
TURN = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]


class Watchdog:
    """Counts the calls of the event loop's thread, turn by turn. A turn is all that the loop does before it looks for
    news again: what one request makes long, every other request waits for."""

    def __init__(self) -> None:
        self._turn = self.longest = 0

    def watch(self) -> None:
        """Of the thread that calls it, from now on."""
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, called: object) -> None:
        if event == "call" and frame.f_code is TURN:
            self._turn = 0
        self._turn += event in CALLS
        self.longest = max(self.longest, self._turn)

    def take(self) -> int:
        longest, self.longest = self.longest, 0
        return longest


def main(model: str, key_file: str) -> None:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    from bankfull.serve.api.texts import Texts
    from bankfull.serve.app import create_app
    from bankfull.serve.engine.link import Link
    from bankfull.serve.guard.checks import GuardLimits, open_doors
    from bankfull.serve.guard.keys import Keyring
    from bankfull.serve.guard.layers import fortify
    from bankfull.serve.guard.listen import uvicorn_config
    from bankfull.serve.settings import Settings
    from bankfull.serve.telemetry.metrics import Metrics
    from bankfull.serve.telemetry.watch import WatchedBackend

    link = Link(model, {"dtype": "float32", "rows": 8, "memory": "8MiB"})
    keyring, metrics, watchdog = Keyring(file=Path(key_file)), Metrics(), Watchdog()
    backend = WatchedBackend(link, metrics, keyring)

    async def turn(request: Request) -> JSONResponse:
        return JSONResponse(watchdog.take())

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        await link.start()
        await link.wait_ready()
        watchdog.watch()
        print(listening.getsockname()[1], flush=True)
        yield
        await link.close()

    app = create_app(backend, Texts.open(model), Settings(names=("tiny",)), lifespan=lifespan)
    app.add_route("/turn", turn)
    limits = GuardLimits(body_seconds=1.0, body_bytes=4 << 20)
    guarded = fortify(app, backend, open_doors(keyring, host="127.0.0.1"), metrics, limits=limits)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    asyncio.run(uvicorn.Server(uvicorn_config(guarded, "127.0.0.1", 0)).serve([listening]))


@contextmanager
def guarded_service(model: Path, key_file: Path) -> Iterator[tuple[int, int]]:
    """Its port and its process id."""
    options = ["-O"] if sys.flags.optimize else []
    command = [sys.executable, *options, "-m", "tests.serve.guarded", str(model), str(key_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
        line = process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError("the service did not start")
        yield int(line), process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
