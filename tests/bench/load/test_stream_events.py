"""From bytes with arrival times to tokens with arrival times."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bankfull.bench.load.events import error_summary, parse_stream


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


STREAM = b"".join(
    [
        b": keep-alive\n\n",
        event(choices=[{"index": 0, "text": "Ri", "finish_reason": None}]),
        event(choices=[{"index": 0, "text": "", "finish_reason": None}]),
        event(choices=[{"index": 0, "text": "vers é", "finish_reason": "length"}]),
        event(
            choices=[],
            usage={"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
        ),
        b"data: [DONE]\n\n",
    ]
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_however_a_stream_is_cut_it_says_the_same_and_each_token_came_when_its_event_was_whole(cuts: list[int]) -> None:
    places = sorted({0, len(STREAM), *cuts})
    parts = [(float(stop), STREAM[start:stop]) for start, stop in pairwise(places)]
    answer = parse_stream(parts)
    assert answer.text == "Rivers é" and answer.error is None and answer.finish == "length"
    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (5, 3, 4)
    ends = [at + 1 for at in range(len(STREAM)) if STREAM[at : at + 1] == b"\n"]
    whole = [ends[2], ends[4], ends[6]]  # the line of each event with a token
    assert answer.times == [float(min(place for place in places if place >= end)) for end in whole]
    assert answer.last == answer.times[-1]


def test_a_role_is_no_token_but_reasoning_and_calls_are() -> None:
    chunks = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "so"},
        {"tool_calls": [{"index": 0}]},
        {},
    ]
    parts = [(float(n), event(choices=[{"index": 0, "delta": delta}])) for n, delta in enumerate(chunks)]
    parts.append((9.0, event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])))
    answer = parse_stream(parts)
    assert answer.times == [1.0, 2.0, 3.0] and answer.text == "hmso" and answer.last == 9.0


def test_lines_may_end_as_on_windows_and_the_last_need_not_end() -> None:
    crlf = event(choices=[{"index": 0, "text": "a", "finish_reason": None}]).replace(b"\n", b"\r\n")
    last = event(choices=[{"index": 0, "text": "b", "finish_reason": "stop"}]).rstrip()
    assert parse_stream([(1.0, crlf), (2.0, last)]).text == "ab"


def test_a_stream_without_an_end_or_with_an_error_is_a_failure() -> None:
    begun = event(choices=[{"index": 0, "text": "a", "finish_reason": None}])
    assert "ended before" in str(parse_stream([(1.0, begun)]).error)
    assert parse_stream([(1.0, begun + event(error={"message": "broke"}))]).error == "broke"
    assert parse_stream([(1.0, event(error="broke"))]).error == "broke"
    assert "not a chunk" in str(parse_stream([(1.0, b"data: {]\n")]).error)
    assert parse_stream([]).error is not None


def test_rejections_have_a_short_reason() -> None:
    assert error_summary(400, b'{"error": {"message": "too\\n long"}}') == "status 400: too long"
    assert error_summary(502, b"<html>bad</html>") == "status 502: <html>bad</html>"
    assert error_summary(404, b"{}") == "status 404"
    assert len(error_summary(500, b"x" * 10_000)) < 250
