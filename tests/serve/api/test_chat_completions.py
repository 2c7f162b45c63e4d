"""/v1/chat/completions over a real socket, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.sample.params import SamplingParams
from bankfull.serve.api.calls import StreamOptions
from bankfull.serve.api.chat import Answer
from bankfull.serve.api.openai.chat_completions import ChatStream
from bankfull.serve.app import create_app
from bankfull.serve.engine.backend import Busy, DeadlineExceeded, EngineDied, Unavailable
from bankfull.serve.parsers import PlainParser
from bankfull.submit import Submit
from bankfull.types import StepDrafts
from tests.quick import examples
from tests.serve.scripted import FACTS, TEMPLATE, Scripted, cut, scripted_texts, scripted_tokenizer, settings
from tests.serve.server import served, shared

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@contextmanager
def client_of(backend: Scripted, template: str | None = TEMPLATE, **changes: Any) -> Iterator[openai.OpenAI]:
    defaults = changes.pop("defaults", None)
    if template == TEMPLATE and defaults is None and not changes:
        server = nullcontext(shared(backend))
    else:
        server = served(create_app(backend, scripted_texts(template, defaults), settings(**changes)))  # type: ignore[assignment]
    with server as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def raw_events(client: openai.OpenAI, **body: Any) -> list[str]:
    """The data of each event, as it stands in the stream."""
    url = str(client.base_url) + "chat/completions"
    with httpx.stream("POST", url, json={"model": "tiny", "messages": HELLO, "stream": True, **body}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    assert lines[1::2] == [""] * (len(lines) // 2), "each event is one line and an empty one"
    return [line.removeprefix("data: ") for line in lines[::2]]


def merged(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client makes of the deltas of each sample."""
    samples: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            sample = samples.setdefault(choice.index, {"text": "", "reasoning": "", "calls": {}, "finish": None})
            sample["text"] += choice.delta.content or ""
            sample["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                entry = sample["calls"].setdefault(call.index, {"id": None, "name": "", "arguments": ""})
                entry["id"] = call.id or entry["id"]
                entry["name"] += call.function.name or ""
                entry["arguments"] += call.function.arguments or ""
            sample["finish"] = choice.finish_reason or sample["finish"]
    return samples


@pytest.fixture
def refusing() -> Iterator[tuple[Scripted, openai.OpenAI]]:
    backend = Scripted()
    with client_of(backend) as client:
        yield backend, client


def test_a_whole_answer() -> None:
    with client_of(Scripted(["The ", "river"], cached=3)) as client:
        answer = client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "The river"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage is not None and usage.completion_tokens == 9 and usage.prompt_tokens_details is not None
    assert usage.total_tokens == usage.prompt_tokens + 9 and usage.prompt_tokens_details.cached_tokens == 3


def test_the_prompt_is_the_rendered_template() -> None:
    backend = Scripted()
    with client_of(backend) as client:
        extra = {"chat_template_kwargs": {"mood": "glad"}}
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages: list[Any] = [{"role": "developer", "content": "Be"}, {"role": "user", "content": parts}]
        client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
    text = scripted_tokenizer().decode(backend.asked[0].prompt, skip_special=False)
    assert text == (
        "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\nglad"
    )


def test_a_stream_is_role_content_finish_usage_and_done_in_this_order() -> None:
    with client_of(Scripted(["a", "b"])) as client:
        events = raw_events(client, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_without_the_option_no_chunk_speaks_of_usage() -> None:
    with client_of(Scripted(["a"])) as client:
        assert not any("usage" in event for event in raw_events(client))


def test_usage_can_come_with_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with client_of(Scripted(["a", "b"])) as client:
        chunks = [json.loads(event) for event in raw_events(client, stream_options=options)[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-2:] == [2, 2]


def test_a_stream_has_the_drafts_of_each_step_on_request() -> None:
    drafts = [StepDrafts(1, scripted_tokenizer().encode("xy"), 3), StepDrafts()]
    with client_of(Scripted(["ab", "c"], drafts=drafts)) as client:
        options = {"include_drafts": True}
        chunks = [json.loads(event) for event in raw_events(client, stream_options=options)[:-1]]
        without = [json.loads(event) for event in raw_events(client)[:-1]]
        with pytest.raises(openai.BadRequestError, match="include_drafts is for chat completions"):
            client.completions.create(model="tiny", prompt="p", stream=True, stream_options=options)  # type: ignore[call-overload]
    shown = [chunk["choices"][0].get("drafts") for chunk in chunks]
    assert shown == [
        None,
        {"tokens": ["a", "b"], "accepted": 1, "rejected": ["x", "y"], "verified": 3},
        {"tokens": ["c"], "accepted": 0, "rejected": [], "verified": 0},
        None,
    ]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "ab", "c", None]
    assert not any("drafts" in chunk["choices"][0] for chunk in without)


def test_samples_arrive_under_their_index() -> None:
    with client_of(Scripted(["x", "y"])) as client:
        whole = client.chat.completions.create(model="tiny", messages=HELLO, n=3)
        chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, n=3, stream=True))
    assert [choice.message.content for choice in whole.choices] == ["xy"] * 3
    assert {index: sample["text"] for index, sample in merged(chunks).items()} == {0: "xy", 1: "xy", 2: "xy"}


