"""Ours and a peer's process on the works of a comparison, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from bankfull.limits.load.rows import Bandwidth, Row
from bankfull.limits.load.turns import Noise, in_pairs, turn
from benchmarks.cpu_peers.process import EngineFailed, EngineProcess
from benchmarks.cpu_peers.protocol import Prompts
from benchmarks.cpu_peers.works import FreshPrompts, Work

Say = Callable[[str], None]
MEMORY, IDLE = "resident memory", "idle CPU"
IDLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Around:
    """What reading reaches around each of our turns: the mean of before and after, and the better moment of both."""

    look: Callable[[], Bandwidth]
    found: list[Bandwidth]

    def __enter__(self) -> None:
        self.found.append(self.look())

    def __exit__(self, *_: object) -> None:
        before, after = self.found[-1], self.look()
        self.found[-1] = Bandwidth((before.kept_up + after.kept_up) / 2, max(before.best, after.best))


@dataclass(slots=True)
class Pair:
    """Ours and a peer's process, both loaded; both sleep unless one has its turn."""

    ours: EngineProcess
    theirs: EngineProcess
    fresh: FreshPrompts
    noise: Noise = field(default_factory=Noise)

    def turn(self, engine: EngineProcess) -> AbstractContextManager[None]:
        return turn(engine, self.noise)

    def compare(self, work: Work, pairs: int, say: Say, around: Around | None = None) -> Row:
        """Both engines get the same prompts, and neither gets them twice."""
        self.noise = Noise()
        ours, theirs = list[float](), list[float]()

        def rate(engine: EngineProcess, prompts: tuple[Prompts, Prompts]) -> float:
            with self.turn(engine):
                return work.rate(engine, prompts)

        def our_rate(prompts: tuple[Prompts, Prompts]) -> float:
            with around or nullcontext():
                return rate(self.ours, prompts)

        try:
            for engine in (self.ours, self.theirs):
                with self.turn(engine):
                    work.warm_up(engine, self.fresh)
            for our, their in in_pairs(
                pairs, lambda: work.prompts(self.fresh), our_rate, lambda p: rate(self.theirs, p)
            ):
                ours.append(our)
                theirs.append(their)
                say(f"{work.name}, pair {len(ours)} of {pairs}: {our:.1f} against {their:.1f} tokens/s")
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
