"""What the lines of a batch cost, read from their answers, however their API spells it."""

from __future__ import annotations

import msgspec


class Spent(msgspec.Struct, frozen=True):
    """Tokens."""

    input: int = 0
    cached: int = 0
    """Of the input."""
    output: int = 0
    reasoning: int = 0
    """Of the output."""


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """Chat, completions and embeddings speak of prompts and completions, Responses of input and output."""

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


def spent_in(answer: bytes) -> Spent:
    """Nothing where the answer does not say."""
    try:
        usage = _decoder.decode(answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Spent()
    if usage is None:
        return Spent()
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    written = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return Spent(
        usage.prompt_tokens or usage.input_tokens,
        read.cached_tokens,
        usage.completion_tokens or usage.output_tokens,
        written.reasoning_tokens,
    )
