"""/v1/completions and /v1/embeddings, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from bankfull.serve.engine.backend import Unavailable
from tests.serve.scripted import Scripted, cut, scripted_tokenizer
from tests.serve.server import shared


@contextmanager
def client_of(backend: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared(backend) + "/v1", api_key="none", max_retries=0) as client:
        yield client


def texts_of(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def test_a_whole_completion() -> None:
    backend = Scripted(["one ", "two"], finish="length")
    with client_of(backend) as client:
        answer = client.completions.create(model="tiny", prompt="Once")
    assert answer.choices[0].text == "one two" and answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.usage is not None and answer.usage.prompt_tokens == 4
    assert backend.asked[0].params.max_tokens == 16, "OpenAI's default"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([70, 71], [[70, 71]]),
        ([[70, 71], [72]], [[70, 71], [72]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_kind(prompt: Any, prompts: list[Any], stream: bool) -> None:
    backend = Scripted(["x", "y"])
    with client_of(backend) as client:
        how: dict[str, Any] = {"model": "tiny", "prompt": prompt, "n": 2}
        if stream:
            texts = texts_of(list(client.completions.create(stream=True, **how)))
        else:
            texts = {choice.index: choice.text for choice in client.completions.create(**how).choices}
    assert texts == dict.fromkeys(range(2 * len(prompts)), "xy")
    expected = [scripted_tokenizer().encode(one) if isinstance(one, str) else one for one in prompts]
    assert sorted(asked.prompt for asked in backend.asked) == sorted(expected)


def test_a_stream_ends_with_usage_and_done() -> None:
    with client_of(Scripted(["a", "b"], cached=1)) as client:
        url = str(client.base_url) + "completions"
        body = {"prompt": ["p", "q"], "stream": True, "stream_options": {"include_usage": True}}
        lines = [line for line in httpx.post(url, json=body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == 2 and last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    finishes = [json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] for line in lines[:-2]]
    assert finishes.count("stop") == 2


@pytest.mark.parametrize("size", [1, 2, 50])
def test_streamed_and_whole_are_the_same_text(size: int) -> None:
    text = 'A "river" of é and \U0001f30a\n\n'
    with client_of(Scripted(cut(text, size))) as client:
        whole = client.completions.create(model="tiny", prompt="x", echo=True).choices[0].text
        chunks = list(client.completions.create(model="tiny", prompt="x", echo=True, stream=True))
    assert whole == "x" + text and texts_of(chunks) == {0: whole}


def test_echo_with_logprobs_scores_the_prompt() -> None:
    """As lm-evaluation-harness asks: ids in, one token out, everything scored."""
    ids = scripted_tokenizer().encode("abé")
    with client_of(Scripted(["z"])) as client:
        answer = client.completions.create(model="tiny", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0)
        scored = client.completions.create(model="tiny", prompt=ids, echo=True, logprobs=1, max_tokens=0)
    lines = answer.choices[0].logprobs
    assert lines is not None and answer.choices[0].text == "abéz"
    assert lines.tokens == ["a", "b", "bytes:\\xc3", "bytes:\\xa9", "z"]
    assert lines.token_logprobs == [None, -0.25, -0.25, -0.25, -0.25]  # type: ignore[comparison-overlap]
    assert lines.top_logprobs is not None and lines.top_logprobs[0] is None and lines.top_logprobs[1]["b"] == -0.25
    assert lines.text_offset is not None and lines.text_offset[:3] == [0, 1, 2]
    assert scored.choices[0].text == "abé" and len(scored.choices[0].logprobs.tokens or []) == 4  # type: ignore[union-attr]


def test_the_best_of_several_are_kept() -> None:
    backend = Scripted(["x"], scores=[-3.0, -1.0, -2.0, -4.0])
    with client_of(backend) as client:
        scored = client.completions.create(model="tiny", prompt="p", best_of=4, n=2, logprobs=0)
        assert [c.logprobs.token_logprobs for c in scored.choices if c.logprobs] == [[-1.0], [-2.0]]
        backend.asked.clear()
        answer = client.completions.create(model="tiny", prompt="p", best_of=4, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1] and answer.choices[0].logprobs is None
        assert backend.asked[0].params.n == 4 and backend.asked[0].params.logprobs == 0
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError, match="best_of"):
            client.completions.create(model="tiny", prompt="p", best_of=4, stream=True)
        with pytest.raises(openai.BadRequestError, match="best_of is not supported: use n, and choose"):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "p"}], extra_body={"best_of": 2}
            )
        with pytest.raises(openai.BadRequestError, match="below n"):
            client.completions.create(model="tiny", prompt="p", best_of=1, n=2)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt", "mixes"),
        ({"prompt": [10**9]}, "prompt", "ids go from 0 to 299"),
        ({"prompt": [-1]}, "prompt", "ids go from 0"),
        ({"prompt": ["a"] * 3000}, "prompt", "at most 2048"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "logprobs": 100}, "logprobs", "from 0 to 64"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "stream", "cannot be streamed"),
        ({"prompt": ["a" * 400] * 11, "prompt_logprobs": 64}, "logprobs", "286000 log-probabilities, more than 262144"),
        ({"prompt": ["a"] * 2048, "logprobs": 64, "max_tokens": 16}, "logprobs", "log-probabilities"),
        ({"prompt": "a", "stop": ["x" * 129] * 64}, "stop", "8256 characters in all: give at most 8192"),
        ({"prompt": "a", "allowed_token_ids": [1] * 262_145}, "allowed_token_ids", "give at most 262144"),
        ({"prompt": [1] * 513}, "prompt", "513 tokens, but the context holds 512"),
        ({"prompt": "a", "max_tokens": 512}, "max_tokens", "context"),
        ({"prompt": "a" * 512}, "prompt", "context"),
        ({"prompt": {"a": 1}}, "prompt", "prompt"),
        ({}, "prompt", "required"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    backend = Scripted()
    with client_of(backend) as client:
        response = httpx.post(str(client.base_url) + "completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and message in error["message"]
    assert not backend.asked


def test_one_prompt_that_finds_no_engine_ends_the_others() -> None:
    backend = Scripted(["x"] * 50, pause=0.01)
    made, generate = [], backend.generate

    def second_is_refused(*given: Any, **named: Any) -> Any:
        made.append(None)
        if len(made) == 2:
            raise Unavailable("gone")
        return generate(*given, **named)

    backend.generate = second_is_refused  # type: ignore[method-assign, assignment]
    with client_of(backend) as client:
        with pytest.raises(openai.InternalServerError, match="gone"):
            client.completions.create(model="tiny", prompt=["a", "b", "c"])
        assert backend.running == 0


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_are_unit_vectors(encoding: Any) -> None:
    backend = Scripted()
    with client_of(backend) as client:
        answer = client.embeddings.create(model="tiny", input=["a", "bc"], encoding_format=encoding)
        ids = client.embeddings.create(model="tiny", input=[[70], [71, 72]], dimensions=3)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="tiny", input="a", dimensions=2)
    if encoding == "float":
        assert [item.embedding for item in answer.data] == [[0.6, 0.8, 0.0]] * 2
    else:  # given as text, because the encoding was asked for by name
        import base64
        from array import array

        packed = array("f", base64.b64decode(answer.data[0].embedding))  # type: ignore[arg-type]
        assert packed.tolist() == pytest.approx([0.6, 0.8, 0.0])
    assert answer.usage.prompt_tokens == 3 and [item.index for item in answer.data] == [0, 1]
    assert len(ids.data) == 2 and backend.asked[0].pool == "last"
