"""The time of a step as a sum of four terms, stated or fitted to the steps of an engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from bankfull.errors import ConfigError
from bankfull.types import Work


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step."""

    rows: int
    """Sequences that decode."""
    context: int
    """Tokens of the sequences that decode."""
    prompt: int
    """Prompt tokens."""
    seconds: float
    begun: float = 0.0
    """Seconds from the beginning of the run."""

    @property
    def ended(self) -> float:
        return self.begun + self.seconds

    @staticmethod
    def of(work: Sequence[Work], seconds: float, begun: float) -> StepRecord:
        return StepRecord(*shape_of(work), seconds, begun)


def shape_of(work: Sequence[Work]) -> tuple[int, int, int]:
    """Decoding sequences, their tokens, and prompt tokens."""
    rows = context = prompt = 0
    for one in work:
        if one.count == 1:
            rows += 1
            context += one.start + 1
        else:
            prompt += one.count
    return rows, context, prompt


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step, of each sequence that decodes, of each of its tokens, and of each prompt token."""

    step: float = 8e-3
    row: float = 2e-5
    context: float = 1e-8
    prompt: float = 3e-5

    def __post_init__(self) -> None:
        if not (self.step > 0 and min(asdict(self).values()) >= 0 and max(asdict(self).values()) < float("inf")):
            raise ConfigError(f"{self} is no time of a step: the first term must be above 0, the others 0 or more.")

    def seconds(self, rows: int, context: int, prompt: int) -> float:
        return self.step + self.row * rows + self.context * context + self.prompt * prompt

    def of(self, work: Sequence[Work]) -> float:
        return self.seconds(*shape_of(work))

    def prefill(self, start: int, end: int) -> float:
        """Seconds of a prompt's tokens, beside the step that they are part of."""
        return self.prompt * (end - start)

    def alone(self, prompt: int, output: int) -> float:
        """Seconds of a job on an idle engine, whose prompt runs in one step."""
        decodes = output - 1
        context = decodes * prompt + decodes * (decodes + 1) // 2
        return self.seconds(0, 0, prompt) + decodes * (self.step + self.row) + self.context * context

    @staticmethod
    def parse(text: str) -> StepModel:
        """A model from `step=8ms,row=20us,context=10ns,prompt=30us`; terms that are left out keep their defaults."""
        terms: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(step|row|context|prompt)\s*=\s*([0-9]*\.?[0-9]+)\s*(s|ms|us|ns)\s*", part)
            if match is None or match[1] in terms:
                raise ConfigError(
                    f"--step-times {text[:80]!r} cannot be read at {part.strip()[:40]!r}; give each term once with a "
                    "unit, such as step=8ms,row=20us,context=10ns,prompt=30us."
                )
            terms[match[1]] = float(match[2]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[match[3]]
        return replace(StepModel(), **terms)

    def __str__(self) -> str:
        return (
            f"{1e3 * self.step:.3g} ms a step, {1e6 * self.row:.3g} us a row, {1e9 * self.context:.3g} ns a token of "
            f"context, {1e6 * self.prompt:.3g} us a prompt token"
        )


def fit(records: Sequence[StepRecord]) -> StepModel:
    """The model with the least squared error on measured steps, so that the sum of their times is met; no term is
    negative."""
    if not records:
        raise ConfigError("No step was recorded, so no step time can be fitted; run at least one job.")
    shapes = np.array([(1, one.rows, one.context, one.prompt) for one in records], np.float64)
    seconds = np.array([one.seconds for one in records])
    terms = [0, 1, 2, 3]
    while True:
        scale = np.abs(shapes[:, terms]).max(0)
        scale[scale == 0] = 1.0
        coefficients = np.linalg.lstsq(shapes[:, terms] / scale, seconds, rcond=None)[0] / scale
        negative = [term for term, value in zip(terms, coefficients, strict=True) if value < 0 and term]
        if not negative:
            break
        terms = [term for term in terms if term not in negative]
    values = np.zeros(4)
    values[terms] = coefficients
    return StepModel(max(float(values[0]), 1e-9), *values[1:].tolist())
