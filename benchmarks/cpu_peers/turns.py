"""Runs this engine and a peer alternately on the works of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from bankfull.bench.compare.rows import Bandwidth, Row
from bankfull.bench.compare.turns import Noise, in_pairs, turn
from benchmarks.cpu_peers.contenders import Contender
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.works import FreshPrompts, Turn, Work

Say = Callable[[str], None]
MEMORY, IDLE = "resident memory", "idle CPU"
IDLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Around:
    """Read bandwidth around each of our turns: the mean of before and after, and the better of both best values."""

    look: Callable[[], Bandwidth]
    found: list[Bandwidth]

    def __enter__(self) -> None:
        self.found.append(self.look())

    def __exit__(self, *_: object) -> None:
        before, after = self.found[-1], self.look()
        self.found[-1] = Bandwidth((before.kept_up + after.kept_up) / 2, max(before.best, after.best))


@dataclass(slots=True)
class Pair:
    """Our engine and a peer; each is paused outside its turns."""

    ours: Contender
    theirs: Contender
    fresh: FreshPrompts
    noise: Noise = field(default_factory=Noise)

    def turn(self, contender: Contender) -> AbstractContextManager[None]:
        return turn(contender, self.noise)

    def get_ready(self, work: Work) -> None:
        for contender in (self.ours, self.theirs):
            with self.turn(contender):
                contender.get_ready(work, self.fresh)

    def rate(self, contender: Contender, work: Work, prompts: Turn) -> float:
        with self.turn(contender):
            return contender.rate(work, prompts)

    def compare(self, work: Work, pairs: int, say: Say, around: Around | None = None) -> Row:
        """Both get the same prompts, and no prompt is used twice."""
        ours, theirs = list[float](), list[float]()

        def our_rate(prompts: Turn) -> float:
            with around or nullcontext():
                return self.rate(self.ours, work, prompts)

        try:
            self.get_ready(work)
            self.noise = Noise()
            for our, their in in_pairs(
                pairs, lambda: work.turn(self.fresh), our_rate, lambda p: self.rate(self.theirs, work, p)
            ):
                ours.append(our)
                theirs.append(their)
                say(f"{work.name}, pair {len(ours)} of {pairs}: {our:.1f} against {their:.1f} tokens/s")
        except EngineFailed as error:
            return Row(work.name, "tokens/s", problem=str(error))
        return Row(work.name, "tokens/s", tuple(ours), tuple(theirs), others=self.noise.cores)

    def side_rows(self, idle_seconds: float = IDLE_SECONDS) -> Iterable[Row]:
        """Memory after one decoded stream, and idle CPU use of engines that stay loaded."""
        resident, idle = list[float](), list[float | None]()
        try:
            for contender in (self.ours, self.theirs):
                with self.turn(contender):
                    resident.append(contender.resident_bytes(self.fresh) / 2**20)
                    idle.append(contender.idle_percent(idle_seconds))
        except EngineFailed as error:
            return [Row(name, "", problem=str(error)) for name in (MEMORY, IDLE)]
        rows = [Row(MEMORY, "MiB", (resident[0],), (resident[1],), more_is_better=False)]
        our_idle, their_idle = idle
        if our_idle is not None and their_idle is not None:
            rows.append(Row(IDLE, "%", (our_idle,), (their_idle,), more_is_better=False))
        return rows
