"""How soon a model speaks, and what its processes take, on this CPU: python -m benchmarks.start -m smollm2

Seconds are from process start to the first byte of `bankfull run`: without prepared weights (and while they are
written), with them, and as a fork of the warm process. Memory is that of processes with one `LLM` each: resident, and
together with shared memory counted once (the sum of PSS). Last, the decoding speed of a process whose weights are
mapped, divided by that of one which has laid them out in memory of its own, in alternating runs. The cache directory is
a new one, and is removed. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bankfull.weights.store import VARIABLE, prepared_dir
from benchmarks.cpu_peers.startup import seconds_once

PROCESSES = 4
TOKENS = 96
CHILD = """
import sys, time
from bankfull.torch_parts import leave_out
leave_out()  # as an engine's process does
from bankfull import LLM, SamplingParams
llm = LLM(sys.argv[1], memory="64MiB", speculative="off")
for line in sys.stdin:
    rows, tokens = map(int, line.split())
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    begun = time.perf_counter()
    llm.generate(["The river is"] * rows, params)
    print(rows * tokens / (time.perf_counter() - begun), flush=True)
"""


class Child:
    """A process with a model."""

    def __init__(self, model: str, kept: bool) -> None:
        told = {} if kept else {VARIABLE: "off"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | told,
            text=True,
        )
        self.speed(1, 8)

    def speed(self, rows: int, tokens: int = TOKENS) -> float:
        """Tokens per second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{rows} {tokens}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def memory(self, kind: str) -> int:
        for line in Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) << 10
        raise ValueError(f"the system does not tell {kind}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def warm() -> Iterator[None]:
    command = [sys.executable, "-m", "bankfull", "warm"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run([*command, "--stop"], check=True, stdout=subprocess.DEVNULL)


def starts(model: str, count: int) -> dict[str, list[float]]:
    """Seconds to the first byte, by kind of start."""
    seconds_once(model, {VARIABLE: "off"})  # reads the files from disk
    found = {"nothing prepared": [seconds_once(model, {VARIABLE: "off"}) for _ in range(count)]}
    first = seconds_once(model, {})
    found["the first, which prepares"] = [first]
    if not list(prepared_dir().glob("*.json")):
        raise SystemExit(f"{model} has no weights that are kept prepared; choose a model of more than 16 MiB.")
    time.sleep(3.0)  # large pages are made of what was written, when it is first read
    seconds_once(model, {})
    found["weights prepared"] = [seconds_once(model, {}) for _ in range(count)]
    with warm():
        found["weights prepared, a fork of the warm process"] = [seconds_once(model, {}) for _ in range(count)]
    return found


def memory(model: str) -> dict[str, list[int]]:
    """Bytes of 1 to 4 processes."""
    found: dict[str, list[int]] = {}
    for kept, name in ((False, "weights of its own"), (True, "weights mapped")):
        children: list[Child] = []
        found[name] = []
        for _ in range(PROCESSES):
            children.append(Child(model, kept))
            found[name].append(sum(child.memory("Pss") for child in children))
        found[f"{name}, one process resident"] = [children[0].memory("Rss")]
        for child in children:
            child.end()
    return found


def ratios(model: str, rounds: int) -> dict[str, list[float]]:
    """Speeds with mapped weights, each divided by that of the same round without, by rows."""
    children = {kept: Child(model, kept) for kept in (False, True)}
    found = {}
    for rows in (1, 8):
        quotients = []
        for number in range(rounds + 1):
            speeds = {kept: children[kept].speed(rows) for kept in ((False, True) if number % 2 else (True, False))}
            quotients.append(speeds[True] / speeds[False])
        found[f"{rows} rows"] = quotients[1:]
    for child in children.values():
        child.end()
    return found


def shown(values: Sequence[float], digits: int = 2) -> str:
    if len(values) < 4:
        return f"{statistics.median(values):.{digits}f}"
    first, middle, third = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({first:.{digits}f} to {third:.{digits}f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--starts", type=int, default=7, help="starts of each kind")
    parser.add_argument("--rounds", type=int, default=12, help="alternating rounds of decoding")
    parser.add_argument("--parts", default="starts,memory,speed", help="which of these to measure")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    parts = asked.parts.split(",")
    with tempfile.TemporaryDirectory(prefix="bankfull-start-") as folder:
        os.environ |= {"BANKFULL_CACHE": folder, "XDG_RUNTIME_DIR": folder}
        if "starts" not in parts:  # the weights have to be there
            seconds_once(asked.model, {})
            seconds_once(asked.model, {})
        found = {
            "seconds": starts(asked.model, asked.starts) if "starts" in parts else {},
            "bytes": memory(asked.model) if "memory" in parts else {},
            "speed": ratios(asked.model, asked.rounds) if "speed" in parts else {},
        }
    if asked.json:
        print(json.dumps({"model": asked.model, **found}))
        return
    for name, values in found["seconds"].items():
        print(f"{name}: {shown(values)} s")
    for name, values in found["bytes"].items():
        print(f"{name}: {', '.join(f'{value / 2**20:.0f}' for value in values)} MiB")
    for name, values in found["speed"].items():
        print(f"speed with mapped weights, {name}: {shown(values, 3)} of that with its own")


if __name__ == "__main__":
    main()
