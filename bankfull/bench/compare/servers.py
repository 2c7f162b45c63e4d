"""Servers compared: this engine's and its peers' on the same work, alternately, with the ratios of their figures.

A server is an address, or a command that starts it. A started server is paused with SIGSTOP while the other one is
measured, so that it cannot use cores by spinning.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO

from bankfull.bench.compare.processes import ProcessGroup
from bankfull.bench.compare.rows import Comparison, Row, Side
from bankfull.bench.compare.turns import Noise, in_pairs, turn
from bankfull.bench.load.run import LoadRunner, LoadTest
from bankfull.bench.load.server import ServerUnderTest, parse_address
from bankfull.bench.load.workloads import Conversation
from bankfull.bench.report.report import LoadReport
from bankfull.errors import ConfigError

OURS = "bankfull"
START_SECONDS, ADDRESS_SECONDS = 600.0, 10.0
"""Seconds until a server must respond, if started here and if already running."""
LAST_LINES = 300
"""Characters of a server's log shown if it exits during start-up."""
PORT, MODEL = "{port}", "{model}"
KNOWN_PEERS = {
    "llama.cpp": "llama-server -m {model} --host 127.0.0.1 --port {port}",
    "vllm": "vllm serve {model} --host 127.0.0.1 --port {port}",
    "sglang": "sglang serve --model-path {model} --host 127.0.0.1 --port {port}",
}
"""Default peers, compared with if installed."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """A name, and how its server is reached: an address, or a command with {port} and optionally {model}."""

    name: str
    how: str

    @property
    def is_address(self) -> bool:
        return self.how.startswith(("http://", "https://"))


def parse_contender(text: str) -> Contender:
    """Parse "name=http://..." or "name=command ... {port}"."""
    name, equals, how = text.partition("=")
    contender = Contender(name.strip(), how.strip())
    if not equals or not contender.name or not contender.how:
        raise ConfigError(f"{text!r} is not a peer; write name=http://host:port, or name='command --port {PORT}'.")
    if not contender.is_address and PORT not in contender.how:
        raise ConfigError(f"The command of {contender.name} lacks {PORT}; put it where the port belongs.")
    return contender


def ours() -> Contender:
    return Contender(OURS, f"{shlex.quote(sys.executable)} -m bankfull serve {MODEL} --port {PORT} --speculative off")


def installed_peers() -> list[Contender]:
    return [Contender(name, how) for name, how in KNOWN_PEERS.items() if shutil.which(how.split()[0])]


class RunningServer:
    """A running server; one that was started here is stopped at the end of the block."""

    def __init__(self, contender: Contender, model: str, key: str | None, say: Say) -> None:
        self.contender, self.model, self.key, self.say = contender, model, key, say
        self.group: ProcessGroup | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> RunningServer:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.group is not None:
            self.group.end()
        if self._log is not None:
            self._log.close()

    def _start(self) -> None:
        how = self.contender.how
        if self.contender.is_address:
            self.server = ServerUnderTest(parse_address(how), self.key)
            self.server.wait_ready(ADDRESS_SECONDS)
        else:
            port = free_port()
            command = shlex.split(how.replace(PORT, str(port)).replace(MODEL, shlex.quote(self.model)))
            self.say(f"{self.contender.name}: starting {' '.join(command)}")
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed with the block
            try:
                self.group = ProcessGroup(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)
            except OSError as error:
                raise ConfigError(
                    f"{self.contender.name} cannot be started: {command[0]}: {error.strerror or error}."
                ) from None
            self.server = ServerUnderTest(parse_address(f"http://127.0.0.1:{port}"), self.key)
            self._wait(self.group)
        self.server.model  # noqa: B018 cached while the server is awake
        self.runner = LoadRunner(self.server)

    def _wait(self, group: ProcessGroup) -> None:
        for _ in range(round(START_SECONDS)):
            if (code := group.process.poll()) is not None:
                raise ConfigError(f"{self.contender.name} exited with code {code}: {self._said()}")
            try:
                return self.server.wait_ready(1.0)
            except ConfigError:
                continue
        raise ConfigError(f"{self.contender.name} was not ready after {START_SECONDS:g} s: {self._said()}")

    def _said(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return " ".join(self._log.read()[-LAST_LINES:].decode(errors="replace").split()) or "its log is empty"

    # -- turns

    def wake(self) -> None:
        if self.group is not None:
            self.group.wake()

    def sleep(self) -> None:
        if self.group is not None:
            self.group.sleep()

    def cpu_seconds(self) -> float:
        """Includes the client's CPU time, which is part of the work, not noise."""
        return time.process_time() + (0.0 if self.group is None else self.group.cpu_seconds())


