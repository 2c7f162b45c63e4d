"""OpenAI's /v1/embeddings: hidden states after the last norm, as unit vectors."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from dataclasses import replace
from typing import Literal

import msgspec

from bankfull.sample.params import SamplingParams
from bankfull.serve.api.calls import Caller, check_model, decode, submit_of, truncation_of
from bankfull.serve.api.chat import facts_of
from bankfull.serve.api.errors import GenerationFailed, Problem, Refusal, openai_error
from bankfull.serve.api.openai.completions import gather
from bankfull.serve.api.openai.prompts import Prompts, encode_prompt, split_prompts
from bankfull.serve.api.openai.turns import PromptGate
from bankfull.serve.api.texts import Texts, fit
from bankfull.serve.engine.backend import Backend
from bankfull.serve.engine.wire import RequestDone
from bankfull.serve.settings import Settings
from bankfull.submit import Submit

PARAMS = SamplingParams(max_tokens=0, detokenize=False)


class EmbeddingCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] = "last"
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None


class EmbeddingItem(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(msgspec.Struct):
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


_decoder = msgspec.json.Decoder(EmbeddingCall)


class Embeddings:
    """The endpoint."""

    def __init__(self, backend: Backend, texts: Texts, settings: Settings) -> None:
        self._backend, self._texts, self._settings = backend, texts, settings

    async def answer(self, body: bytes, caller: Caller) -> bytes:
        call = decode(body, _decoder)
        submit = submit_of(call, caller, PARAMS, pool=call.pooling)
        model = check_model(self._settings, call.model)
        facts = facts_of(self._backend)
        truncate = truncation_of(call.truncate_prompt_tokens)
        prompts = []
        for given in split_prompts(call.input, self._settings.max_prompts, "input"):
            ids = await encode_prompt(self._texts, given, facts, truncate, param="input")
            prompts.append(fit(ids, facts.max_len, PARAMS, truncate, "input"))
        turns = PromptGate(self._settings.prompts_at_once, submit.deadline)
        vectors = await gather([self._vector(turns, replace(submit, prompt=prompt)) for prompt in prompts])
        if call.dimensions is not None and call.dimensions != len(vectors[0]):
            raise Refusal(
                f"dimensions is {call.dimensions}, but this model's embeddings have {len(vectors[0])}: leave it out.",
                param="dimensions",
                code="unsupported_parameter",
            )
        spell = as_base64 if call.encoding_format == "base64" else list
        tokens = sum(map(len, prompts))
        data = [EmbeddingItem(index, spell(vector)) for index, vector in enumerate(vectors)]
        return msgspec.json.encode(EmbeddingReply(data, model, EmbeddingUsage(tokens, tokens)))

    def spell(self, problem: Problem) -> bytes:
        return openai_error(problem)

    async def _vector(self, turns: PromptGate, submit: Submit) -> list[float]:
        vector: list[float] | None = None
        async with turns.turn(lambda: self._backend.generate(submit)) as steps:
            async for items in steps:
                for item in items:
                    if isinstance(item, RequestDone):
                        vector = item.embedding
                    elif item.finish_reason in ("error", "abort"):
                        raise GenerationFailed(item.error)
        if vector is None:
            raise GenerationFailed()
        return unit(vector)


def unit(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]


def as_base64(vector: list[float]) -> str:
    """Little-endian float32, as clients unpack it."""
    packed = array("f", vector)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()
