"""The largest value of every field of every endpoint, and what it makes the event loop do at a time.

Work is counted in lines of Python that run between two turns of the loop, on the loop's own thread; what threads do
meanwhile is not counted. Work inside of one call into C cannot be seen like this: that is bounded by the number of
values that a body may hold, which has tests of its own below.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import pytest

from bankfull.serve.api.calls import MAX_NESTS, MAX_TEXTS, MAX_VALUES, Caller, refuse_crowd
from bankfull.serve.api.errors import Refusal, problem_of
from bankfull.serve.api.openapi import POSTED, document
from bankfull.serve.app import create_app
from tests.serve.scripted import FACTS, Scripted, scripted_texts, settings

BODY = 4 << 20
MOST_LINES = 250_000
"""Some 50 ms on a slow core."""
DOCUMENT = document(POSTED)
SCHEMAS = DOCUMENT["components"]["schemas"]
DEEPEST = 4


class Budget:
    """The most lines that ran in one turn."""

    def __init__(self) -> None:
        self.most = self._lines = 0

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._lines += event == "line"
        return self._line

    @contextmanager
    def counting(self) -> Iterator[Budget]:
        run = asyncio.Handle._run
        budget, thread = self, threading.get_ident()

        def counted(handle: asyncio.Handle) -> None:
            if threading.get_ident() != thread:  # the loop of another test's server that has not ended yet
                return run(handle)
            budget._lines = 0
            sys.settrace(budget._line)
            try:
                run(handle)
            finally:
                sys.settrace(None)
                budget.most = max(budget.most, budget._lines)

        asyncio.Handle._run = counted  # type: ignore[method-assign]
        try:
            yield self
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return schema


def smallest(schema: dict[str, Any]) -> str:
    """The shortest JSON that the schema takes."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return min(map(smallest, schema["anyOf"]), key=len)
    if "enum" in schema:
        return json.dumps(schema["enum"][0])
    if "const" in schema:
        return json.dumps(schema["const"])
    match schema.get("type"):
        case "object":
            needed = schema.get("required", [])
            return "{" + ",".join(f'"{name}":{smallest(schema["properties"][name])}' for name in needed) + "}"
        case "array":
            return "[]"
        case "string":
            return '""'
        case "boolean":
            return "true"
        case "null":
            return "null"
    return "1"


