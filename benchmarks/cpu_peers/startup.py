"""Time from process start to the first token."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping

from bankfull.bench.compare.processes import environment
from benchmarks.cpu_peers.process import EngineFailed

PROMPT = "The river"


def seconds_to_first_token(model: str, repetitions: int) -> list[float]:
    """Times of `bankfull run`, imports included. The first process warms the page cache and does not count."""
    return [seconds_once(model, {}) for _ in range(repetitions + 1)][1:]


def seconds_once(model: str, settings: Mapping[str, str]) -> float:
    """`settings`: variables of the process, beside those of this one."""
    greedy = ("--max-tokens", "4", "--ignore-eos", "--temperature", "0")
    command = [sys.executable, "-m", "bankfull", "run", PROMPT, "-m", model, *greedy]
    begun = time.perf_counter()
    with subprocess.Popen(
        [*command, "--no-limit"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment() | dict(settings),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
        said = process.stderr.read().decode(errors="replace").strip()
    if not first or process.returncode:
        raise EngineFailed(f"bankfull run exited with code {process.returncode}: {said[-200:]}")
    return seconds
