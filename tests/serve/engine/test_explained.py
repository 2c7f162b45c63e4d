"""The account of a request's time, asked for in a call and told in its answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from bankfull.limits.explain.explain import Explanation
from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.wire import RequestDone
from bankfull.submit import Submit
from tests.serve.engine_kit import ENDLESS, PROMPT, collect, idle, service, until
from tests.serve.scripted import Scripted
from tests.serve.server import shared

ACCOUNT = {"seconds": 0.5, "summary": "Nothing was slow."}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def post(path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(shared(Scripted(["a", "b"])) + path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def lines_of(path: str, body: dict[str, Any]) -> list[str]:
    with httpx.stream("POST", shared(Scripted(["a", "b"])) + path, json={**body, "stream": True}) as answer:
        return [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]


def streamed(path: str, **body: Any) -> list[dict[str, Any]]:
    lines = lines_of(path, body)
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def events(path: str, **body: Any) -> list[dict[str, Any]]:
    """Of the APIs whose events have types."""
    return [json.loads(line) for line in lines_of(path, body)]


def test_an_answer_has_the_account_only_when_it_is_asked_for() -> None:
    assert post("/v1/chat/completions", **CHAT, explain=True)["explain"] == ACCOUNT
    assert "explain" not in post("/v1/chat/completions", **CHAT)
    assert post("/v1/completions", prompt=["p", "q"], explain=True)["explain"] == [ACCOUNT, ACCOUNT]
    assert "explain" not in post("/v1/completions", prompt="p", explain=False)


OTHERS = [
    ("/v1/responses", {"input": "Hello"}, "response.completed", "response"),
    ("/v1/messages", {**CHAT, "max_tokens": 9}, "message_delta", None),
]


@pytest.mark.parametrize(("path", "body", "name", "inside"), OTHERS, ids=["responses", "messages"])
def test_the_other_apis_tell_it_too(path: str, body: dict[str, Any], name: str, inside: str | None) -> None:
    assert post(path, **body, explain=True)["explain"] == ACCOUNT
    assert "explain" not in post(path, **body, explain=False)
    for wanted in (True, False):
        found = events(path, **body, explain=wanted)
        assert not any('"explain"' in json.dumps(event) for event in found if event["type"] != name)
        (told,) = (event if inside is None else event[inside] for event in found if event["type"] == name)
        assert told.get("explain") == (ACCOUNT if wanted else None) and ("explain" in told) == wanted
    refused = httpx.post(shared(Scripted(["a", "b"])) + path, json={**body, "explain": "please"})
    assert refused.status_code == 400 and "explain" in refused.json()["error"]["message"]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_ends_with_the_account(usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    for path, body, told in (
        ("/v1/chat/completions", CHAT, ACCOUNT),
        ("/v1/completions", {"prompt": ["p", "q"]}, [ACCOUNT, ACCOUNT]),
    ):
        *chunks, last = streamed(path, **body, **options, explain=True)
        assert last["explain"] == told and last["choices"] == [] and (last.get("usage") is not None) == usage
        assert not any("explain" in chunk for chunk in chunks)


def test_the_engine_tells_where_the_time_went() -> None:
    """One of three that run side by side; a second one that is left early, and the one after it."""
    few = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    async def ask(link: Link) -> list[list[Delta | RequestDone]]:
        wanted = [collect(link, [number, *PROMPT], few, explain=number == 1) for number in range(3)]
        return await asyncio.gather(*wanted)

    async def leave(link: Link) -> None:
        steps = link.generate(Submit(PROMPT, ENDLESS, explain=True))
        await anext(steps)
        await steps.aclose()  # type: ignore[attr-defined]
        await until(lambda: idle(link))

    with service() as made:
        done = [items[-1] for items in made.run(ask)]
        made.run(leave)
        again = made.run(lambda link: collect(link, [9, *PROMPT], few, explain=True))[-1]
    assert all(isinstance(item, RequestDone) for item in done)
    assert [item.account is not None for item in done if isinstance(item, RequestDone)] == [False, True, False]
    for item in (done[1], again):
        assert isinstance(item, RequestDone)
        told = msgspec.convert(item.account, Explanation)
        assert told.seconds == pytest.approx(item.seconds)
        assert sum(part.seconds for part in told.parts) == pytest.approx(item.seconds)
        assert {part.part: part.tokens for part in told.parts if part.steps} == {"prefill": 21, "decode": 11}
        assert told.summary
