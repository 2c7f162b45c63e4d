"""LangChain's ChatOpenAI works without changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import Server

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is missing: make test-clients")

WEATHER = {
    "title": "weather",
    "description": "The weather of a city",
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def chat(server: Server) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=server.url + "/v1", api_key="none", model="tiny", temperature=1, max_tokens=120, max_retries=0, seed=1
    )


def test_invoke_and_stream_return_the_same_text(chat: Any) -> None:
    whole = chat.invoke("What is a river?")
    pieces = list(chat.stream("What is a river?"))
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert len(pieces) > 2 and "".join(piece.content for piece in pieces) == whole.content


def test_concurrent_calls_get_the_same_text_as_single_calls(chat: Any) -> None:
    questions = [f"River {number}?" for number in range(6)]
    assert [one.content for one in chat.batch(questions)] == [chat.invoke(one).content for one in questions]


def test_a_bound_tool_is_called(chat: Any) -> None:
    bound = chat.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False)
    called = bound.invoke("What is the weather?")
    assert [call["name"] for call in called.tool_calls] == ["weather"]
    assert called.tool_calls[0]["args"]["city"] in ("Oslo", "Rome")
    streamed = None
    for piece in bound.stream("What is the weather?"):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None and streamed.tool_calls[0]["args"] == called.tool_calls[0]["args"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_has_its_structure(chat: Any, method: str) -> None:
    assert chat.with_structured_output(WEATHER, method=method).invoke("Where?")["city"] in ("Oslo", "Rome")


def test_a_refusal_raises_the_error_class_of_the_client(chat: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="context"):
        chat.invoke("river " * 500)
