"""A program with all its helpers, as one: started, stopped for a while, woken, ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bankfull import SET_HERE
from bankfull.bench.load import machine

GRACE = 10.0


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of programs that are measured: that of this program without what it set for itself, and with `variables`."""
    given = {name: value for name, value in os.environ.items() if SET_HERE.get(name) != value}
    return {**given, **(variables or {})}


class ProcessGroup:
    """`streams`: what stdin, stdout and stderr are, as for subprocess.Popen."""

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
        """Stop all its threads, also those that spin while they wait."""
        self.signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)

    def end(self) -> None:
        """Ask; then insist."""
        self.wake()
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def family(self) -> list[machine.Member]:
        """Its process and all helpers of it."""
        return machine.family(self._group)

    def cpu_seconds(self) -> float:
        return machine.cpu_seconds(self.family())

    def resident_bytes(self) -> int:
        return machine.resident_bytes(self.family())

    def signal(self, number: int) -> None:
        """To the whole group at once; then to helpers that started a group of their own."""
        apart = [member.id for member in self.family() if member.group != self._group]
        with suppress(ProcessLookupError):
            os.killpg(self._group, number)
        for helper in apart:
            with suppress(ProcessLookupError):
                os.kill(helper, number)
