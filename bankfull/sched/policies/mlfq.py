"""Multi-level feedback queues, as FastServe has them (2305.05920): short jobs first, without knowing which are short.

Queue i has a quantum of `quantum` x 2^i seconds. A sequence is charged the time of every step that serves it. When its
quantum is used up, it moves to the end of the next queue; sequences of higher queues preempt it. A sequence that has
waited for `starvation` seconds returns to the end of the first queue. It is then behind those that are there already
and, because queues are served in the order of joining, before all that come later: with k sequences there and r rows it
waits for at most ceil(k / r) quanta of the first queue, and the end of a step.

Plain MLFQ starts every job in the first queue. Its quantum ends in the middle of a long prefill, and the job is demoted
before it has a single token. Skip-join puts a job into the first queue whose quantum covers its predicted prefill.

Two things are not as in the paper, because a step here holds chunks of prompts beside decodes and its rows decode
together. A prefill takes more than its own time, so a job keeps its queue until its first token. What it does then says
nothing about its answer, and a quantum that covers a short prefill covers few tokens beside other prompts: jobs that
end soon would all give way to new ones shortly before their ends. So the first token begins a turn of its own in the
first queue, several times as long as a mean answer took. Only answers that outlast it are long ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from bankfull.config import SchedConfig
from bankfull.sched.policies.fcfs import FirstCome
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.sequence import Sequence
from bankfull.sched.shares import Holdings
from bankfull.types import Request, StepPlan

SPREAD = 2.0**40
"""Ranks of one queue: more sequences than ever join one."""
MOST_FRUITLESS = 2
"""A sequence that was preempted so often without a new token goes before all queues, and keeps its row, until it has
one. Where memory is short, it would lose what it has computed each time: queues that change their order faster than a
prompt is computed would preempt all sequences in turns, and none would ever get a token."""
DEEPEST = 12
"""The last queue; its sequences stay in it."""
TURN = 3.0
"""Length of an answer's turn, in mean answers: so long that few of those of usual lengths are cut shortly before their
ends, also while prompts slow their steps down. Where answers have a heavy tail, the long ones are still found."""
REMEMBERED = 256
"""Answers that the mean is taken over, the older ones with less weight."""


@dataclass(slots=True, eq=False)
class QueuedJob:
    level: int
    place: int
    """Order of joining the queue."""
    since: float
    """Time at which it was served last, or joined."""
    quantum: float
    """Seconds that it may use before it moves to the next queue."""
    known: int = 0
    """Tokens that it came with."""
    used: float = 0.0
    served: float = 0.0
    """Seconds of the steps that served it; of those after its first token where it has one."""
    answers: bool = False
    """Whether it has its first token."""
    before: int | None = None
    """Its place before all queues; None for a sequence that is in its queue."""


def is_fruitless(sequence: Sequence) -> bool:
    """Whether it keeps its row, before all queues, until it has a token."""
    return sequence.fruitless >= MOST_FRUITLESS and len(sequence.tokens) <= sequence.entered


class Mlfq(FirstCome):
    preemptive = True

    def __init__(self, config: SchedConfig) -> None:
        super().__init__(config)
        self.quantum, self.starvation = config.quantum_ms / 1e3, config.starvation
        self.rows = max(1, config.rows)
        self.promotions = self.demotions = 0
        self._jobs: dict[Sequence, QueuedJob] = {}
        self._places = count()
        self._oldest = -math.inf
        """Lower bound of the times at which sequences below the first queue were served last."""

    def is_batch(self, request: Request) -> bool:
        return request.priority >= BATCH_PRIORITY

    def quantum_of(self, level: int) -> float:
        return self.quantum * (1 << level)

    def _limit(self, level: int) -> float:
        return self.quantum_of(level) if level < DEEPEST else math.inf

    def level_of(self, sequence: Sequence) -> int:
        return self._jobs[sequence].level

    def rank(self, sequence: Sequence, now: float) -> float:
        job = self._jobs.get(sequence)
        if job is None:
            level = self.first_level(sequence)
            job = self._jobs[sequence] = QueuedJob(
                level, next(self._places), now, self._limit(level), len(sequence.tokens)
            )
        if not is_fruitless(sequence):
            job.before = None
        elif job.before is None:  # the first one keeps its place, and so gets its token
            job.before = next(self._places)
        return job.level * SPREAD + job.place if job.before is None else job.before - SPREAD

    def first_level(self, sequence: Sequence) -> int:
        return 0

    def giving_way(self, head: Sequence, running: list[Sequence], beyond: list[Sequence] | None) -> list[Sequence]:
        jobs, level, batch = self._jobs, self._jobs[head].level, head.batch
        below = [s for s in running if (s.batch > batch or (s.batch == batch and jobs[s].level > level))]
        return [s for s in below if not (s.fruitless and is_fruitless(s))]

    def victim(self, needy: Sequence, able: list[Sequence], holdings: Holdings | None) -> Sequence | None:
        return super().victim(needy, able, None)

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> Iterable[Sequence]:
        changed = []
        for seq, job in zip(served, map(self._jobs.get, served), strict=True):
            if job is None:
                continue
            job.used += seconds
            job.served += seconds
            job.since = now
            if job.used >= job.quantum and not self._keeps_queue(seq, job):
                self._move(job, self._level_below(job))
                self.demotions += 1
                changed.append(seq)
            elif (seq.fruitless or job.before is not None) and is_fruitless(seq) == (job.before is None):
                changed.append(seq)
        return changed + (self._promoted(now) if now - self._oldest >= self.starvation else [])

    @property
    def next_promotion(self) -> float:
        """The earliest time at which a sequence may return to the first queue."""
        return self._oldest + self.starvation

    def _keeps_queue(self, sequence: Sequence, job: QueuedJob) -> bool:
        """Whether it stays in its queue although its quantum is used up."""
        return False

    def _level_below(self, job: QueuedJob) -> int:
        """The queue that it moves to: the first one with a longer quantum."""
        level = job.level + 1
        while level < DEEPEST and self.quantum_of(level) <= job.quantum:
            level += 1
        return level

    def stays_above(self, sequence: Sequence, level: int) -> float:
        """Seconds of service for which it is in the queue `level` or one before it: what is left of its quantum, and
        those of all queues from there to this one."""
        job = self._jobs[sequence]
        quantum = min(job.quantum, self.quantum_of(DEEPEST))
        following = self.quantum_of(level + 1) - self.quantum_of(self._level_below(job))
        return quantum - job.used + max(0.0, following)

    def _promoted(self, now: float) -> list[Sequence]:
        """Sequences that have waited too long, the one that has waited longest first."""
        starving, self._oldest = list[Sequence](), now
        for seq, job in self._jobs.items():
            if not job.level:
                continue
            if seq.state is None and seq.parent is None and now - job.since >= self.starvation:
                starving.append(seq)
            else:
                self._oldest = min(self._oldest, job.since)
        starving.sort(key=lambda seq: self._jobs[seq].since)
        for seq in starving:
            self._move(self._jobs[seq], 0)
            self._jobs[seq].since = now
            self.promotions += 1
        return starving

    def _move(self, job: QueuedJob, level: int) -> None:
        job.level, job.place, job.quantum, job.used = level, next(self._places), self._limit(level), 0.0

    def next_turn(self, sequence: Sequence, now: float) -> float:
        """FastServe's estimate: the time until its promotion, or until all jobs before it have used up their quanta
        down to its queue, if that is sooner."""
        own = self._jobs[sequence]
        ahead = 0.0
        for seq, job in self._jobs.items():
            if seq is not sequence and (job.level, job.place) < (own.level, own.place):
                ahead += self.stays_above(seq, own.level)
        promotion = self.starvation - (now - own.since)
        return max(0.0, min(promotion, ahead / self.rows))

    def backlog(self) -> list[float]:
        backlog = [0.0] * (1 + max((job.level for job in self._jobs.values()), default=-1))
        for job in self._jobs.values():
            backlog[job.level] += max(0.0, min(job.quantum, self.quantum_of(DEEPEST)) - job.used)
        return backlog or [0.0]

    def ended(self, sequence: Sequence) -> None:
        self._jobs.pop(sequence, None)


class SkipJoinMlfq(Mlfq):
    predicts = True

    def __init__(self, config: SchedConfig) -> None:
        super().__init__(config)
        self._mean = 0.0
        """Seconds of service from the first token of an answer to its end."""
        self._answers = 0
        self._ended: list[float] = []
        """Answers that have ended since the mean was computed."""

    @property
    def turn(self) -> float:
        """Seconds that an answer may use before it moves down."""
        return max(self.quantum, TURN * self._mean)

    def first_level(self, sequence: Sequence) -> int:
        """The first queue whose quantum covers the predicted prefill."""
        cached = self.facts.cached(sequence)
        seconds = self.facts.prefill(cached, len(sequence.tokens)) or 0.0
        level = 0
        while level < DEEPEST and self.quantum_of(level) < seconds:
            level += 1
        return level

    def _keeps_queue(self, sequence: Sequence, job: QueuedJob) -> bool:
        """While it computes a prompt, unless it is in the first queue, whose waits are bounded by quanta."""
        return job.level > 0 and len(sequence.tokens) <= sequence.entered

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> Iterable[Sequence]:
        changed = [*super().after(plan, served, now, seconds)]
        while self._ended:  # only now: the quanta of this step were given out with the mean before
            self._answers = min(self._answers + 1, REMEMBERED)
            self._mean += (self._ended.pop(0) - self._mean) / self._answers
        for seq, job in zip(served, map(self._jobs.get, served), strict=True):
            if job is not None and not job.answers and len(seq.tokens) > job.known:
                job.answers, job.served = True, 0.0
                self._move(job, 0)
                job.quantum = self.turn
                changed.append(seq)
        return changed

    def ended(self, sequence: Sequence) -> None:
        job = self._jobs.get(sequence)
        if job is not None and job.answers:
            self._ended.append(job.served)
        super().ended(sequence)
