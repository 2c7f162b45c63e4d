"""Streams of the OpenAI APIs: parses server-sent events with arrival times into token times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

Part = tuple[float, bytes]
"""Arrival time and bytes."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _StreamUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _Problem(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _StreamUsage | None = None
    error: _Problem | str | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class StreamedOutput:
    """A parsed stream."""

    times: list[float]
    """Times of the events that carry tokens; one event may carry several."""
    last: float | None
    """Time of the last event with a choice: the end of the output."""
    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    error: str | None = None


def parse_stream(parts: Sequence[Part]) -> StreamedOutput:
    texts: list[str] = []
    answer = StreamedOutput([], None, "")
    for time, payload in _payloads(parts):
        if payload == b"[DONE]":
            continue
        try:
            chunk = _chunk(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            answer.error = f"an event is not a chunk of a completion ({error})"
            break
        if chunk.error is not None:
            answer.error = chunk.error if isinstance(chunk.error, str) else chunk.error.message or "an error"
            break
        for choice in chunk.choices:
            said, carries = _said(choice)
            if carries:
                answer.times.append(time)
                texts.append(said)
            if carries or choice.finish_reason is not None:
                answer.last = time
            answer.finish = choice.finish_reason or answer.finish
        if chunk.usage is not None:
            answer.input_tokens = chunk.usage.prompt_tokens
            answer.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            answer.cached_tokens = None if details is None else details.cached_tokens
    answer.text = "".join(texts)
    if answer.error is None and answer.finish is None:
        answer.error = "the stream ended before the output was complete"
    return answer


def _said(choice: _Choice) -> tuple[str, bool]:
    """The text of a choice, and whether it carries a token. A completion chunk without text still carries one, such as
    half of a character. The first chunk of a chat only sets the role."""
    if choice.delta is None:
        return choice.text or "", bool(choice.text) or choice.finish_reason is None
    delta = choice.delta
    text = (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")
    return text, bool(text) or bool(delta.tool_calls)


def _payloads(parts: Sequence[Part]) -> Iterator[tuple[float, bytes]]:
    """The data of each event with the time at which its line was complete."""
    rest, time = b"", 0.0
    for time, data in parts:
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield time, line[5:].strip()
    if rest.startswith(b"data:"):
        yield time, rest[5:].strip()


def error_summary(status: int, body: bytes) -> str:
    """A short reason for a rejected request."""
    try:
        problem = _chunk(body).error
        reason = problem if isinstance(problem, str) else problem.message if problem is not None else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        reason = body[:200].decode(errors="replace")
    return f"status {status}: {' '.join(reason.split())[:200]}" if reason else f"status {status}"
