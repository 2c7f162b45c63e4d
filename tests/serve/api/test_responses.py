"""/v1/responses over a real socket, with OpenAI's own client; every event is checked against the client's types."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from bankfull.outputs import Delta
from bankfull.serve.app import create_app
from bankfull.serve.engine.backend import Busy, EngineDied
from bankfull.serve.engine.wire import RequestDone
from bankfull.submit import Submit
from tests.serve.scripted import TEMPLATE, Scripted, cut, scripted_texts, scripted_tokenizer, settings
from tests.serve.server import served, shared

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": None,
    "strict": None,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TRANSCRIPTS = [
    "",
    "Water boils.",
    "<think>It is hot.</think>\n\nYes, 100 °C \U0001f30a.",
    CALL,
    f"Let me see.\n{CALL}\n{CALL}",
    f"<think>Weather?</think>{CALL}",
    "a <tool_call not a call",
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@lru_cache
def client_at(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


@contextmanager
def client_of(backend: Scripted, template: str | None = TEMPLATE, **changes: Any) -> Iterator[openai.OpenAI]:
    if template == TEMPLATE and not changes:
        yield client_at(shared(backend))
        return
    app = create_app(backend, scripted_texts(template), settings(**changes))
    with served(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def raw_events(client: openai.OpenAI, **body: Any) -> list[dict[str, Any]]:
    """Every event as it stands in the stream, checked against the client's own types."""
    url = str(client.base_url) + "responses"
    with httpx.stream("POST", url, json={"model": "tiny", "input": "Hello", "stream": True, **body}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    assert lines[2::3] == [""] * (len(lines) // 3), "each event is its name, its data and an empty line"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::3]]
    assert [line.removeprefix("event: ") for line in lines[::3]] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


def without(event: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("sequence_number", *names)}


def anonymous(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from call to call."""
    output = [without(item, "id", "call_id") for item in response["output"]]
    return {**without(response, "id", "created_at", "completed_at"), "output": output}


def test_a_whole_answer() -> None:
    with client_of(Scripted(["The ", "river"], cached=3)) as client:
        answer = client.responses.create(
            model="tiny", input="Hello", instructions="Be brief.", metadata={"a": "b"}, user="me", temperature=0.5
        )
    assert answer.output_text == "The river" and answer.status == "completed" and answer.error is None
    assert answer.id.startswith("resp_") and answer.model == "tiny" and answer.object == "response"
    assert (answer.instructions, answer.metadata, answer.user) == ("Be brief.", {"a": "b"}, "me")
    assert (answer.temperature, answer.top_p, answer.truncation, answer.tool_choice) == (0.5, 1.0, "disabled", "auto")
    assert answer.usage is not None and answer.usage.output_tokens == 9
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + 9
    Response.model_validate(answer.model_dump())


def test_the_events_of_a_text_one_by_one() -> None:
    with client_of(Scripted(["The ", "river"], cached=2)) as client:
        events = raw_events(client)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, running, added, part, first, second, done, part_done, item_done, completed = events
    assert created["response"] == running["response"]
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    item = added["item"]["id"]
    assert added["item"] == {"type": "message", "id": item, "status": "in_progress", "role": "assistant", "content": []}
    place = {"item_id": item, "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert without(part, "type") == {**place, "part": empty}
    assert without(first, "type") == {**place, "delta": "The", "logprobs": []}
    assert without(second, "type") == {**place, "delta": " river", "logprobs": []}
    assert without(done, "type") == {**place, "text": "The river", "logprobs": []}
    assert without(part_done, "type") == {**place, "part": {**empty, "text": "The river"}}
    whole = {**added["item"], "status": "completed", "content": [{**empty, "text": "The river"}]}
    assert without(item_done, "type") == {"output_index": 0, "item": whole}
    final = completed["response"]
    assert final["id"] == created["response"]["id"] and final["output"] == [whole] and final["status"] == "completed"
    assert final["usage"]["input_tokens_details"]["cached_tokens"] == 2 and final["usage"]["output_tokens"] == 9


def test_the_events_of_a_thought_and_a_call_one_by_one() -> None:
    call = ['<tool_call>{"name": "weather", "arguments": {"ci', 'ty": "Bonn"}}', "</tool_call>"]
    with client_of(Scripted(["<think>Hm", "m.</think>", *call])) as client:
        events = raw_events(client, tools=[TOOL])
    thought, called = events[2]["item"], events[9]["item"]
    assert thought == {"type": "reasoning", "id": thought["id"], "status": "in_progress", "content": [], "summary": []}
    assert called == {
        "type": "function_call",
        "id": called["id"],
        "call_id": called["call_id"],
        "name": "weather",
        "arguments": "",
        "status": "in_progress",
    }
    place = {"item_id": thought["id"], "output_index": 0, "content_index": 0}
    whole_thought = {**thought, "status": "completed", "content": [{"type": "reasoning_text", "text": "Hmm."}]}
    where = {"item_id": called["id"], "output_index": 1}
    whole_call = {**called, "status": "completed", "arguments": '{"city": "Bonn"}'}
    assert [without(event) for event in events[2:-1]] == [
        {"type": "response.output_item.added", "output_index": 0, "item": thought},
        {"type": "response.content_part.added", **place, "part": {"type": "reasoning_text", "text": ""}},
        {"type": "response.reasoning_text.delta", **place, "delta": "Hm"},
        {"type": "response.reasoning_text.delta", **place, "delta": "m."},
        {"type": "response.reasoning_text.done", **place, "text": "Hmm."},
        {"type": "response.content_part.done", **place, "part": {"type": "reasoning_text", "text": "Hmm."}},
        {"type": "response.output_item.done", "output_index": 0, "item": whole_thought},
        {"type": "response.output_item.added", "output_index": 1, "item": called},
        {"type": "response.function_call_arguments.delta", **where, "delta": '{"ci'},
        {"type": "response.function_call_arguments.delta", **where, "delta": 'ty": "Bonn"}'},
        {"type": "response.function_call_arguments.done", **where, "arguments": '{"city": "Bonn"}'},
        {"type": "response.output_item.done", "output_index": 1, "item": whole_call},
    ]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == [whole_thought, whole_call]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("transcript", TRANSCRIPTS)
def test_streamed_and_whole_are_the_same_for_any_cutting(
    played: tuple[openai.OpenAI, Scripted], transcript: str
) -> None:
    client, backend = played
    how: dict[str, Any] = {"model": "tiny", "input": "Hello", "tools": [TOOL]}
    seen = []
    for size in (1, 3, 1000):
        backend.pieces = cut(transcript, size)
        whole = client.responses.create(**how).model_dump(by_alias=True, exclude_unset=True)
        events = raw_events(client, tools=[TOOL])
        deltas: dict[int, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
        with client.responses.stream(**how) as stream:
            final = stream.get_final_response().model_dump(by_alias=True, exclude_unset=True)
        streamed = events[-1]["response"]
        for index, item in enumerate(streamed["output"]):
            text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert deltas[index] == text
        assert [item["type"] for item in final["output"]] == [item["type"] for item in streamed["output"]]
        for one in (whole, streamed):
            made = anonymous(one)
            # Which step a token's text came with decides whether it counts as a thought.
            made["usage"] = {**made["usage"], "output_tokens_details": None}
            seen.append(made)
    assert all(one == seen[0] for one in seen)


def test_an_answer_that_runs_out_of_tokens_is_incomplete() -> None:
    cases = [("Water", "message", "response.output_text.done"), (CALL[:-24], "function_call", "arguments.done")]
    for transcript, kind, done in cases:
        with client_of(Scripted([transcript], finish="length")) as client:
            events = raw_events(client, tools=[TOOL], max_output_tokens=5)
            whole = client.responses.create(model="tiny", input="Hello", tools=[TOOL], max_output_tokens=5)  # type: ignore[list-item]
        final = events[-1]["response"]
        assert events[-1]["type"] == "response.incomplete" and final["status"] == whole.status == "incomplete"
        assert final["incomplete_details"] == {"reason": "max_output_tokens"}
        assert final["output"][-1]["type"] == kind and final["output"][-1]["status"] == "incomplete"
        assert any(event["type"].endswith(done) for event in events)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Busy("full", 3.0), 429, "rate_limit_exceeded"),
        (EngineDied("died"), 500, "server_error"),
        (RuntimeError("secret /root/path"), 500, "server_error"),
    ],
)
def test_failures_have_a_status_before_and_events_within_a_stream(error: Exception, status: int, code: str) -> None:
    with client_of(Scripted([], error=error)) as client:
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                client.responses.create(model="tiny", input="Hello", stream=stream)  # type: ignore[call-overload]
            assert caught.value.status_code == status and "secret" not in str(caught.value)
    with client_of(Scripted(["a", "b"], error=error)) as client:
        events = raw_events(client)
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == code and "secret" not in str(events)
        assert failed["output"][0]["content"][0]["text"] == "ab" and failed["output"][0]["status"] == "incomplete"


def test_a_failure_before_anything_was_said_is_an_error_event() -> None:
    class Late(Scripted):
        async def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
            await asyncio.sleep(0.4)
            raise EngineDied("died")
            yield []

    body = {"input": "x", "stream": True}
    with client_of(Late(), keep_alive_seconds=0.1) as client:
        text = httpx.post(str(client.base_url) + "responses", json=body).text
    assert text.startswith(": keep-alive") and "event: error\n" in text and "response." not in text


def test_items_become_the_conversation() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}|{{ m.reasoning_content or '' }}|"
        "{{ m.content }}{% for c in m.tool_calls or [] %}|{{ c.function | tojson }}{% endfor %}]{% endfor %}{{ tools }}"
    )
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'}
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {
        "type": "message",
        "role": "assistant",
        "id": "m",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Let me see", "annotations": []}],
    }
    items = [
        {"role": "developer", "content": "Dev"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        thought,
        said,
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "assistant", "content": "It rains"},
        {"role": "assistant", "content": "a lot"},
        {"type": "message", "role": "user", "content": "Thanks"},
    ]
    backend = Scripted()
    with client_of(backend, template) as client:
        client.responses.create(model="tiny", input=items, instructions="Be brief.")  # type: ignore[arg-type]
    assert scripted_tokenizer().decode(backend.asked[0].prompt) == (
        "[system||Be brief.][system||Dev][user||a\nb]"
        '[assistant|hm|Let me see|{"name": "weather", "arguments": {"city": "Bonn"}}][tool weather||rain]'
        "[assistant||It rains][assistant||a lot][user||Thanks]None"
    )


def test_what_a_model_said_can_be_sent_back_as_it_came() -> None:
    backend = Scripted([f"<think>Hm.</think>Well.\n{CALL}"])
    with client_of(backend) as client:
        first = client.responses.create(model="tiny", input="Hello", tools=[TOOL])  # type: ignore[list-item]
        call = first.output[-1]
        assert call.type == "function_call"
        told = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        client.responses.create(model="tiny", input=[*first.output, told], tools=[TOOL])  # type: ignore[list-item]
    prompt = scripted_tokenizer().decode(backend.asked[1].prompt)
    assert 'assistant\nWell.{"name": "weather", "arguments": {"city": "Bonn"}}\ntool\nrain' in prompt


def test_parameters_reach_the_engine() -> None:
    backend = Scripted(["{}"])
    schema = {"type": "object", "properties": {}}
    begun = time.monotonic()
    with client_of(backend) as client:
        client.responses.create(
            model="tiny",
            input="x",
            max_output_tokens=7,
            temperature=0.3,
            top_p=0.9,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
            extra_body={"top_k": 5, "seed": 3, "priority": 2, "cache_salt": "s", "timeout": 9.0},
        )
        client.responses.create(
            model="tiny", input="x", text={"format": {"type": "json_object"}}, extra_body={"stop": None}
        )
        client.responses.create(model="tiny", input="x", extra_body={"stop": ["end", "."], "ignore_eos": True})
        client.responses.create(model="tiny", input="x" * 600, truncation="auto", max_output_tokens=12)
    asked, plain, stopped, cut_down = backend.asked
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (7, 0.3, 0.9, 5, 3)
    assert tuple(stopped.params.stop) == ("end", ".") and stopped.params.ignore_eos and not plain.params.stop
    assert params.structured is not None and json.loads(params.structured.source) == schema
    assert asked.priority == 2 and asked.salt
    assert asked.deadline is not None and begun + 9 <= asked.deadline <= time.monotonic() + 9
    assert plain.params.structured is not None and json.loads(plain.params.structured.source) == {"type": "object"}
    assert len(cut_down.prompt) == 500


def test_logprobs_come_with_the_text_and_only_when_asked_for() -> None:
    with client_of(Scripted(["<think>x</think>", "a", "b"])) as client:
        events = raw_events(client, top_logprobs=2, include=["message.output_text.logprobs"])
        part = events[-1]["response"]["output"][1]["content"][0]
        assert [line["token"] for line in part["logprobs"]][-2:] == ["a", "b"]
        assert len(part["logprobs"][-1]["top_logprobs"]) == 2 and part["logprobs"][-1]["bytes"] == [98]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [line for event in deltas for line in event["logprobs"]] == part["logprobs"]
        own = raw_events(client, include=["message.output_text.logprobs"])[-1]["response"]["output"][1]["content"][0]
        assert own["logprobs"][-1]["top_logprobs"] == [] and own["logprobs"][-1]["token"] == "b"
        assert not raw_events(client)[-1]["response"]["output"][1]["content"][0]["logprobs"]


def test_effort_needs_a_switch_in_the_template() -> None:
    for name, given, told in (
        ("reasoning_effort", "high", "high"),
        ("enable_thinking", "none", "False"),
        ("thinking", "none", "False"),
    ):
        backend = Scripted()
        with client_of(backend, "{{ messages[0].content }} {{ NAME }}".replace("NAME", name)) as client:
            client.responses.create(model="tiny", input="x", reasoning={"effort": given})  # type: ignore[typeddict-item]
        assert scripted_tokenizer().decode(backend.asked[0].prompt) == f"x {told}"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"frobnicate": 1}, "frobnicate", "not a parameter"),
        ({"store": True}, "store", "keeps no responses"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "c"}, "conversation", "not a parameter"),
        ({"background": True}, "background", "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [TOOL, TOOL]}, "tools", "twice"),
        ({"tools": [TOOL], "text": {"format": {"type": "json_object"}}}, "tools", "leave one"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "'mcp'"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "no switch"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "summary"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]", "reasoning.encrypted_content"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "stored"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "'computer_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "'input_image'",
        ),
        ({"input": [{"role": "user", "content": "x", "who": 1}]}, "input[0].who", "not a parameter"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input[0].arguments",
            "no JSON object",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "cannot be read",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 600}, "max_output_tokens", "max_output_tokens=600"),
        ({"max_output_tokens": 500}, "input", "or set truncation"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "too large"),
        ({"model": "gpt-4"}, "model", "not served"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "streams only"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    played: tuple[openai.OpenAI, Scripted], body: dict[str, Any], param: str, message: str
) -> None:
    client, backend = played
    response = httpx.post(str(client.base_url) + "responses", json={"model": "tiny", "input": "Hello", **body})
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and message in error["message"]
    assert not backend.asked


@pytest.fixture
def played() -> Iterator[tuple[openai.OpenAI, Scripted]]:
    backend = Scripted()
    with client_of(backend) as client:
        yield client, backend
