"""/v1/messages over a real socket, with Anthropic's own client; every event is checked against the client's types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from msgspec.structs import replace
from pydantic import TypeAdapter

from bankfull.serve.app import create_app
from bankfull.serve.engine.backend import Busy, DeadlineExceeded, EngineDied, Unavailable
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.layers import protect
from bankfull.serve.telemetry.metrics import ServiceMetrics
from tests.serve.scripted import FACTS, TEMPLATE, Scripted, cut, scripted_texts, scripted_tokenizer, settings
from tests.serve.server import served, shared

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
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
    CALL[:-20],
]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@lru_cache
def client_at(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


@contextmanager
def client_of(backend: Scripted, template: str | None = TEMPLATE, **changes: Any) -> Iterator[anthropic.Anthropic]:
    if template == TEMPLATE and not changes:
        yield client_at(shared(backend))
        return
    app = create_app(backend, scripted_texts(template), settings(**changes))
    with served(app) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def played() -> Iterator[tuple[anthropic.Anthropic, Scripted]]:
    backend = Scripted()
    with client_of(backend) as client:
        yield client, backend


def post(client: anthropic.Anthropic, path: str = "v1/messages", **body: Any) -> httpx.Response:
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
    whole = {"model": "tiny", "messages": HELLO, **body}
    if path == "v1/messages":
        whole = {"max_tokens": 100, **whole}
    return httpx.post(f"{str(client.base_url).rstrip('/')}/{path}", json=whole, headers=headers)


def raw_events(client: anthropic.Anthropic, **body: Any) -> list[dict[str, Any]]:
    """Every event as it stands in the stream, checked against the client's own types."""
    response = post(client, stream=True, **body)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n")[:-1]
    assert lines[2::3] == [""] * (len(lines) // 3), "each event is its name, its data and an empty line"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::3]]
    assert [line.removeprefix("event: ") for line in lines[::3]] == [event["type"] for event in events]
    for event in events:
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
    return events


def test_a_whole_answer() -> None:
    backend = Scripted(["The ", "river"], cached=3)
    with client_of(backend) as client:
        answer = client.messages.create(model="tiny", max_tokens=100, messages=HELLO, system="Be brief.")
    assert [block.model_dump(exclude_unset=True) for block in answer.content] == [{"type": "text", "text": "The river"}]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert answer.id.startswith("msg_") and answer.stop_reason == "end_turn" and answer.stop_sequence is None
    usage = answer.usage
    assert usage.output_tokens == 9 and usage.cache_read_input_tokens == 3
    assert usage.input_tokens + 3 == len(backend.asked[0].prompt)
    Message.model_validate(answer.model_dump())


def test_the_events_of_a_text_one_by_one() -> None:
    with client_of(Scripted(["The", " river"], cached=2)) as client:
        events = raw_events(client)
    start, *between, delta, stop = events
    message = start["message"]
    prompt = message["usage"]["input_tokens"]
    assert start["type"] == "message_start" and message["content"] == [] and message["stop_reason"] is None
    assert between == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "The"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " river"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert delta["type"] == "message_delta" and delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 9 and delta["usage"]["cache_read_input_tokens"] == 2
    assert delta["usage"]["input_tokens"] == prompt - 2
    assert stop == {"type": "message_stop"}


def test_the_events_of_a_thought_and_a_call_one_by_one() -> None:
    call = ['<tool_call>{"name": "weather", "arguments": {"ci', 'ty": "Bonn"}}', "</tool_call>"]
    with client_of(Scripted(["<think>Hm", "m.</think>", *call])) as client:
        events = raw_events(client, tools=[TOOL])
    begun = events[6]["content_block"]
    assert begun == {"type": "tool_use", "id": begun["id"], "name": "weather", "input": {}} and begun["id"]
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    assert events[2:-2] == [
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": begun},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"ci'}},
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": 'ty": "Bonn"}'},
        },
        {"type": "content_block_stop", "index": 1},
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def anonymous(message: Message) -> dict[str, Any]:
    """Without what differs from call to call."""
    made = message.model_dump(exclude={"id", "usage"})
    for block in made["content"]:
        if block["type"] == "tool_use":
            del block["id"]
        block.pop("parsed_output", None)
    return {**made, "output_tokens": message.usage.output_tokens}


