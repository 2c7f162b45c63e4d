"""What the server adds to a short prompt's time to first token: python -m benchmarks.serving --help

The same conversations go alternately to an engine in this process and to `bankfull serve`, each after a pause in which
both are idle. The client is Python's `http.client` on one persistent connection. CPU time and wake-ups are kernel
counters of all threads of a process, so they show changes where wall time is too noisy. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from bankfull.errors import BankfullError
from bankfull.limits.statistics import Spread, spread
from bankfull.llm import LLM
from bankfull.sample.params import SamplingParams

READY_SECONDS = 300.0
WARM = 10
"""Warm-up requests of each kind."""
KINDS = ("in-process", "stream", "whole")
TOKENS = {"in-process": 4, "stream": 4, "whole": 1}
"""Output tokens. A response that is not streamed arrives with its last token, so it has one."""
WORDS = "the river carries sand and silt from the hills down to the plain where it turns and slows "


@dataclass(frozen=True)
class Usage:
    """CPU seconds and wake-ups of the threads of a process so far."""

    cpu: float
    wakeups: int
    """Voluntary context switches, which equal the wake-ups."""

    def __sub__(self, before: Usage) -> Usage:
        return Usage(self.cpu - before.cpu, self.wakeups - before.wakeups)


def usage_of(pid: int) -> Usage:
    cpu, wakeups = 0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            cpu += int((task / "schedstat").read_text().split()[0])
            status = (task / "status").read_text()
        except OSError:
            continue  # the thread has just exited
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)
        wakeups += int(found[1]) if found else 0
    return Usage(cpu / 1e9, wakeups)


@dataclass
class Timed:
    """All requests of one kind."""

    first: list[float] = field(default_factory=list)
    """Seconds to the first token."""
    api: list[Usage] = field(default_factory=list)
    engine: list[Usage] = field(default_factory=list)


class Server:
    """`bankfull serve` in its own processes, and one connection to it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, model: str) -> None:
        self.api, self._log, self._model = process.pid, log, model
        self._process = process
        url = self._announced()
        self.engine = int(Path(f"/proc/{self.api}/task/{self.api}/children").read_text().split()[0])
        self._connection = http.client.HTTPConnection(url)

    def _announced(self) -> str:
        ends = time.monotonic() + READY_SECONDS
        while time.monotonic() < ends and self._process.poll() is None:
            if found := re.search(r"http://([\d.]+:\d+)/ready", self._log.read_text()):
                return found[1]
            time.sleep(0.2)
        raise BankfullError(f"The server did not start:\n{self._log.read_text()}")

    def first_token(self, messages: list[dict[str, str]], kind: str) -> float:
        """Seconds until the client has the first token; returns after the whole response."""
        call = {
            "model": self._model,
            "messages": messages,
            "max_tokens": TOKENS[kind],
            "temperature": 0,
            "ignore_eos": True,
            "stream": kind == "stream",
        }
        begun = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", json.dumps(call), {"content-type": "application/json"})
        response = self._connection.getresponse()
        if response.status != 200:
            raise BankfullError(f"The server rejected a request: {response.read().decode(errors='replace')}")
        if kind == "stream":
            response.readline()  # the first event carries the first token
        else:
            response.read()
        seconds = time.perf_counter() - begun
        response.read()
        return seconds

    def sums(self) -> dict[str, float]:
        """Sums and counts of the histograms on /metrics."""
        self._connection.request("GET", "/metrics")
        page = self._connection.getresponse().read().decode()
        found = re.findall(r"^bankfull:(\w+_(?:sum|count))\{[^}]*\} (\S+)$", page, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def logged(self) -> list[float]:
        """Time from arrival to first token of every request so far, from the server's log."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line["ttft"] for line in lines if "ttft" in line]


@contextmanager
def started(command: Sequence[str], model: str) -> Iterator[Server]:
    with TemporaryDirectory(prefix="bankfull-serving-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            yield Server(process, log, model)
        finally:
            process.terminate()
            process.wait(60)


def first_token_here(llm: LLM, messages: list[dict[str, str]]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS["in-process"], ignore_eos=True)
    begun = time.perf_counter()
    answer = llm.stream(llm.loaded.frontend.encode_chat(messages), params)
    next(answer)
    seconds = time.perf_counter() - begun
    for _ in answer:
        pass
    return seconds


def conversation(number: int, words: int) -> list[dict[str, str]]:
    """No two begin alike, so that the prefix cache is never hit."""
    text = (WORDS * (words // len(WORDS.split()) + 1)).split()[:words]
    return [{"role": "user", "content": f"{number} " + " ".join(text)}]


def measure(
    llm: LLM, server: Server, requests: int, words: int, pause: float
) -> tuple[dict[str, Timed], dict[str, float]]:
    timed = {kind: Timed() for kind in KINDS}
    before: dict[str, float] = {}
    logged = 0
    for number in range(WARM + requests):
        if number == WARM:
            time.sleep(0.2)  # the log is written by its own thread
            before, logged = server.sums(), len(server.logged())
        for place, kind in enumerate(KINDS):
            messages = conversation(number * len(KINDS) + place, words)
            time.sleep(pause)
            api, engine = usage_of(server.api), usage_of(server.engine)
            first = first_token_here(llm, messages) if kind == "in-process" else server.first_token(messages, kind)
            time.sleep(pause)  # work after the response counts too
            if number >= WARM:
                timed[kind].first.append(first)
                timed[kind].api.append(usage_of(server.api) - api)
                timed[kind].engine.append(usage_of(server.engine) - engine)
    after = server.sums()
    return timed, stages(timed, before, after, server.logged()[logged:])


def stages(
    timed: dict[str, Timed], before: dict[str, float], after: dict[str, float], logged: list[float]
) -> dict[str, float]:
    """Mean seconds of each stage until the first token, in order."""
    calls = after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"]

    def mean(*names: str) -> float:
        return sum(after[f"{name}_sum"] - before[f"{name}_sum"] for name in names) / calls

    client = fmean(timed["stream"].first + timed["whole"].first)
    arrived = fmean(logged)
    asked = mean("time_to_first_token_seconds")
    engine = mean("request_queue_time_seconds", "request_prefill_time_seconds")
    return {
        "client, HTTP, writing": client - arrived,
        "checks, body, template, tokens": arrived - asked,
        "to the engine and back": asked - engine,
        "in the engine": engine,
    }


def report(timed: dict[str, Timed], parts: dict[str, float]) -> dict[str, Any]:
    first = {kind: spread(timed[kind].first) for kind in KINDS}
    usage = {
        kind: {
            name: {"cpu": median(u.cpu for u in used), "wakeups": median(u.wakeups for u in used)}
            for name, used in (("api", timed[kind].api), ("engine", timed[kind].engine))
        }
        for kind in KINDS[1:]
    }
    more = {kind: first[kind].median - first["in-process"].median for kind in KINDS[1:]}
    return {
        "first": {kind: asdict(found) for kind, found in first.items()},
        "more": more,
        "usage": usage,
        "stages": parts,
    }


def lines(made: dict[str, Any]) -> Iterator[str]:
    yield "time to first token, ms    median (quartiles), least         more than in-process"
    for kind, found in made["first"].items():
        values = Spread(**{name: 1e3 * value for name, value in found.items()})
        more = f"{1e3 * made['more'][kind]:.2f}" if kind in made["more"] else ""
        yield (
            f"  {kind:12}             {values.median:6.2f} ({values.lower:.2f} .. {values.upper:.2f}), "
            f"{values.low:.2f}    {more:>8}"
        )
    yield "cost per request           API process: CPU us, wake-ups      engine process: CPU us, wake-ups"
    for kind, used in made["usage"].items():
        shown = [f"{1e6 * used[name]['cpu']:10.0f}, {used[name]['wakeups']:.0f}" for name in ("api", "engine")]
        yield f"  {kind:12}             {shown[0]:28}       {shown[1]}"
    yield "mean stages until the first token of a served request, ms"
    for name, seconds in made["stages"].items():
        yield f"  {name:32} {1e3 * seconds:6.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").split("\n")[2])
    parser.add_argument("--model", default="smollm2", help="as for `bankfull serve`; it needs a chat template")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory", default="1GiB", help="memory for the KV cache of each of the two engines")
    parser.add_argument("--requests", type=int, default=100, help="measured requests of each kind")
    parser.add_argument("--words", type=int, default=20, help="words of a prompt")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds before and after each request")
    parser.add_argument(
        "--bankfull",
        default=str(Path(sys.executable).parent / "bankfull"),
        help="command to start, for example of another build",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    asked = parser.parse_args(arguments)
    options = ["--device", asked.device, "--memory", asked.memory]
    command = [asked.bankfull, "serve", asked.model, *options, "--port", "0", "--log-json", "--speculative", "off"]
    try:
        with started(command, asked.model) as server:
            llm = LLM(asked.model, device=asked.device, memory=asked.memory, speculative="off")
            timed, parts = measure(llm, server, asked.requests, asked.words, asked.pause)
    except BankfullError as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 2
    made = report(timed, parts)
    if asked.json:
        asked.json.write_text(json.dumps({"cpus": os.cpu_count(), "requests": asked.requests, **made}, indent=1))
    print("\n".join(lines(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
