"""Responses and Messages on a real model: `bankfull serve` on a tiny one, asked by the official clients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from bankfull import LLM, SamplingParams
from tests.tiny import speaking_folder

QUESTION = "Tell me of the river and its channel."
OPTIONS = ["--dtype", "float32", "--memory", "4MiB", "--page-tokens", "4", "--rows", "8"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "bankfull", "serve", str(speaking_folder()), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--served-model-name", "tiny", *OPTIONS], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    found = re.search(r"base_url (http://127.0.0.1:\d+)/v1", "".join(lines))
    assert found is not None, lines
    yield found[1]
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def expected() -> str:
    """What the offline engine says, greedily."""
    offline = LLM(str(speaking_folder()), dtype="float32", memory="4MiB", page_tokens=4)
    made = offline.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=16))
    return made[0].outputs[0].text


def test_responses_say_what_the_offline_engine_says(url: str, expected: str) -> None:
    how: dict[str, Any] = {"model": "tiny", "input": QUESTION, "temperature": 0, "max_output_tokens": 16}
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**how)
        with client.responses.stream(**how) as stream:
            events = list(stream)
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        form = {"type": "json_schema", "name": "a", "schema": {**schema, "additionalProperties": False}}
        formed = client.responses.create(model="tiny", input="x", text={"format": form})  # type: ignore[misc,arg-type]
    assert whole.output_text == expected
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == expected
    assert last.response.usage is not None
    assert 0 < last.response.usage.input_tokens_details.cached_tokens < last.response.usage.input_tokens
    assert json.loads(formed.output_text)["a"] in (1, 2)


def test_messages_say_what_the_offline_engine_says(url: str, expected: str) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    how: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 16, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**how)
        with client.messages.stream(**how) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        counted = client.messages.count_tokens(model="tiny", messages=messages)
        stop = expected[len(expected) // 2 : len(expected) // 2 + 2]
        stopped = client.messages.create(**how, stop_sequences=[stop])
    assert [block.type for block in whole.content] == ["text"]
    assert "".join(pieces) == expected
    assert [getattr(message.content[0], "text", None) for message in (whole, final)] == [expected] * 2
    assert final.stop_reason == whole.stop_reason == "max_tokens" and final.usage.output_tokens == 16
    assert final.usage.cache_read_input_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted.input_tokens
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert getattr(stopped.content[0], "text", None) == expected[: expected.index(stop)]