def repeated(unit: str, room: int) -> str:
    return ",".join([unit] * max(1, room // (len(unit) + 1)))


def largest(schema: dict[str, Any], room: int, depth: int = DEEPEST) -> Iterator[tuple[str, str]]:
    """Where, and JSON of about `room` bytes in which one value is as large as it can be."""
    schema = resolved(schema)
    for one in schema.get("anyOf", ()):
        yield from largest(one, room, depth)
    kind = schema.get("type")
    if kind == "string" and "enum" not in schema and "const" not in schema:
        yield "x", '"' + "x" * room + '"'
        yield "<", '"' + "<" * room + '"'
    elif kind == "array":
        items = schema.get("items") or {}
        yield "[]", f"[{repeated(smallest(items), room)}]"
        if depth:
            for where, value in largest(items, room, depth - 1):
                yield f"[0]{where}", f"[{value}]"
    elif kind == "object" and "properties" in schema:
        others = {name: smallest(schema["properties"][name]) for name in schema.get("required", ())}
        for name, inner in schema["properties"].items() if depth else ():
            for where, value in largest(inner, room, depth - 1):
                fields = {**others, name: value}
                yield f".{name}{where}", "{" + ",".join(f'"{key}":{field}' for key, field in fields.items()) + "}"
    elif kind == "object":
        value = smallest(schema.get("additionalProperties") or {})
        count = room // (len(value) + 9)
        yield "{}", "{" + ",".join(f'"{number}":{value}' for number in range(count)) + "}"
    elif kind is None and not schema.keys() & {"anyOf", "enum", "const"}:
        yield "any", f"[{repeated('{}', room)}]"
    elif kind == "integer":
        yield "digits", "9" * min(room, 4000)


def plausible(path: str, body: str) -> str:
    """What the largest value needs beside it so that it is looked at at all."""
    fields = json.loads(body)
    if path == "/tokenize" and "prompt" not in fields and "messages" not in fields:
        fields["prompt"] = "x"
    if isinstance(fields.get("messages"), list) and not fields["messages"]:
        fields["messages"] = [{"role": "user", "content": "x"}]
    if fields.get("input") == "" or fields.get("prompt") == "":
        fields["input" if "input" in fields else "prompt"] = "x"
    if path == "/v1/messages":
        fields["max_tokens"] = 1
    return json.dumps(fields, ensure_ascii=False)


async def ask(api: Any, body: bytes) -> int:
    try:
        await api.answer(body, Caller())
        return 200
    except Exception as error:
        return problem_of(error).status


@pytest.mark.few(1)
@pytest.mark.parametrize("path", sorted(POSTED))
def test_no_field_of_any_endpoint_holds_the_event_loop(path: str) -> None:
    api = create_app(Scripted(["a"]), scripted_texts(), settings()).state.apis[path]
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    held: dict[str, int] = {}
    asked = 0
    for where, value in largest(schema, BODY - 300):
        body = plausible(path, value).encode()
        with Budget().counting() as budget:
            status = asyncio.run(ask(api, body))
        assert status in (200, 400, 404, 429), (where, status)
        asked += 1
        if budget.most > MOST_LINES:
            held[where] = budget.most
    assert asked >= 4 and not held


#: What a field's own largest value does not show.
COMBINED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "token strings": (200, "/tokenize", {"prompt": "<" * 2_000_000, "return_token_strs": True}),
    "samples with many stops": (
        200,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "n": 128, "stop": ["x" * 128] * 64},
    ),
    "allowed ids": (200, "/v1/completions", {"prompt": "x", "allowed_token_ids": list(range(1 << 18))}),
    "parts": (
        200,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16_384}]},
    ),
    "tools for many samples": (
        200,
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "n": 128,
            "temperature": 1,
            "tool_choice": "required",
            "tools": [
                {"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": {"a": {}}}}}
                for i in range(256)
            ],
        },
    ),
    "log-probabilities": (
        200,
        "/v1/completions",
        {"prompt": ["x" * 400] * 9, "prompt_logprobs": 64, "max_tokens": 1, "logprobs": 5},
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", COMBINED)
def test_no_combination_holds_the_event_loop(name: str) -> None:
    expected, path, body = COMBINED[name]
    roomy = msgspec.structs.replace(FACTS, max_len=1 << 22)  # a context that refuses none of this
    api = create_app(Scripted(["a"], facts=roomy), scripted_texts(), settings()).state.apis[path]
    with Budget().counting() as budget:
        status = asyncio.run(ask(api, json.dumps(body).encode()))
    assert status == expected
    assert budget.most <= MOST_LINES


def test_the_instrument_sees_a_loop_that_is_held() -> None:
    async def hold() -> None:
        for _ in range(MOST_LINES):
            pass

    with Budget().counting() as budget, _busy_loop_on_another_thread():
        asyncio.run(hold())
    assert budget.most > MOST_LINES


@contextmanager
def _busy_loop_on_another_thread() -> Iterator[None]:
    """Turns of another loop must not count, nor begin the count again."""

    async def turn() -> None:
        while not ended.is_set():
            await asyncio.sleep(0)

    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(turn()))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# -- work inside of one call: how many values a body holds


@pytest.mark.parametrize(
    "unit", ["1", "[]", "{}", '""', '{"":0}', '"a","b"', "[[[]]]", r'"\\"', r'"\""', '{"role":"user"}']
)
def test_bodies_of_many_values_are_refused(unit: str) -> None:
    body = f'{{"a":[{repeated(unit, BODY)}]}}'.encode()
    with pytest.raises(Refusal, match="too many values"):
        refuse_crowd(body)


@pytest.mark.parametrize("text", [",", "[", "{", r"\"", r"\\", r"\",", r"\\[", r"\\\","])
def test_what_stands_inside_of_texts_does_not_count(text: str) -> None:
    refuse_crowd(f'{{"a":"{text * (BODY // len(text))}"}}'.encode())


@pytest.mark.parametrize(("unit", "most"), [("1", MAX_VALUES), ('""', MAX_TEXTS), ("[]", MAX_NESTS)])
def test_the_limits_of_values_are_exact(unit: str, most: int) -> None:
    padding = '"' + "[" * BODY + '"'  # looked at closely
    for count, refused in ((most - 2, False), (most + 2, True)):
        body = f"[{padding},{','.join([unit] * count)}]".encode()
        if refused:
            with pytest.raises(Refusal):
                refuse_crowd(body)
        else:
            refuse_crowd(body)
