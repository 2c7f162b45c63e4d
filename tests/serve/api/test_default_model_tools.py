"""The default model, whose chat template has no place for tools, calls them all the same: `bankfull serve`, asked by
the official clients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import msgspec
import openai
import pytest

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
WHAT = "The weather of a city in the next days."
QUESTION = "What is the weather in Oslo?"
FUNCTIONS = [
    {"name": "get_weather", "description": WHAT, "parameters": SCHEMA},
    {"name": "get_time", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
]


class Weather(msgspec.Struct, forbid_unknown_fields=True):
    """What the first schema says."""

    city: Annotated[str, msgspec.Meta(max_length=20)]
    unit: Literal["celsius", "fahrenheit"]
    days: Annotated[int, msgspec.Meta(ge=1, le=7)] | msgspec.UnsetType = msgspec.UNSET


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


ARGUMENTS: dict[str, Any] = {"get_weather": Weather, "get_time": Nothing}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CHAT: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 96,
    "tools": [{"type": "function", "function": function} for function in FUNCTIONS],
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "bankfull", "serve", "smollm2", "--port", "0", "--memory", "64MiB", "--rows", "4"]
    process = subprocess.Popen(
        [*command, "--max-model-len", "1024"],
        stdout=subprocess.PIPE,
        text=True,
        # Every draft that a lookup finds is verified: on a slow machine `auto` would not.
        env={**os.environ, "OMP_NUM_THREADS": "1", "BANKFULL_SPECULATIVE": "suffix,adaptive=false"},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    found = re.search(r"base_url (http://127.0.0.1:\d+)/v1", "".join(lines))
    assert found is not None, lines
    yield found[1]
    process.kill()
    process.wait()


def check(name: str, arguments: str) -> None:
    msgspec.json.decode(arguments, type=ARGUMENTS[name])


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_come_is_whole_and_the_same_streamed(url: str, choice: Any) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].model_extra["tool_parser"] == "json"  # type: ignore[index]
        whole = client.chat.completions.create(**CHAT, tool_choice=choice).choices[0]
        with client.chat.completions.stream(**CHAT, tool_choice=choice) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    [one], [other] = whole.message.tool_calls or [], streamed.message.tool_calls or []
    assert one.type == "function"
    check(one.function.name, one.function.arguments)
    assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    assert not whole.message.content


@pytest.mark.parametrize("question", ["How is the weather in Rome?", "Is it cold in Helsinki?", "What time is it?"])
def test_a_call_that_must_come_is_whole_while_drafts_go_on_behind_its_end(url: str, question: str) -> None:
    """Drafts repeat what the grammar does not need any more: one of them completes the call, others follow it."""
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": question}]
        for _ in range(2):
            asked = client.chat.completions.create(**{**CHAT, "messages": messages}, tool_choice="required")
            [one] = asked.choices[0].message.tool_calls or []
            assert one.type == "function"
            check(one.function.name, one.function.arguments)
            messages.append({"role": "assistant", "content": "", "tool_calls": [one.model_dump()]})
            messages.append({"role": "tool", "tool_call_id": one.id, "content": "3"})
            messages.append({"role": "user", "content": question})


def test_auto_and_none_leave_the_model_free(url: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        answers = [client.chat.completions.create(**CHAT, tool_choice=choice) for choice in ("auto", "none")]
    for answer in answers:
        for call in answer.choices[0].message.tool_calls or []:
            assert call.type == "function" and call.function.name in ARGUMENTS
    assert answers[0].usage is not None and answers[1].usage is not None
    assert answers[0].usage.prompt_tokens > answers[1].usage.prompt_tokens + 50, "none shows no tools"


def test_the_other_apis_and_a_result_that_comes_back(url: str) -> None:
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        made = client.responses.create(
            model="smollm2", input=QUESTION, tools=tools, tool_choice="required", max_output_tokens=96, temperature=0
        )  # type: ignore[call-overload]
    [item] = made.output
    check(item.name, item.arguments)
    offered: Any = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    how: dict[str, Any] = {"model": "smollm2", "max_tokens": 96, "tools": offered, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as asked:
        used = asked.messages.create(messages=messages, tool_choice={"type": "any"}, **how)
        [block] = used.content
        assert used.stop_reason == "tool_use" and block.type == "tool_use"
        check(block.name, json.dumps(block.input))
        result = {"type": "tool_result", "tool_use_id": block.id, "content": '{"celsius": 3}'}
        messages += [{"role": "assistant", "content": [block.model_dump()]}, {"role": "user", "content": [result]}]
        told = asked.messages.create(messages=messages, **{**how, "max_tokens": 8})
    before, after = (u.input_tokens + (u.cache_read_input_tokens or 0) for u in (used.usage, told.usage))
    assert after > before + 20 and told.content, "the call and its result are part of the prompt"


def test_a_batch_of_calls_is_served_the_same_way(url: str) -> None:
    body = {**CHAT, "tool_choice": "required"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        given = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h")
        while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired"):
            time.sleep(0.1)
        assert batch.output_file_id is not None, batch
        answered = json.loads(client.files.content(batch.output_file_id).text)
    [call] = answered["response"]["body"]["choices"][0]["message"]["tool_calls"]
    check(call["function"]["name"], call["function"]["arguments"])
