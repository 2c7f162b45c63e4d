"""The whole service in its own process, so that the work of a test does not delay its event loop.

`python -m tests.serve.guarded MODEL KEYFILE` prints its port. /turn returns the most work in one iteration of the event
loop since the last query.
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

START_SECONDS = 120
CALLS = ("call", "c_call")
"""The events of a profile that count: a function is entered, written in Python or in C."""
TURN = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]


class Watchdog:
    """Counts function calls on the event loop's thread per iteration. An iteration is all that the loop does before it
    polls for events again, so every other request waits for it."""

    def __init__(self) -> None:
        self._turn = self.longest = 0

    def watch(self) -> None:
        """Count the calls of the current thread from now on."""
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
    from bankfull.serve.guard.checks import GuardLimits, access_policy
    from bankfull.serve.guard.keys import Keyring
    from bankfull.serve.guard.layers import protect
    from bankfull.serve.guard.listen import uvicorn_config
    from bankfull.serve.settings import Settings
    from bankfull.serve.telemetry.metrics import ServiceMetrics
    from bankfull.serve.telemetry.watch import WatchedBackend

    link = Link(model, {"dtype": "float32", "rows": 8, "memory": "8MiB"})
    keyring, metrics, watchdog = Keyring(file=Path(key_file)), ServiceMetrics(), Watchdog()
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
    guarded = protect(app, backend, access_policy(keyring, host="127.0.0.1"), metrics, limits=limits)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    asyncio.run(uvicorn.Server(uvicorn_config(guarded, "127.0.0.1", 0)).serve([listening]))


@contextmanager
def guarded_service(model: Path, key_file: Path) -> Iterator[tuple[int, int]]:
    """The port and the process id."""
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
