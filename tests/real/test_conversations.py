"""Schemas, long prompts, and a chat over ten turns, with the server's default options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real.conftest import CHATTING, Served

pytestmark = pytest.mark.parametrize("model", CHATTING, indirect=True, scope="module")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 1, "maximum": 2100},
        "kind": {"enum": ["river", "lake", "sea"]},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
    },
    "required": ["name", "year", "kind", "sights"],
    "additionalProperties": False,
}
FACT = "The secret word of this text is heron. "
FILLER = "The river carries gravel in spring and clear water in autumn, and the mill turns all year. "


def create(server: Served, messages: list[dict[str, Any]], **how: Any) -> Any:
    wanted = {"model": server.name, "temperature": 0, "messages": messages, **how}
    return server.client.chat.completions.create(**wanted)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", ["Rhine", "Volga", "Baikal", "Tagus", "Garda"])
def test_an_answer_obeys_its_schema(server: Served, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "water", "schema": SCHEMA, "strict": True}}
    asked = [user(f"Describe {name} in JSON.")]
    # The first call computes the prompt, and the second one finds it: where many rows have arithmetic of their own
    # (docs/kernels.md: AMX), these may differ. So the stream is compared with the second.
    for _ in range(2):
        text = create(server, asked, response_format=form, max_tokens=200).choices[0].message.content
        found = json.loads(text)
        assert set(found) == set(SCHEMA["properties"]) and isinstance(found["year"], int)
        assert found["kind"] in ("river", "lake", "sea") and len(found["sights"]) <= 3
    streamed = create(server, asked, response_format=form, max_tokens=200, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in streamed if piece.choices) == text


@pytest.mark.parametrize("tokens", [8_000, 24_000])
def test_a_long_prompt_is_read_whole_and_found_again(server: Served, model: str, tokens: int) -> None:
    count = tokens // 19
    text = FACT + FILLER * count
    answers = []
    for question in ("What is the secret word of the text?", "What is the secret word? One word."):
        answers.append(create(server, [user(f"{text}\n\n{question}")], max_tokens=24))
    first, second = (answer.usage for answer in answers)
    assert first.prompt_tokens > 0.85 * tokens
    assert second.prompt_tokens_details.cached_tokens > 0.95 * first.prompt_tokens
    assert all(answer.choices[0].message.content.strip() for answer in answers)
    if model.startswith("qwen2.5-coder-1.5b"):
        assert "heron" in "".join(answer.choices[0].message.content.lower() for answer in answers)


def test_ten_turns_compute_only_what_is_new(server: Served) -> None:
    messages: list[dict[str, Any]] = []
    before = 0
    for turn in range(10):
        messages.append(user(f"Turn {turn}: name one river of Europe that you have not named yet, and one city on it."))
        answer = create(server, messages, max_tokens=40)
        usage, text = answer.usage, answer.choices[0].message.content
        assert usage.prompt_tokens > before
        # What the answer's tokens are inside of the next prompt is up to the template; the last prompt is found again.
        assert turn == 0 or usage.prompt_tokens_details.cached_tokens >= before - 64
        before = usage.prompt_tokens
        messages.append({"role": "assistant", "content": text})
