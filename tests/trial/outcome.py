"""What a run gave, however it was run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Got:
    """What one sample gave."""

    tokens: list[int] | None = None
    """None where a client does not see them."""
    text: str = ""
    finish: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    values: list[float] | None = None
    """Log-probabilities of the tokens, where their ids are not seen."""
    streamed: str | None = None
    """The texts of its pieces, one after the other."""
    error: str | None = None
    calls: list[list[str]] = field(default_factory=list)
    """Names and arguments of tool calls."""


@dataclass
class Outcome:
    """What one request gave: samples, or why it was refused."""

    refused: str = ""
    failed: str = ""
    """Why the whole request ended with an error, where the samples are not seen."""
    samples: list[Got] = field(default_factory=list)
    cached: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    after: bool = False
    """Whether it was submitted after other weights were written."""
    before: list[int] | None = None
    """Tokens of each sample that had come when other weights were written in its midst."""


class Refused(Exception):
    """The whole case: its options do not go together."""
