"""The whole service in a process of its own, so that a test's own work does not hold up its event loop.

`python -m tests.serve.guarded MODEL KEYFILE` prints its port. /stall tells how long the event loop was held up since
somebody last asked.
"""

from __future__ import annotations

import asyncio
import select
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

BEAT = 0.005
START_SECONDS = 120


class Watchdog:
    """Time that passed while the process computed something else. Other processes that take the cores away are not its
    fault: such time passes without that any of its threads computes."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            clock, computed = time.monotonic(), time.process_time()
            await asyncio.sleep(BEAT)
            late = time.monotonic() - clock - BEAT
            self.longest = max(self.longest, min(late, time.process_time() - computed))

    def take(self) -> float:
        longest, self.longest = self.longest, 0.0
        return longest


def main(model: str, key_file: str) -> None:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    from bankfull.serve.app import create_app
    from bankfull.serve.fortify import fortify
    from bankfull.serve.guard import GuardLimits, open_doors
    from bankfull.serve.keys import Keyring
    from bankfull.serve.link import Link
    from bankfull.serve.listen import uvicorn_config
    from bankfull.serve.metrics import Metrics
    from bankfull.serve.settings import Settings
    from bankfull.serve.texts import Texts
    from bankfull.serve.watch import WatchedBackend

    link = Link(model, {"dtype": "float32", "rows": 8, "memory": "8MiB"})
    keyring, metrics, watchdog = Keyring(file=Path(key_file)), Metrics(), Watchdog()
    backend = WatchedBackend(link, metrics, keyring)

    async def stall(request: Request) -> JSONResponse:
        return JSONResponse(watchdog.take())

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        await link.start()
        await link.wait_ready()
        watching = asyncio.create_task(watchdog.watch())
        print(listening.getsockname()[1], flush=True)
        yield
        watching.cancel()
        await link.close()

    app = create_app(backend, Texts.open(model), Settings(names=("tiny",)), lifespan=lifespan)
    app.add_route("/stall", stall)
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
