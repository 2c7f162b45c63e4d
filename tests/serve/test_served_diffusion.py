"""A diffusion model behind HTTP: completions and chats as offline, streams block by block, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from bankfull import LLM
from tests.models.diffusion import make_speaking

pytestmark = pytest.mark.full
"""It starts a server; quick runs have the same engine in `tests/test_diffusion_llm.py`."""
OPTIONS = ["--dtype", "float32", "--memory", "4MiB", "--rows", "4", "--max-model-len", "128"]
MESSAGES = [{"role": "user", "content": "Tell me of the river and its channel."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speaking(tmp_path_factory.mktemp("sdar"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "bankfull", "serve", str(folder), "--port", "0", "--served-model-name", "tiny"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *OPTIONS], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        found = re.search(r"base_url (http://127.0.0.1:\d+)/v1", "".join(lines))
        assert found is not None, lines
        with openai.OpenAI(base_url=found[1] + "/v1", api_key="none", max_retries=0) as made:
            yield made
    finally:
        process.kill()
        process.wait()


def test_completions_and_their_streams_are_the_answer_of_the_offline_engine(
    client: openai.OpenAI, folder: Path
) -> None:
    offline = LLM(str(folder), dtype="float32", max_model_len=128)
    params = replace(offline.default_params(), temperature=0.0, max_tokens=20, ignore_eos=True)
    (expected,) = (one.outputs[0] for one in offline.generate(["The river runs"], params))
    asked = {"model": "tiny", "prompt": "The river runs", "temperature": 0, "max_tokens": 20}
    whole = client.completions.create(**asked, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    assert whole.choices[0].text == expected.text and whole.usage.completion_tokens == 20
    stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    parts = [choice.text for chunk in stream for choice in chunk.choices if choice.text]
    assert "".join(parts) == expected.text
    assert 2 <= len(parts) <= 4, "20 tokens in blocks of 8, not one by one"


def test_a_chat_is_answered_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    parts = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(parts) == (whole.choices[0].message.content or "")
    assert whole.usage is not None and whole.usage.completion_tokens > 0


@pytest.mark.parametrize("more", [{"logprobs": 1}, {"presence_penalty": 0.5}])
def test_what_needs_tokens_in_order_is_refused_with_one_sentence(client: openai.OpenAI, more: dict[str, float]) -> None:
    with pytest.raises(openai.BadRequestError, match="A diffusion model does not support"):
        client.completions.create(model="tiny", prompt="The river", **more)  # type: ignore[call-overload]


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="A diffusion model"):
        client.embeddings.create(model="tiny", input="The river")
