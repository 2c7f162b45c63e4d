"""The traffic that policies are compared on: outputs with a heavy tail, and arrivals in bursts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bankfull.errors import ConfigError
from bankfull.traffic.arrivals import Arrivals, check_count

DIGITS = 3
"""Tokens of a prompt that tell its job from others."""


@dataclass(frozen=True, slots=True)
class TrafficJob:
    """One request. Its length is known to the oracle only."""

    number: int
    time: float
    prompt: int
    output: int
    group: int
    """Jobs of one group share the first tokens of their prompts."""
    tenant: str


@dataclass(frozen=True, slots=True)
class JobTraffic:
    """Outputs are `shortest` times a Pareto variable, at most `longest`; prompts are uniform."""

    jobs: int = 10_000
    seed: int = 0
    tail: float = 1.5
    """Exponent of the Pareto distribution; the mean is finite above 1."""
    shortest: int = 16
    longest: int = 2048
    prompts: tuple[int, int] = (48, 256)
    shared: int = 32
    """Tokens that the prompts of a group share."""
    groups: int = 8
    keys: int = 1
    """API keys; the first one sends half of the jobs."""
    burstiness: float = 0.5
    """Shape of the gamma distribution of gaps: below 1 is bursty, 1 is Poisson."""

    def __post_init__(self) -> None:
        check_count(self.jobs)
        if not 0 < self.tail < float("inf"):
            raise ConfigError(f"tail={self.tail} must be a number above 0.")
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(
                f"Outputs of {self.shortest} to {self.longest} tokens cannot be; give 1 or more, in order."
            )
        low, high = self.prompts
        if not self.shared + DIGITS < low <= high:
            raise ConfigError(
                f"Prompts of {low}-{high} tokens cannot share {self.shared}; give at least {self.shared + DIGITS + 1}."
            )
        if self.groups < 1 or self.keys < 1:
            raise ConfigError(f"{self.groups} groups and {self.keys} keys must be at least 1.")
        Arrivals(1.0, "gamma", self.burstiness)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompts[1] + self.longest

    def draw(self, rate: float) -> list[TrafficJob]:
        """The jobs, arriving at `rate` per second; infinite: all at once. Lengths do not depend on the rate."""
        random = Random(f"jobs/{self.seed}")
        times = Arrivals(rate, "gamma", self.burstiness).offsets(self.jobs, self.seed)
        jobs = []
        for number, time in enumerate(times):
            prompt = random.randint(*self.prompts)
            output = min(self.longest, int(self.shortest * random.paretovariate(self.tail)))
            key = 0 if random.random() < 0.5 else random.randrange(self.keys)
            jobs.append(TrafficJob(number, time, prompt, output, random.randrange(self.groups), f"key-{key}"))
        return jobs

    def tokens(self, job: TrafficJob, vocab: int) -> tuple[int, ...]:
        """The prompt of a job, of token ids below `vocab`: the group's prefix, the job's number, and filling."""
        base = max(2, min(vocab, 1000))
        digits = tuple(job.number // base**place % base for place in range(DIGITS))
        return (job.group % vocab,) * self.shared + digits + (1,) * (job.prompt - self.shared - DIGITS)

    def __str__(self) -> str:
        return (
            f"{self.jobs} jobs, prompts {self.prompts[0]}-{self.prompts[1]}, outputs {self.shortest} x "
            f"Pareto({self.tail:g}) up to {self.longest}, gamma({self.burstiness:g}) arrivals, seed {self.seed}"
        )