TRANSCRIPTS = [
    "Water boils.",
    "<think>It is hot.</think>\n\nYes, 100 °C \U0001f30a.",
    CALL,
    f"Let me see.\n{CALL}\n{CALL}",
    "<think>Weather?</think>" + CALL,
    "a <tool_call not a call",
]


@pytest.mark.parametrize("transcript", TRANSCRIPTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streamed_and_whole_are_the_same_for_any_cutting(transcript: str, size: int) -> None:
    how: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}
    with client_of(Scripted(cut(transcript, size))) as client:
        streamed = merged(list(client.chat.completions.create(stream=True, **how)))[0]
        answers = [client.chat.completions.create(**how).choices[0]]
    with client_of(Scripted([transcript])) as client:
        answers.append(client.chat.completions.create(**how).choices[0])
    for answer in answers:
        message = answer.message
        assert (message.content or "") == streamed["text"]
        assert (getattr(message, "reasoning", None) or "") == streamed["reasoning"]
        assert getattr(message, "reasoning_content", None) == getattr(message, "reasoning", None)
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]  # type: ignore[union-attr]
        assert calls == [(call["name"], call["arguments"]) for call in streamed["calls"].values()]
        assert answer.finish_reason == streamed["finish"] == ("tool_calls" if calls else "stop")
        assert len(calls) == transcript.count('"name"')
        for _, arguments in calls:
            assert json.loads(arguments) == {"city": "Bonn"}


@examples(25)
@given(st.text(alphabet='ab \n<>/\\"{}é\U0001f30a', max_size=30), st.integers(1, 5))
def test_any_text_survives_the_spelling_of_chunks(text: str, size: int) -> None:
    async def stream() -> bytes:
        answer = Answer([1], Scripted(cut(text, size)).generate(Submit([1], SamplingParams())), [PlainParser()])
        chunks = ChatStream(answer, scripted_tokenizer(), 'a "model"', StreamOptions())
        return b"".join([chunk async for chunk in chunks])

    events = asyncio.run(stream()).decode().split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == text


def test_a_required_call_is_forced_by_a_grammar() -> None:
    backend = Scripted([CALL])
    how: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}
    with client_of(backend) as client:
        client.chat.completions.create(tool_choice="required", **how)
        client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "weather"}}, **how)
        client.chat.completions.create(tool_choice="auto", **how)
        client.chat.completions.create(tool_choice="none", **how)
        with pytest.raises(openai.BadRequestError, match="not among tools"):
            client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "x"}}, **how)
        with pytest.raises(openai.BadRequestError, match="no tools"):
            client.chat.completions.create(model="tiny", messages=HELLO, tool_choice="required")
    assert [asked.params.structured is not None for asked in backend.asked] == [True, True, False, False]
    assert [len(asked.prompt) for asked in backend.asked][2] > len(backend.asked[3].prompt), "none shows no tools"


PLAIN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def test_tools_that_the_template_cannot_show_are_told_in_the_system_message() -> None:
    backend = Scripted(["<tool_call>\n", '{"name": "weather", "arguments": {"city"', ': "Oslo"}}\n</tool_call>'])
    backend.facts = msgspec.structs.replace(FACTS, max_len=4096)
    how: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}
    with client_of(backend, PLAIN) as client:
        parser = client.models.retrieve("tiny").model_extra["tool_parser"]  # type: ignore[index]
        whole = [client.chat.completions.create(tool_choice=choice, **how) for choice in ("auto", "required", "none")]
        chunks = list(client.chat.completions.create(stream=True, **how))
    assert parser == "json"
    for answer in whole[:2]:
        [call] = answer.choices[0].message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
        assert answer.choices[0].finish_reason == "tool_calls"
    plain = whole[2].choices[0].message
    assert plain.tool_calls is None and "<tool_call>" in (plain.content or "")
    calls = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(call.arguments or "" for call in calls if call) == '{"city": "Oslo"}'
    prompts = [scripted_tokenizer().decode(asked.prompt, skip_special=False) for asked in backend.asked]
    shown = [prompts[at] for at in (0, 1, 3)]
    assert all(prompt.startswith("<|im_start|>system\n") and '"name": "weather"' in prompt for prompt in shown)
    assert "weather" not in prompts[2], "none shows no tools"
    assert [asked.params.structured is not None for asked in backend.asked] == [False, True, False, False]


