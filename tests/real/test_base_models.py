"""Models without a chat template, with the server's default options: completions with schemas and long prompts."""

from __future__ import annotations

import json

import openai
import pytest

from tests.real.conftest import BASE, Served
from tests.real.test_conversations import FACT, FILLER, SCHEMA

pytestmark = pytest.mark.parametrize("model", BASE, indirect=True, scope="module")


def test_a_chat_is_refused_in_one_sentence(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        server.client.chat.completions.create(model=server.name, messages=[{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize("name", ["Rhine", "Volga", "Baikal", "Tagus", "Garda"])
def test_a_completion_obeys_its_schema(server: Served, name: str) -> None:
    how = {"model": server.name, "temperature": 0, "max_tokens": 200, "prompt": f"{name} as JSON: "}
    form = {"structured_outputs": {"json": SCHEMA}}
    text = server.client.completions.create(**how, extra_body=form).choices[0].text  # type: ignore[call-overload]
    streamed = server.client.completions.create(**how, extra_body=form, stream=True)  # type: ignore[call-overload]
    found = json.loads(text)
    assert set(found) == set(SCHEMA["properties"]) and isinstance(found["year"], int)
    assert found["kind"] in ("river", "lake", "sea") and len(found["sights"]) <= 3
    assert "".join(piece.choices[0].text for piece in streamed if piece.choices) == text


@pytest.mark.parametrize("tokens", [8_000, 24_000])
def test_a_long_prompt_is_read_whole_and_found_again(server: Served, tokens: int) -> None:
    text = FACT + FILLER * (tokens // 19)
    first, second = (
        server.client.completions.create(model=server.name, temperature=0, max_tokens=24, prompt=text + end)
        for end in ("The secret word is", "In one word, the secret is")
    )
    assert first.usage.prompt_tokens > 0.85 * tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 0.95 * first.usage.prompt_tokens
    assert all(answer.choices[0].text.strip() for answer in (first, second))
