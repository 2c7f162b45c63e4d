"""The speed of an answer, in tokens per second and as a fraction of the machine's limit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from bankfull.cli.answer import FinishedAnswer
from bankfull.cli.terminal import say
from bankfull.limits.meter.step import StepShape
from bankfull.llm import LLM

if TYPE_CHECKING:
    from bankfull.limits.meter.step_limit import StepLimit


class Limit:
    """The shortest time that steps of one model can take on this machine.

    The first call measures the machine if no measurement is stored.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def seconds(self, steps: Sequence[StepShape]) -> float | None:
        """None if the device has too little free memory for a measurement."""
        if self._known is None:
            return None
        costs = (self._known.form.cost(shape) for shape in steps)
        return sum(map(self._known.least, costs))

    @cached_property
    def _known(self) -> StepLimit | None:
        from bankfull.limits.machine.ceilings import of_device
        from bankfull.limits.meter.step_limit import step_limit_on

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            ceilings = of_device(self._llm.loaded.device)
        for warning in caught:
            say(f"bankfull: {warning.message}")
        return None if ceilings is None else step_limit_on(self._llm, ceilings)


def limit_of(llm: LLM, wanted: bool) -> Limit | None:
    """None unless `wanted`."""
    return Limit(llm) if wanted else None


@dataclass(frozen=True, slots=True)
class Speed:
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: float | None
    """Seconds to the first token."""
    total: float | None
    """Seconds to the last token."""
    limit: float | None
    """Least seconds that the machine needs for all tokens after the first."""

    @property
    def decode_seconds(self) -> float | None:
        if self.ttft is None or self.total is None or self.output_tokens < 2 or self.total <= self.ttft:
            return None
        return self.total - self.ttft

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first."""
        return (self.output_tokens - 1) / self.decode_seconds if self.decode_seconds else None

    @property
    def percent(self) -> float | None:
        return 100 * self.limit / self.decode_seconds if self.limit and self.decode_seconds else None

    def line(self) -> str:
        parts = [f"{self.output_tokens} tokens"]
        if self.rate is not None:
            near = "" if self.percent is None else f" ({percentage(self.percent)} of this machine's limit)"
            parts.append(f"{self.rate:.1f} tokens/s{near}")
        if self.ttft is not None:
            parts.append(f"first after {self.ttft:.2f} s")
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        parts.append(f"prompt {self.prompt_tokens} tokens{cached}")
        return "bankfull: " + ", ".join(parts)

    def as_json(self) -> dict[str, float | None]:
        return {
            "time_to_first_token_s": self.ttft,
            "total_s": self.total,
            "decode_tokens_per_s": self.rate,
            "limit_tokens_per_s": (self.output_tokens - 1) / self.limit if self.limit else None,
            "percent_of_limit": self.percent,
        }


def percentage(percent: float) -> str:
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.1f}%"


def speed_of(answer: FinishedAnswer, limit: Limit | None) -> Speed:
    metrics = answer.result.metrics
    bound = limit.seconds(answer.decode_steps) if limit is not None and answer.decode_steps else None
    return Speed(
        len(answer.result.prompt_token_ids),
        metrics.cached_tokens,
        metrics.output_tokens,
        metrics.ttft,
        metrics.finished,
        bound,
    )
