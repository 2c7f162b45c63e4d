"""`bankfull serve` in its own process, observed from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
ENGINE = b"bankfull.serve.engine.worker"
"""In the command line of the engine's process."""
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def exposition(self) -> str:
        return httpx.get(self.url + "/metrics", timeout=30).text

    def metrics(self) -> dict[str, float]:
        """Metrics by name, summed over labels."""
        sums: dict[str, float] = {}
        for line in self.exposition().splitlines():
            found = re.match(r"bankfull:(\w+)(?:\{.*\})? (\S+)$", line)
            if found is not None:
                sums[found[1]] = sums.get(found[1], 0.0) + float(found[2])
        return sums

    def holds_nothing(self) -> bool:
        now = self.metrics()
        return not any(now[name] for name in IDLE)

    def ready(self) -> bool:
        return httpx.get(self.url + "/ready", timeout=30).status_code == 200

    def engine(self) -> int | None:
        """Process id of the engine. Other children of the API process render chat templates."""
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with suppress(OSError):  # it has exited in the meantime
                if ENGINE in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None

    def resident_bytes(self) -> list[tuple[str, int]]:
        """Command and resident bytes of the API process and of all its descendants."""
        found, processes = [], [str(self.process.pid)]
        while processes:
            folder = Path("/proc") / processes.pop()
            with suppress(OSError):  # it has exited in the meantime
                for children in folder.glob("task/*/children"):
                    processes += children.read_text().split()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((command, int((folder / "statm").read_text().split()[1]) * PAGE))
        return found

    def cpu_seconds(self, process: int | None = None) -> float:
        """Processor time of the API process, or of another."""
        return cpu_seconds(self.process.pid if process is None else process)


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def until(true: Callable[[], bool], seconds: float) -> float | None:
    """Wait until the condition holds; return the seconds waited, or None after the time-out."""
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > seconds:
            return None
        time.sleep(0.01)
    return time.monotonic() - begun


@contextmanager
def serving(model: str, *options: str) -> Iterator[Served]:
    """A server on a free port; it is ready when the block starts."""
    command = [sys.executable, "-m", "bankfull", "serve", model, "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            greeting = ""
            while "to stop it" not in greeting and (line := process.stdout.readline()):
                greeting += line
            found = re.search(r"base_url (http://127\.0\.0\.1:\d+)/v1", greeting)
            if found is None:
                process.kill()
                process.wait()
                log.seek(0)
                raise RuntimeError(f"bankfull serve did not start: {log.read()[-2000:]}")
            yield Served(process, found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
