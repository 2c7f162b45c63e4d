"""The whole of it: `bankfull serve` on a tiny model, its engine in a process of its own, asked by real clients."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from bankfull import LLM
from tests.tiny import speaking_folder

OPTIONS = ["--dtype", "float32", "--memory", "4MiB", "--page-tokens", "4", "--rows", "8"]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "bankfull", "serve", str(speaking_folder()), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--served-model-name", "tiny", *OPTIONS], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    found = re.search(r"base_url (http://127.0.0.1:\d+)/v1", "".join(lines))
    assert found is not None, lines
    yield found[1], process
    process.kill()
    process.wait()


@pytest.fixture
def client(server: tuple[str, subprocess.Popen[str]]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_answers_are_those_of_the_offline_engine_for_many_clients_at_once(client: openai.OpenAI) -> None:
    prompts = [f"The river {number}" for number in range(8)]
    offline = LLM(str(speaking_folder()), dtype="float32", memory="4MiB", page_tokens=4)
    params = replace(offline.default_params(), seed=3, max_tokens=12)  # what a call leaves out is the same for both
    expected = [made.outputs[0] for made in offline.generate(prompts, params)]

    def ask(prompt: str) -> tuple[str, str]:
        whole = client.completions.create(model="tiny", prompt=prompt, seed=3, max_tokens=12).choices[0].text
        chunks = client.completions.create(model="tiny", prompt=prompt, seed=3, max_tokens=12, stream=True)
        return whole, "".join(choice.text for chunk in chunks for choice in chunk.choices)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [(one.text, one.text) for one in expected]


def test_a_conversation_its_usage_and_its_cached_prefix(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me of the river and its channel."}]
    first, second = (
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)  # type: ignore[arg-type]
        for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert 0 < (second.usage.prompt_tokens_details.cached_tokens or 0) < second.usage.prompt_tokens


def test_a_schema_is_kept_to(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["a"] in (1, 2)
    with pytest.raises(openai.BadRequestError, match="regex"):
        client.completions.create(model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "("}})


def test_echoed_logprobs_are_those_of_scoring(client: openai.OpenAI) -> None:
    offline = LLM(str(speaking_folder()), dtype="float32", memory="4MiB", page_tokens=4)
    scored = offline.score("The river runs")[0]
    answer = client.completions.create(
        model="tiny", prompt=scored.prompt_token_ids, echo=True, logprobs=1, max_tokens=0
    )
    lines = answer.choices[0].logprobs
    assert lines is not None and lines.token_logprobs is not None
    assert lines.token_logprobs[1:] == pytest.approx(scored.logprobs, abs=1e-4)
    assert answer.choices[0].text == "The river runs"


def test_embeddings_are_those_of_the_offline_engine(client: openai.OpenAI) -> None:
    offline = LLM(str(speaking_folder()), dtype="float32", memory="4MiB", page_tokens=4)
    expected = offline.embed(["The river", "runs"])
    answer = client.embeddings.create(model="tiny", input=["The river", "runs"])  # the client asks for base64
    for item, one in zip(answer.data, expected, strict=True):
        assert item.embedding == pytest.approx(one.embedding, abs=1e-4)


def test_a_stop_string_never_shows(client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": "tiny", "prompt": "The", "seed": 5, "max_tokens": 30}
    how["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(**how).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    chunks = client.completions.create(stop=stop, stream=True, **how)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text[: text.index(stop)]


def test_a_port_that_is_taken_and_a_model_that_is_none_are_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "bankfull", "serve", str(speaking_folder()), "--port", port]
        result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "choose another --port" in result.stderr and "Traceback" not in result.stderr
    command = [sys.executable, "-m", "bankfull", "serve", "./nowhere.gguf", "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    result = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True)
    assert result.returncode == 2 and "other machines" in result.stderr


def test_a_signal_lets_running_answers_finish(server: tuple[str, subprocess.Popen[str]]) -> None:
    """The last test of this file: it ends the server."""
    url, process = server
    body = {"prompt": "The river", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as response:
        pieces = response.iter_bytes()
        next(pieces)
        process.send_signal(signal.SIGTERM)
        rest = b"".join(pieces)
    assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in rest
    process.wait(20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/live")
