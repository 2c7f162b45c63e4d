"""A program and its child processes as a unit: started, paused, resumed, ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bankfull import SET_HERE
from bankfull.bench.compare import process_usage

GRACE = 10.0


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of measured programs: this one's without the variables it set itself, plus `variables`."""
    given = {name: value for name, value in os.environ.items() if SET_HERE.get(name) != value}
    return {**given, **(variables or {})}


class ProcessGroup:
    """`streams`: stdin, stdout and stderr as for subprocess.Popen."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
        **streams: Any,
    ) -> None:
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment(variables), start_new_session=True, **streams
        )
        self._group = self.process.pid

    def sleep(self) -> None:
        """Pause all threads with SIGSTOP, including those that spin while waiting."""
        self.signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGTERM, then SIGKILL after a grace period."""
        self.wake()
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def family(self) -> list[process_usage.Member]:
        """The process and all its descendants."""
        return process_usage.family(self._group)

    def cpu_seconds(self) -> float:
        return process_usage.cpu_seconds(self.family())

    def resident_bytes(self) -> int:
        return process_usage.resident_bytes(self.family())

    def signal(self, number: int) -> None:
        """Signal the whole group at once, then descendants in groups of their own."""
        apart = [member.id for member in self.family() if member.group != self._group]
        with suppress(ProcessLookupError):
            os.killpg(self._group, number)
        for helper in apart:
            with suppress(ProcessLookupError):
                os.kill(helper, number)
