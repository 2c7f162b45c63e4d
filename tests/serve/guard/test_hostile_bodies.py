"""Every body gets success or a refusal that names the problem, and never a server error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.serve.api.calls import Caller
from bankfull.serve.api.errors import problem_of
from bankfull.serve.api.openapi import POSTED
from bankfull.serve.app import create_app
from tests.quick import examples
from tests.serve.scripted import Scripted, scripted_texts, settings

BACKEND = Scripted(["a", "b"])
APIS = create_app(BACKEND, scripted_texts(), settings()).state.apis

NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e308, 1e-300, 128, 512])
)
ODD_TEXTS = st.sampled_from(["", "user", "auto", "x", "\0", "<|im_end|>", "\uffff", "é" * 50])
TEXTS = st.one_of(ODD_TEXTS, st.text(max_size=5))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
PLAUSIBLE: dict[str, list[Any]] = {
    "messages": [[{"role": "user", "content": "x"}], [{"role": "tool", "content": [{"type": "text"}]}]],
    "prompt": ["x", [3, 4], ["x", "y"], [[5]]],
    "input": ["x", [3, 4], ["x", "y"], [[5]]],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]],
    "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a"}}],
    "structured_outputs": [{"regex": "("}, {"choice": []}, {"json": {"$ref": "#"}}],
    "logit_bias": [{"1": 5}, {"-1": 1}, {"9" * 30: 1}],
    "stop": ["x", ["x", ""]],
    "tokens": [[1, 2]],
    "stream": [True],
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(POSTED)))
    names = POSTED[path][1].__struct_fields__
    chosen = draw(st.lists(st.sampled_from(names), max_size=5, unique=True))
    needed = {"messages", "prompt", "input", "tokens"}.intersection(names)
    body: dict[str, Any] = {name: PLAUSIBLE[name][0] for name in sorted(needed)}
    if path == "/tokenize":
        del body["messages"]
    for name in chosen:
        options = [VALUES, *([st.sampled_from(PLAUSIBLE[name])] * 3 if name in PLAUSIBLE else [])]
        body[name] = draw(st.one_of(options))
    return path, body


async def answered(path: str, body: bytes) -> int:
    """The status; a stream is read to its end."""
    try:
        made = await APIS[path].answer(body, Caller())
        if isinstance(made, bytes):
            json.loads(made)
            return 200
        try:
            while True:
                await made.__anext__()
        except StopAsyncIteration:
            return 200
        finally:
            await made.aclose()
    except Exception as error:
        problem = problem_of(error)
        assert problem.message and len(problem.message) < 2000
        return problem.status


@examples(400)
@given(bodies())
def test_any_json_is_served_or_refused(call: tuple[str, dict[str, Any]]) -> None:
    path, body = call
    assert asyncio.run(answered(path, json.dumps(body).encode())) in (200, 400, 404), body
    assert BACKEND.running == 0


@examples(200)
@given(st.sampled_from(sorted(POSTED)), st.binary(max_size=60))
def test_any_bytes_are_refused(path: str, body: bytes) -> None:
    assert asyncio.run(answered(path, body)) == 400


@pytest.mark.parametrize("depth", [100, 30_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    nest = b"[" * depth + b"]" * depth
    for body in (
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %b}}' % nest,
        b'{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": {"a": %b}}}' % nest,
        b'{"messages": %b}' % nest,
    ):
        status = asyncio.run(answered("/v1/chat/completions", body))
        # The engine judges a schema of ordinary depth.
        assert status == 400 or (depth == 100 and b"structured" in body)
