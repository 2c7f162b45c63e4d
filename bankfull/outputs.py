"""Results of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bankfull.types import StepDrafts


class Logprob(NamedTuple):
    """A log-probability of the model's own distribution, before penalties, temperature and truncation."""

    logprob: float
    token: str
    """The token's text."""


@dataclass(slots=True)
class Metrics:
    """Times of a request: seconds since its arrival."""

    arrival: float = 0.0
    """Wall-clock time of arrival."""
    queue: float | None = None
    """Seconds until the request first got a row."""
    ttft: float | None = None
    """Seconds until its first token, queueing included."""
    finished: float | None = None
    cached_tokens: int = 0
    """Prompt tokens whose state was found in the prefix cache."""
    output_tokens: int = 0
    blocked: float = 0.0
    """Seconds that it waited behind other requests: for its first row, and after preemptions (`sched.blocked`)."""

    @property
    def per_token(self) -> float | None:
        """Mean time between tokens after the first."""
        if self.finished is None or self.ttft is None or self.output_tokens < 2:
            return None
        return (self.finished - self.ttft) / (self.output_tokens - 1)


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """stop, length, abort or error."""
    stop_reason: int | str | None = None
    """The stop string, or the token of stop_token_ids, that ended it; None for the model's own end of text."""
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    request_id: Any
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(slots=True)
class Delta:
    """The tokens and the text that one step added to one sample of a request: the unit of streaming, which the engine
    process sends to the API as it is."""

    request_id: Any
    index: int
    """The number of the sample, from 0."""
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """Log-probabilities at the position of each token, by token id; the chosen token is the first."""
    finish_reason: str | None = None
    """stop, length, abort or error; None while the sample goes on."""
    stop_reason: int | str | None = None
    """The stop string, or the token of stop_token_ids, that ended the sample."""
    error: str | None = None
    drafts: StepDrafts | None = None
    """The step's draft tokens, if the request has `include_drafts`."""


@dataclass(slots=True)
class EmbeddingOutput:
    request_id: Any
    prompt_token_ids: list[int]
    embedding: list[float]
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(slots=True)
class ScoreOutput:
    """Log-probabilities of a text: one per token after the first."""

    prompt_token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def perplexity(self) -> float:
        from math import exp

        return exp(-self.total / max(1, len(self.logprobs)))
