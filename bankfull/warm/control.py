"""Starts and stops the warm process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bankfull.warm.handover import answered, connected
from bankfull.warm.place import is_own, socket_path

PATIENCE_SECONDS = 60.0
"""For everything to be imported, on a busy machine."""


def running() -> int | None:
    """The number of the warm process, if there is one. Raises ConfigError."""
    with suppress(OSError, ValueError):
        if (connection := connected()) is not None:
            with connection:
                return answered(connection, [])[1]
    return None


def stopped() -> int | None:
    """Ends the warm process; its number, if there was one. Raises ConfigError."""
    process = running()
    if process is not None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
        _until(lambda: not socket_path().exists())
    return process


def begin(module: str, seconds: float) -> int:
    """Start the warm process, wait until it listens, and return its number. `module`: what it runs. Raises ConfigError
    or OSError."""
    path = socket_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(path.parent):
        raise OSError(f"{path.parent} may be entered by others: chmod 700 it")
    path.unlink(missing_ok=True)  # nobody listens there: the process was killed
    command = [sys.executable, "-m", module, str(seconds)]
    with open(os.devnull, "r+b") as nothing:
        child = subprocess.Popen(
            command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, start_new_session=True, cwd="/"
        )
    assert child.stderr is not None
    with child.stderr:
        _until(lambda: child.poll() is not None or path.exists())
        if not path.exists():
            child.kill()
            said = child.stderr.read().decode(errors="replace").strip().splitlines()
            raise OSError(said[-1] if said else f"it ended with {child.wait()}")
    child.returncode = 0  # it outlives this process, which does not wait for it
    return child.pid


def bytes_of(process: int) -> int:
    """What a process takes, memory that several share counted in parts. 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