@pytest.mark.parametrize("transcript", TRANSCRIPTS)
def test_streamed_and_whole_are_the_same_for_any_cutting(
    played: tuple[anthropic.Anthropic, Scripted], transcript: str
) -> None:
    client, backend = played
    how: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HELLO, "tools": [TOOL]}
    seen = []
    for size in (1, 3, 1000):
        backend.pieces = cut(transcript, size)
        seen.append(anonymous(client.messages.create(**how)))
        with client.messages.stream(**how) as stream:
            seen.append(anonymous(stream.get_final_message()))
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize(
    ("finish", "stop", "transcript", "reason", "sequence"),
    [
        ("stop", None, "a", "end_turn", None),
        ("stop", 2, "a", "end_turn", None),
        ("stop", "END", "a", "stop_sequence", "END"),
        ("length", None, "a", "max_tokens", None),
        ("stop", None, CALL, "tool_use", None),
        ("length", None, CALL[:-24], "max_tokens", None),
    ],
)
def test_reasons_to_stop(
    played: tuple[anthropic.Anthropic, Scripted],
    finish: str,
    stop: int | str | None,
    transcript: str,
    reason: str,
    sequence: str | None,
) -> None:
    client, backend = played
    backend.pieces, backend.finish, backend.stop = [transcript], finish, stop
    whole = post(client, tools=[TOOL], stop_sequences=["END"]).json()
    delta = raw_events(client, tools=[TOOL], stop_sequences=["END"])[-2]["delta"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Busy("full", 7.2), 429, "rate_limit_error"),
        (Unavailable("loads"), 503, "overloaded_error"),
        (EngineDied("died"), 500, "api_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (RuntimeError("secret /root/path"), 500, "api_error"),
    ],
)
def test_failures_have_a_status_before_and_an_event_within_a_stream(error: Exception, status: int, kind: str) -> None:
    with client_of(Scripted([], error=error)) as client:
        for stream in (False, True):
            response = post(client, stream=stream)
            body = response.json()
            assert response.status_code == status and "secret" not in response.text
            assert set(body) == {"type", "error"} and body["type"] == "error" and body["error"]["type"] == kind
    with client_of(Scripted(["a"], error=error)) as client:
        events = raw_events(client)
        assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
        assert events[-1]["error"]["type"] == kind and "secret" not in events[-1]["error"]["message"]
        with (
            pytest.raises(anthropic.APIStatusError),
            client.messages.stream(model="tiny", max_tokens=5, messages=HELLO) as stream_of_events,
        ):
            stream_of_events.get_final_message()


SHOWN = (
    "{% if tools %}{{ tools }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}|{{ m.reasoning_content or '' }}|"
    "{{ m.content }}{% for c in m.tool_calls or [] %}|{{ c.function | tojson }}{% endfor %}]{% endfor %}"
)


def test_blocks_become_the_conversation_and_are_counted() -> None:
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "b"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "where?", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    backend = Scripted()
    with client_of(backend, SHOWN) as client:
        client.messages.create(model="tiny", max_tokens=5, messages=messages, system=system)  # type: ignore[arg-type]
        counted = client.messages.count_tokens(model="tiny", messages=messages, system=system)  # type: ignore[arg-type]
    prompt = backend.asked[0].prompt
    assert scripted_tokenizer().decode(prompt) == (
        "[system||Be brief.\nBe kind.][user||a\nb]"
        '[assistant|hm|Let me see|{"name": "weather", "arguments": {"city": "Bonn"}}'
        '|{"name": "weather", "arguments": {}}]'
        "[tool weather||rain][tool weather||Error: where?][user||And?]"
    )
    assert counted.input_tokens == len(prompt) and len(backend.asked) == 1


def test_what_a_model_said_can_be_sent_back_as_it_came() -> None:
    backend = Scripted([f"<think>Hm.</think>Well.\n{CALL}"])
    with client_of(backend) as client:
        first = client.messages.create(model="tiny", max_tokens=99, messages=HELLO, tools=[TOOL])  # type: ignore[list-item]
        call = first.content[-1]
        assert call.type == "tool_use" and call.input == {"city": "Bonn"}
        told = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        messages = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [told]}]
        client.messages.create(model="tiny", max_tokens=99, messages=messages, tools=[TOOL])  # type: ignore[list-item]
    prompt = scripted_tokenizer().decode(backend.asked[1].prompt)
    assert 'assistant\nWell.{"name": "weather", "arguments": {"city": "Bonn"}}\ntool\nrain' in prompt


def test_parameters_reach_the_engine() -> None:
    backend = Scripted(["{}"])
    schema = {"type": "object", "properties": {}}
    with client_of(backend) as client:
        response = post(
            client,
            max_tokens=7,
            temperature=0.3,
            top_p=0.9,
            top_k=5,
            stop_sequences=["a", "b"],
            seed=3,
            priority=2,
            cache_salt="s",
            timeout=9,
            metadata={"user_id": "me"},
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
        assert response.status_code == 200, response.text
        assert post(client, tools=[TOOL], tool_choice={"type": "any"}).status_code == 200
        assert post(client, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).status_code == 200
        assert post(client, tools=[TOOL], tool_choice={"type": "none"}).status_code == 200
    asked, any_tool, named, none = backend.asked
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (7, 0.3, 0.9, 5, 3)
    assert params.stop == ("a", "b") and asked.priority == 2 and asked.salt and asked.deadline is not None
    assert params.structured is not None and json.loads(params.structured.source) == schema
    assert any_tool.params.structured is not None and named.params.structured is not None
    assert none.params.structured is None and "weather" not in scripted_tokenizer().decode(none.prompt)


def test_thinking_is_switched_where_the_template_has_a_switch() -> None:
    backend = Scripted()
    enabled, adaptive = {"type": "enabled", "budget_tokens": 50}, {"type": "adaptive"}
    with client_of(backend, "{{ messages[0].content }} {{ enable_thinking }}") as client:
        for thinking in ({}, {"thinking": {"type": "disabled"}}, {"thinking": enabled}, {"thinking": adaptive}):
            assert post(client, **thinking).status_code == 200
        assert post(client, chat_template_kwargs={"enable_thinking": True}).status_code == 200
    told = [scripted_tokenizer().decode(asked.prompt) for asked in backend.asked]
    assert told == [f"Hello {on}" for on in (False, False, True, True, True)]


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"frobnicate": 1}, "frobnicate is not a parameter"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 505}, "lower max_tokens."),
        ({"messages": []}, "messages is empty"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "cannot continue"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type is 'image'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}
                ]
            },
            "messages[0].content[0].content[0].type is 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]},
            "belongs into a message of the assistant",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}, *HELLO]},
            "belongs into a message of the user",
        ),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role is 'king'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "no switch for thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens is 100"),
        ({"output_config": {"effort": "high"}}, "no switch for output_config.effort"),
        ({"stop_sequences": [""]}, "stop_sequences holds ''"),
        ({"temperature": -1}, "temperature is -1"),
        ({"container": "c"}, "container is not a parameter"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    played: tuple[anthropic.Anthropic, Scripted], body: dict[str, Any], message: str
) -> None:
    client, backend = played
    response = post(client, **body)
    error = response.json()
    assert response.status_code == 400 and not backend.asked
    assert set(error) == {"type", "error"} and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error" and message in error["error"]["message"], error


