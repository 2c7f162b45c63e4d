"""LiteLLM, on which many proxies and agents are built."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import Server

litellm = pytest.importorskip("litellm", reason="litellm is not installed: make test-clients")

MESSAGES = [{"role": "user", "content": "What is a river?"}]


@pytest.fixture
def how(server: Server) -> dict[str, Any]:
    return {
        "model": "openai/tiny",
        "api_base": server.url + "/v1",
        "api_key": "none",
        "num_retries": 0,
        "temperature": 0,
        "max_tokens": 30,
    }


def test_a_conversation_with_and_without_streaming(how: dict[str, Any]) -> None:
    whole = litellm.completion(messages=MESSAGES, **how)
    pieces = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **how))
    text = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
    assert text == whole.choices[0].message.content and text
    assert whole.usage.completion_tokens == pieces[-1].usage.completion_tokens


def test_a_text_completion(how: dict[str, Any]) -> None:
    answer = litellm.text_completion(**how | {"model": "text-completion-openai/tiny"}, prompt="The river")
    assert answer.choices[0].text


def test_embeddings(server: Server) -> None:
    answer = litellm.embedding(
        model="openai/tiny",
        input=["a river", "a channel"],
        api_base=server.url + "/v1",
        api_key="none",
        encoding_format="float",
    )
    assert len(answer.data) == 2 and answer.data[0]["embedding"] != answer.data[1]["embedding"]


def test_a_refusal_raises_the_error_class_of_the_client(how: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=[{"role": "user", "content": "river " * 500}], **how)
