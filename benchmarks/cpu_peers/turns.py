"""Two engines in turn: pairs of the same work, each engine first in every other pair, the other one stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.cpu_peers import machine
from benchmarks.cpu_peers.process import EngineFailed, EngineProcess
from benchmarks.cpu_peers.rows import Row
from benchmarks.cpu_peers.works import FreshPrompts, Work

Say = Callable[[str], None]
MEMORY, IDLE = "resident memory", "idle CPU"
IDLE_SECONDS = 5.0


@dataclass(slots=True)
class Noise:
    """CPU time that went elsewhere while engines had their turns."""

    seconds: float = 0.0
    elsewhere: float = 0.0

    @property
    def cores(self) -> float | None:
        return self.elsewhere / self.seconds if self.seconds else None


@dataclass(slots=True)
class Pair:
    """Ours and a peer's process, both loaded; both sleep unless one has its turn."""

    ours: EngineProcess
    theirs: EngineProcess
    fresh: FreshPrompts
    noise: Noise = field(default_factory=Noise)

    @contextmanager
    def turn(self, engine: EngineProcess) -> Iterator[EngineProcess]:
        engine.wake()
        begun, busy, own = time.perf_counter(), machine.busy_seconds(), engine.cpu_seconds()
        try:
            yield engine
        finally:
            seconds = time.perf_counter() - begun
            elsewhere = machine.busy_seconds() - busy - (engine.cpu_seconds() - own)
            engine.sleep()
            self.noise.seconds += seconds
            self.noise.elsewhere += max(0.0, elsewhere)

    def compare(self, work: Work, pairs: int, say: Say) -> Row:
        """Both engines get the same prompts, and neither gets them twice."""
        self.noise = Noise()
        ours, theirs = list[float](), list[float]()
        try:
            for engine in (self.ours, self.theirs):
                with self.turn(engine):
                    work.warm_up(engine, self.fresh)
            for number in range(pairs):
                prompts = work.prompts(self.fresh)
                order = [(self.ours, ours), (self.theirs, theirs)]
                for engine, rates in order if number % 2 == 0 else reversed(order):
                    with self.turn(engine):
                        rates.append(work.rate(engine, prompts))
                say(f"{work.name}, pair {number + 1} of {pairs}: {ours[-1]:.1f} against {theirs[-1]:.1f} tokens/s")
        except EngineFailed as error:
            return Row(work.name, "tokens/s", problem=str(error))
        return Row(work.name, "tokens/s", tuple(ours), tuple(theirs), others=self.noise.cores)

    def side_rows(self, idle_seconds: float = IDLE_SECONDS) -> Iterable[Row]:
        """Memory behind one stream of decoding, and what an engine uses when nobody asks anything."""
        resident, idle = list[float](), list[float]()
        try:
            for engine in (self.ours, self.theirs):
                with self.turn(engine):
                    engine.work(self.fresh.take(1, 32), 32)
                    resident.append(engine.resident_bytes() / 2**20)
                    time.sleep(1.0)  # spinning for a moment behind the work is not idling
                    before = engine.cpu_seconds()
                    time.sleep(idle_seconds)
                    idle.append(100 * (engine.cpu_seconds() - before) / idle_seconds)
        except EngineFailed as error:
            return [Row(name, "", problem=str(error)) for name in (MEMORY, IDLE)]
        return [
            Row(MEMORY, "MiB", (resident[0],), (resident[1],), more_is_better=False),
            Row(IDLE, "%", (idle[0],), (idle[1],), more_is_better=False),
        ]