def test_counting_refuses_what_has_no_place_in_it(played: tuple[anthropic.Anthropic, Scripted]) -> None:
    client, _ = played
    response = post(client, "v1/messages/count_tokens", max_tokens=5)
    assert response.status_code == 400 and "max_tokens" in response.json()["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="other", messages=HELLO)


def test_whatever_refuses_below_messages_speaks_anthropics_way() -> None:
    secret, key = new_key("alice")
    backend = Scripted()
    app = create_app(backend, scripted_texts(), settings())
    access = access_policy(Keyring((key,)), host="127.0.0.1")
    with served(protect(app, backend, access, ServiceMetrics())) as url:
        known = {"x-api-key": secret}
        refusals = [
            (401, "authentication_error", httpx.post(f"{url}/v1/messages", json={})),
            (401, "authentication_error", httpx.get(f"{url}/v1/messages/nothing")),
            (403, "permission_error", httpx.post(f"{url}/v1/messages", headers={**known, "origin": "http://evil.org"})),
            (404, "not_found_error", httpx.get(f"{url}/v1/messages/batches/x", headers=known)),
            (405, "invalid_request_error", httpx.get(f"{url}/v1/messages", headers=known)),
            (405, "invalid_request_error", httpx.get(f"{url}/v1/messages/count_tokens", headers=known)),
        ]
        for status, kind, response in refusals:
            told = response.json()
            assert response.status_code == status and response.headers["content-type"] == "application/json"
            assert told["type"] == "error" and told["error"]["type"] == kind and told["error"]["message"]
        assert refusals[-1][2].headers["allow"] == "POST"
        for other in ("/v1/messagesx", "/v1/batches/x", "/v1"):
            assert set(httpx.get(url + other, headers=known).json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_clients_own_helper_reads_a_streamed_thought_and_a_tool_call(size: int) -> None:
    backend = Scripted(cut(f"<think>Weather?</think>Let me see.\n{CALL}", size), facts=replace(FACTS, max_len=8192))
    switched = TEMPLATE + "{% if enable_thinking %}<on>{% endif %}"
    thoughts, texts, inputs, snapshots = [], [], [], []
    with (
        client_of(backend, switched) as client,
        client.messages.stream(
            model="tiny",
            max_tokens=2000,
            messages=HELLO,
            tools=[TOOL],  # type: ignore[list-item]
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream,
    ):
        for event in stream:
            if event.type == "thinking":
                thoughts.append(event.thinking)
            elif event.type == "text":
                texts.append(event.text)
            elif event.type == "input_json":
                inputs.append(event.partial_json)
                snapshots.append(event.snapshot)
        message = stream.get_final_message()
    assert scripted_tokenizer().decode(backend.asked[0].prompt).endswith("<on>")
    thought, text, call = message.content
    assert thought.type == "thinking" and thought.thinking == "".join(thoughts) == "Weather?"
    assert text.type == "text" and text.text == "".join(texts) and text.text.strip() == "Let me see."
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Bonn"}) and call.id
    assert json.loads("".join(inputs)) == snapshots[-1] == {"city": "Bonn"}
    assert message.stop_reason == "tool_use" and message.usage.output_tokens > 0
    if size == 1:
        assert len(thoughts) > 1 and len(texts) > 1 and len(inputs) > 1, "pieces come as the model writes them"


@pytest.mark.parametrize("stream", [False, True])
def test_the_version_header_may_be_missing(played: tuple[anthropic.Anthropic, Scripted], stream: bool) -> None:
    client, _ = played
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "stream": stream, "thinking": {"type": "disabled"}}
    response = httpx.post(f"{str(client.base_url).rstrip('/')}/v1/messages", json=body)
    assert response.status_code == 200
    assert ("event: message_stop" in response.text) is stream