def test_an_earlier_tool_call_goes_back_into_the_prompt_as_an_object() -> None:
    backend = Scripted()
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bonn"}'}}
    with client_of(backend) as client:
        said = client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.model_dump()
        messages: list[Any] = [
            *HELLO,
            said,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        ]
        client.chat.completions.create(model="tiny", messages=messages)
        call["function"]["arguments"] = "[]"  # type: ignore[index]
        with pytest.raises(openai.BadRequestError, match="no JSON object"):
            client.chat.completions.create(model="tiny", messages=messages)
    text = scripted_tokenizer().decode(backend.asked[1].prompt)
    assert '{"name": "weather", "arguments": {"city": "Bonn"}}' in text and "Hello world" in text


def test_logprobs_of_every_token_streamed_and_whole() -> None:
    with client_of(Scripted(["é", "b"])) as client:
        how: dict[str, Any] = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
        whole = client.chat.completions.create(**how).choices[0].logprobs
        chunks = list(client.chat.completions.create(stream=True, **how))
        how["top_logprobs"] = 0
        bare = client.chat.completions.create(**how).choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert bare is not None and [token.top_logprobs for token in bare.content or []] == [[], [], []]
    assert bytes(byte for token in whole.content for byte in token.bytes or []) == "éb".encode()
    assert [len(token.top_logprobs) for token in whole.content] == [2, 2, 2]
    assert whole.content[-1].logprob == -0.25 and whole.content[-1].token == "b"
    lists = [choice.logprobs.content or [] for chunk in chunks for choice in chunk.choices if choice.logprobs]
    streamed = [token for tokens in lists for token in tokens]
    assert [token.model_dump() for token in streamed] == [token.model_dump() for token in whole.content]


def test_every_sampling_parameter_reaches_the_engine() -> None:
    backend = Scripted()
    extra = {
        "min_p": 0.1,
        "top_k": 5,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "stop_token_ids": [4],
        "min_tokens": 1,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "bad_words": ["no"],
        "allowed_token_ids": [5, 6],
        "prompt_logprobs": 1,
        "priority": -3,
        "cache_salt": "s",
        "timeout": 30,
    }
    begun = time.monotonic()
    with client_of(backend) as client:
        answer = client.chat.completions.create(
            model="alias",
            messages=HELLO,
            temperature=0.5,
            top_p=0.8,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logit_bias={"7": 1.5},
            seed=9,
            stop=["x"],
            max_completion_tokens=12,
            user="me",
            extra_body=extra,
        )
    assert answer.model == "alias"
    asked = backend.asked[0]
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.typical_p) == (0.5, 0.8, 5, 0.1, 0.9)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert params.logit_bias == {7: 1.5} and params.seed == 9
    assert params.stop == ("x",) and params.stop_token_ids == (4,)
    assert (params.min_tokens, params.max_tokens, params.ignore_eos) == (1, 12, True)
    assert params.include_stop_str_in_output and not params.skip_special_tokens and params.bad_words == ("no",)
    assert params.allowed_token_ids == (5, 6) and params.prompt_logprobs == 1
    assert asked.priority == -3 and asked.salt.endswith("s")
    assert asked.deadline is not None and begun + 30 <= asked.deadline <= time.monotonic() + 30
    lines = answer.model_extra["prompt_logprobs"]  # type: ignore[index]
    assert lines[0] is None and len(lines) == len(asked.prompt) and "logprob" in next(iter(lines[1].values()))


