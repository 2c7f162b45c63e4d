"""The token usage of batch lines, read from the responses of any API."""

from __future__ import annotations

import msgspec


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts of one response."""

    input: int = 0
    cached: int = 0
    """Input tokens found in the prefix cache."""
    output: int = 0
    reasoning: int = 0
    """Output tokens spent on reasoning."""


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """The `usage` object of a response. Chat, completions and embeddings use prompt and completion tokens; Responses
    uses input and output tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


def usage_of(answer: bytes) -> TokenUsage:
    """The token counts of a response, zero if it has none."""
    try:
        usage = _decoder.decode(answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return TokenUsage()
    if usage is None:
        return TokenUsage()
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    written = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return TokenUsage(
        usage.prompt_tokens or usage.input_tokens,
        read.cached_tokens,
        usage.completion_tokens or usage.output_tokens,
        written.reasoning_tokens,
    )