@dataclass(frozen=True, slots=True)
class Compared:
    """A compared figure: its name, unit and source, and whether higher is better."""

    name: str
    unit: str
    of: Callable[[LoadReport], float | None]
    more_is_better: bool


def _latency(name: str, statistic: str) -> Callable[[LoadReport], float | None]:
    def of(report: LoadReport) -> float | None:
        latency = report.measured.latencies[name]
        return None if latency is None else 1e3 * getattr(latency, statistic)

    return of


FIGURES = (
    Compared("output tokens/s", "tokens/s", lambda r: r.measured.output_tokens / r.measured.duration, True),
    Compared("requests/s", "requests/s", lambda r: r.measured.request_rate, True),
    Compared("goodput", "requests/s", lambda r: r.measured.goodput, True),
    *(
        Compared(f"{name.upper()} {statistic}", "ms", _latency(name, statistic), False)
        for name in ("ttft", "tpot", "e2e")
        for statistic in ("mean", "p99")
    ),
)


def compare_with(one: RunningServer, contender: Contender, load: LoadTest, pairs: int) -> Comparison:
    """Start a peer and compare it with the running server; an unavailable peer becomes a row with the reason."""
    one.sleep()
    try:
        with RunningServer(contender, one.model, one.key, one.say) as other:
            return compare(one, other, load, pairs, one.say)
    except ConfigError as error:
        return Comparison(contender.name, _side(one), Side(contender.name, one.model), _why(error))
    finally:
        one.wake()


def compare(one: RunningServer, other: RunningServer, load: LoadTest, pairs: int, say: Say) -> Comparison:
    """Both servers get the same requests at the same times, different in each pair. A failure becomes a row with the
    reason."""
    noise = Noise()
    seeds = iter(range(load.seed + 1, load.seed + 1 + pairs))

    def prepare() -> tuple[LoadTest, list[Conversation]]:
        """Generated once for both, because their servers may count tokens differently."""
        one.wake()
        asked = replace(load, seed=next(seeds))
        conversations = one.runner.conversations(asked)
        one.sleep()
        return asked, conversations

    def run(side: RunningServer, work: tuple[LoadTest, list[Conversation]]) -> LoadReport:
        with turn(side, noise):
            return side.runner.run(*work)

    both, sides = list[tuple[LoadReport, LoadReport]](), (_side(one), _side(other))
    for side in (one, other):
        side.sleep()
    try:
        for ours_, theirs in in_pairs(pairs, prepare, lambda work: run(one, work), lambda work: run(other, work)):
            both.append((ours_, theirs))
            rates = [report.measured.output_tokens / report.measured.duration for report in both[-1]]
            say(f"{other.contender.name}, pair {len(both)} of {pairs}: {rates[0]:.1f} against {rates[1]:.1f} tokens/s")
    except ConfigError as error:
        return Comparison(other.contender.name, *sides, _why(error))
    finally:
        for side in (one, other):
            side.wake()
    # The CPU time of a server that was not started here is unknown, so it cannot be told from noise.
    other_cores = noise.cores if one.group is not None and other.group is not None else None
    rows = [_row(figure, both, other_cores) for figure in FIGURES]
    memory = [side.group.resident_bytes() / 2**20 if side.group is not None else None for side in (one, other)]
    if None not in memory:
        rows.append(Row("resident memory", "MiB", (memory[0] or 0.0,), (memory[1] or 0.0,), more_is_better=False))
    return Comparison(other.contender.name, *sides, [row for row in rows if row is not None])


def _side(side: RunningServer) -> Side:
    """The model's name; servers may report the same file differently."""
    given = side.group is not None and MODEL in side.contender.how
    return Side(side.contender.name, Path(side.model).name if given else side.server.model)


def _why(error: ConfigError) -> list[Row]:
    return [Row("everything", "", problem=str(error))]


def _row(figure: Compared, found: Sequence[tuple[LoadReport, LoadReport]], noise: float | None) -> Row | None:
    """None if neither side has the figure."""
    failures = [report.failures() for pair in found for report in pair if report.measured.failed]
    values = [(figure.of(ours_), figure.of(theirs)) for ours_, theirs in found]
    known = [(a, b) for a, b in values if a is not None and b is not None]
    if failures:
        return Row(figure.name, figure.unit, problem=f"requests failed: {failures[0]}")
    if not known:
        return None
    return Row(
        figure.name, figure.unit, tuple(a for a, _ in known), tuple(b for _, b in known), figure.more_is_better, noise
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plain_text(load: LoadTest) -> LoadTest:
    """Tokenizers may differ: the same text is the same work."""
    return replace(load, prompts="text") if load.prompts == "auto" else load