def test_structured_outputs_by_all_their_names() -> None:
    backend = Scripted(["{}"])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    bodies: list[dict[str, Any]] = [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}},
        {"structured_outputs": {"regex": "[ab]"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "a"'}},
        {"structured_outputs": {"json": schema}},
    ]
    with client_of(backend) as client:
        for body in bodies:
            client.chat.completions.create(model="tiny", messages=HELLO, extra_body=body)
        with pytest.raises(openai.BadRequestError, match="exactly one"):
            body = {"structured_outputs": {"regex": "a", "choice": ["b"]}}
            client.chat.completions.create(model="tiny", messages=HELLO, extra_body=body)
    forms = [asked.params.structured for asked in backend.asked]
    kinds = [form.kind if form else None for form in forms]
    assert kinds == [None, "json", "json", "regex", "choice", "grammar", "json"]
    assert json.loads(forms[2].source) == schema  # type: ignore[union-attr]


def test_recommended_sampling_applies_is_shown_and_can_be_switched_off() -> None:
    defaults = {"temperature": 0.3, "top_k": 20}
    for use in (True, False):
        backend = Scripted()
        with client_of(backend, defaults=defaults, use_generation_config=use) as client:
            client.chat.completions.create(model="tiny", messages=HELLO, top_p=0.7)
            shown = client.models.retrieve("tiny").model_extra["sampling_defaults"]  # type: ignore[index]
        params = backend.asked[0].params
        assert (params.temperature, params.top_k, params.top_p) == ((0.3, 20, 0.7) if use else (1.0, 0, 0.7))
        assert shown == ({"temperature": 0.3, "top_k": 20} if use else {})


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
        ({"functions": []}, "functions", "tools"),
        ({"metadata": {"a": "b"}}, "metadata", "leave it out"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"temperature": 1000}, "temperature", "from 0 to 100"),
        ({"n": 100000}, "n", "from 1 to 128"),
        ({"logprobs": True, "top_logprobs": 1000}, "logprobs", "from 0 to 64"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias", "at most"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "mean the same"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": "x", "color": 1}]}, "messages[0].color", "leave it out"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0]",
            "image_url",
        ),
        ({"priority": 10**9}, "priority", "priority"),
        ({"timeout": -1}, "timeout", "seconds"),
        ({"cache_salt": "x" * 1000}, "cache_salt", "at most"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "streams only"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "no switch"),
        ({"reasoning_effort": "hardest"}, "reasoning_effort", "hardest"),
        ({"store": True}, "store", "store"),
        ({"model": "gpt-4"}, "model", "not served"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not"),
        ({"max_tokens": 500}, "messages", "context"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    refusing: tuple[Scripted, openai.OpenAI], body: dict[str, Any], param: str, message: str
) -> None:
    backend, client = refusing
    url = str(client.base_url) + "chat/completions"
    response = httpx.post(url, json={"model": "tiny", "messages": HELLO, **body})
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and message in error["message"]
    assert not backend.asked


def test_a_long_prompt_is_an_error_unless_truncation_is_asked_for() -> None:
    backend = Scripted()
    long: list[Any] = [{"role": "user", "content": "x" * 600}]
    with client_of(backend) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=long)
        assert caught.value.code == "context_length_exceeded"
        huge: list[Any] = [{"role": "user", "content": "x" * 1_000_000}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=huge)
        assert caught.value.code == "context_length_exceeded"
        for wanted, kept in ((100, 100), (-1, 502)):
            extra = {"truncate_prompt_tokens": wanted}
            client.chat.completions.create(model="tiny", messages=long, max_tokens=10, extra_body=extra)
            assert len(backend.asked[-1].prompt) == kept


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Busy("full", 7.2), 429, "rate_limit_exceeded"),
        (Unavailable("loads"), 503, "engine_unavailable"),
        (EngineDied("died"), 500, "engine_died"),
        (DeadlineExceeded("late"), 504, "deadline_exceeded"),
        (RuntimeError("secret /root/path"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_have_a_status_before_and_an_event_within_a_stream(
    error: Exception, status: int, code: str | None, stream: bool
) -> None:
    with client_of(Scripted([], error=error)) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        assert caught.value.status_code == status and caught.value.code == code
        assert "secret" not in str(caught.value)
        if status == 429:
            assert caught.value.response.headers["retry-after"] == "7"
    with client_of(Scripted(["a"], error=error)) as client:
        events = raw_events(client)
        assert json.loads(events[1])["choices"][0]["delta"] == {"content": "a"}
        failed = json.loads(events[2])["error"]
        assert failed["code"] == code and "secret" not in failed["message"]
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))


def test_an_engine_that_gives_up_on_one_request_is_an_error_not_an_answer() -> None:
    with client_of(Scripted(["a"], finish="error")) as client, pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=HELLO)


def test_a_silent_stream_gets_comments() -> None:
    with client_of(Scripted(["a", "b"], pause=0.6), keep_alive_seconds=0.2) as client:
        url = str(client.base_url) + "chat/completions"
        with httpx.stream("POST", url, json={"messages": HELLO, "stream": True}) as response:
            text = response.read().decode()
    before, between = text.partition("data: ")[0], text.split('"a"')[1].split('"b"')[0]
    assert ": keep-alive\n\n" in before and ": keep-alive\n\n" in between
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("switch", "effort", "told"),
    [("reasoning_effort", "high", "high"), ("enable_thinking", "none", "False"), ("thinking", "none", "False")],
)
def test_effort_uses_the_switch_that_the_template_has(switch: str, effort: Any, told: str) -> None:
    backend = Scripted()
    with client_of(backend, "{{ messages[0].content }} {{ NAME }}".replace("NAME", switch)) as client:
        client.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort=effort)
    assert scripted_tokenizer().decode(backend.asked[0].prompt) == f"Hello {told}"


def test_a_template_that_only_speaks_of_effort_has_no_switch_for_it() -> None:
    backend = Scripted()
    template = "{{ messages[0].content }}{# reasoning_effort #}"
    with client_of(backend, template) as client, pytest.raises(openai.BadRequestError, match="no switch"):
        client.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort="high")
    assert not backend.asked
