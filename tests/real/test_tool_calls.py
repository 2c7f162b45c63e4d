"""Tools on real models, with the server's default options: calls that must come, calls that may, and their results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real.conftest import CHATTING, Served

pytestmark = pytest.mark.parametrize("model", CHATTING, indirect=True, scope="module")

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
    },
}
TIME: dict[str, Any] = {
    "name": "get_time",
    "description": "Get the current time of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]
CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Quito", "Paris", "Tokyo", "Delhi", "Accra", "Bern"]
NAMED = {"type": "function", "function": {"name": "get_time"}}


def ask(server: Served, question: str, **how: Any) -> Any:
    messages = how.pop("messages", [{"role": "user", "content": question}])
    wanted = {"model": server.name, "temperature": 0, "max_tokens": 128, "tools": TOOLS, "messages": messages, **how}
    return server.client.chat.completions.create(**wanted)


def calls_of(answer: Any) -> list[tuple[str, dict[str, Any]]]:
    [choice] = answer.choices
    made = choice.message.tool_calls or []
    assert (choice.finish_reason == "tool_calls") == bool(made)
    return [(call.function.name, json.loads(call.function.arguments)) for call in made]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_twenty_of_twenty_calls_that_must_come_are_whole(server: Served, choice: Any) -> None:
    for question in [f"What is the {what} in {city}?" for city in CITIES for what in ("weather", "time")]:
        made = calls_of(ask(server, question, tool_choice=choice))
        assert len(made) == 1 or (made and choice == "required"), "several calls may answer, but not a named one"
        for name, arguments in made:
            assert name in ("get_weather", "get_time") if choice == "required" else name == "get_time"
            assert isinstance(arguments["city"], str)


def test_a_model_that_was_trained_for_tools_calls_them_by_itself(server: Served, model: str) -> None:
    if not model.startswith("qwen2.5-coder-1.5b"):
        pytest.skip("too small to call tools reliably by itself")
    made = [calls_of(ask(server, f"What is the weather in {city}?")) for city in CITIES]
    right = [calls for calls, city in zip(made, CITIES, strict=True) if ("get_weather", city) in cities_of(calls)]
    assert len(right) >= 8, made


def cities_of(calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, Any]]:
    return [(name, arguments.get("city")) for name, arguments in calls]


def test_several_calls_of_one_answer_arrive_apart(server: Served, model: str) -> None:
    if not model.startswith("qwen2.5-coder-1.5b"):
        pytest.skip("too small to call tools reliably by itself")
    asked = "Call get_weather for Oslo and call get_weather for Rome. Give both tool calls now."
    made = cities_of(calls_of(ask(server, asked)))
    assert ("get_weather", "Oslo") in made and ("get_weather", "Rome") in made


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_streamed_answer_is_the_same(server: Served, choice: Any) -> None:
    question = "What is the weather in Oslo?"
    whole = ask(server, question, tool_choice=choice)
    text, names, arguments, reasons = "", [], "", []
    for event in ask(server, question, tool_choice=choice, stream=True):
        for piece in event.choices:
            text += piece.delta.content or ""
            for call in piece.delta.tool_calls or []:
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments or ""
            reasons += [piece.finish_reason] if piece.finish_reason else []
    message = whole.choices[0].message
    assert text == (message.content or "")
    assert names == [call.function.name for call in message.tool_calls or []]
    assert arguments == "".join(call.function.arguments for call in message.tool_calls or [])
    assert reasons == [whole.choices[0].finish_reason]


def test_a_result_comes_back_into_the_conversation(server: Served) -> None:
    question = "What is the weather in Oslo?"
    first = ask(server, question, tool_choice="required").choices[0].message
    [call] = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"weather": "snow", "celsius": -7})}
    messages = [{"role": "user", "content": question}, first.model_dump(exclude_none=True), result]
    answer = ask(server, "", messages=messages, tool_choice="none").choices[0].message
    assert answer.content and not answer.tool_calls
