"""Runs a peer's own tool to completion."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bankfull.bench.compare.processes import environment
from benchmarks.cpu_peers.process import EngineFailed

LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class Ended:
    """Output and resource usage of a finished process."""

    said: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def run_to_end(command: Sequence[str], log: Path, timeout: float, variables: Mapping[str, str] | None = None) -> Ended:
    """Run with stderr to `log`. Raises EngineFailed if it could not start, failed, or timed out."""
    tool = Path(command[0]).name
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    try:
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(variables),
            )
    except OSError as error:
        raise EngineFailed(f"{command[0]} could not be started: {error.strerror}") from None
    late = threading.Timer(timeout, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.read()
        # wait4 reports this process alone; the standard library's figures sum over all children.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        late.cancel()
    seconds = time.perf_counter() - begun
    if process.returncode:
        if seconds >= timeout:
            raise EngineFailed(f"{tool} took longer than {timeout:.0f} s")
        why = " ".join(log.read_text(errors="replace").split())[-LONGEST_REASON:]
        raise EngineFailed(f"{tool} exited with code {process.returncode}: {why} (full log: {log})")
    return Ended(said, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
