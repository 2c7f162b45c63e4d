"""An engine in its own process that can be paused."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from bankfull.bench.compare import process_usage
from bankfull.bench.compare.processes import GRACE, ProcessGroup
from benchmarks.cpu_peers.protocol import Prompts

LONGEST_REPLY = 1 << 20


class EngineFailed(Exception):
    """One sentence: which engine, and what happened."""


class EngineProcess:
    def __init__(
        self,
        label: str,
        command: Sequence[str],
        log: Path,
        *,
        timeout: float = 1800.0,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.label, self.name, self._timeout, self._log = label, label, timeout, log
        self.started = time.perf_counter()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._group = ProcessGroup(
                command,
                variables=variables,
                folder=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._process = self._group.process
        self._replies: Queue[bytes] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def load(self, model: str, threads: int) -> float:
        """Load a model; returns seconds."""
        reply = self._ask(op="load", model=model, threads=threads)
        self.name = reply["name"]
        return float(reply["seconds"])

    def work(self, prompts: Prompts, new: int) -> float:
        """Seconds to generate `new` tokens for each prompt."""
        reply = self._ask(op="work", prompts=prompts, new=new)
        if reply["counts"] != [new] * len(prompts):
            raise EngineFailed(f"{self.label} gave {sum(reply['counts'])} tokens instead of {len(prompts)} x {new}")
        return float(reply["seconds"])

    def sleep(self) -> None:
        self._group.sleep()

    def wake(self) -> None:
        self._group.wake()

    def quit(self) -> None:
        """Ask the engine to quit, and kill it after a grace period."""
        self.wake()
        with suppress(OSError, ValueError):
            self._send({"op": "quit"})
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._group.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()

    def family(self) -> list[process_usage.Member]:
        return self._group.family()

    def cpu_seconds(self) -> float:
        return self._group.cpu_seconds()

    def resident_bytes(self) -> int:
        return self._group.resident_bytes()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with suppress(OSError, ValueError):
            while line := stream.readline(LONGEST_REPLY):
                self._replies.put(line)
        self._replies.put(b"")

    def _send(self, message: dict[str, Any]) -> None:
        stream = self._process.stdin
        assert stream is not None
        stream.write(json.dumps(message).encode() + b"\n")
        stream.flush()

    def _ask(self, **message: Any) -> dict[str, Any]:
        try:
            self._send(message)
            line = self._replies.get(timeout=self._timeout)
        except Empty:
            self._group.signal(signal.SIGKILL)  # a late reply would be taken for that of the next request
            raise EngineFailed(f"{self.label} did not reply within {self._timeout:.0f} s") from None
        except OSError:
            line = b""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            code = self._process.poll()
            raise EngineFailed(f"{self.label} exited with code {code} (log: {self._log})")
        try:
            reply = json.loads(line)
            ok = reply["ok"]
        except (ValueError, KeyError, TypeError):
            raise EngineFailed(f"{self.label} sent an invalid reply: {line[:80]!r}") from None
        if not ok:
            raise EngineFailed(f"{self.label}: {reply.get('error')}")
        return dict(reply)
