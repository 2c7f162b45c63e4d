"""/tokenize and /detokenize, in the shape that vLLM's clients know."""

from __future__ import annotations

from typing import Any

import msgspec

from bankfull.sample.params import SamplingParams
from bankfull.serve.api.calls import Caller, check_model, decode
from bankfull.serve.api.chat import Ask, Chat, facts_of
from bankfull.serve.api.errors import Problem, Refusal, openai_error
from bankfull.serve.api.openai.chat_completions import Message, Tool, template_messages, template_tools
from bankfull.serve.api.openai.prompts import checked_ids
from bankfull.serve.api.texts import Slices
from bankfull.serve.settings import Settings
from bankfull.submit import Submit
from bankfull.text.tokenizer import Tokenizer

MAX_DETOKENIZED = 1 << 18
PIECE = 1 << 14
"""Tokens that are spelled in one go."""


class TokenizeCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeReply(msgspec.Struct):
    prompt: str


_tokenize = msgspec.json.Decoder(TokenizeCall)
_detokenize = msgspec.json.Decoder(DetokenizeCall)


class Tokenize:
    """The endpoint."""

    def __init__(self, chat: Chat, settings: Settings) -> None:
        self._chat, self._settings = chat, settings

    async def answer(self, body: bytes, caller: Caller) -> bytes:
        call = decode(body, _tokenize)
        check_model(self._settings, call.model)
        if (call.prompt is None) == (call.messages is None):
            raise Refusal("Give exactly one of prompt and messages.", param="prompt")
        texts, context = self._chat.texts, facts_of(self._chat.backend).max_len
        if call.messages is not None:
            ask = Ask(
                messages=template_messages(call.messages),
                submit=Submit([], SamplingParams()),
                tools=template_tools(call.tools),
                template_options=call.chat_template_kwargs or {},
            )
            ids = await self._chat.prompt(ask, fits=False)
        else:
            text, add_special = call.prompt or "", call.add_special_tokens
            ids = await texts.run(len(text), lambda: texts.encode(text, context, add_special=add_special, fits=False))
        return await texts.run(len(ids), lambda: _spelled(ids, context, texts.tokenizer, call.return_token_strs))

    def spell(self, problem: Problem) -> bytes:
        return openai_error(problem)


def _spelled(ids: list[int], context: int, tokenizer: Tokenizer, strings: bool) -> Slices[bytes]:
    """The reply; its lists are written piece by piece."""
    empty = msgspec.json.encode(TokenizeReply(len(ids), context, [], [] if strings else None))
    tokens, texts = [], []
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        tokens.append(msgspec.json.encode(piece)[1:-1])
        if strings:
            texts.append(msgspec.json.encode([tokenizer.token_text(token) for token in piece])[1:-1])
        yield len(piece)
    filled = empty.replace(b'"tokens":[', b'"tokens":[' + b",".join(tokens), 1)
    return filled.replace(b'"token_strs":[', b'"token_strs":[' + b",".join(texts), 1)


class Detokenize:
    """The endpoint."""

    def __init__(self, chat: Chat, settings: Settings) -> None:
        self._chat, self._settings = chat, settings

    async def answer(self, body: bytes, caller: Caller) -> bytes:
        call = decode(body, _detokenize)
        check_model(self._settings, call.model)
        texts = self._chat.texts
        if len(call.tokens) > MAX_DETOKENIZED:
            raise Refusal(f"tokens has {len(call.tokens)} entries: give at most {MAX_DETOKENIZED}.", param="tokens")
        ids = await checked_ids(texts, call.tokens, facts_of(self._chat.backend).vocab, "tokens")
        text = await texts.run(len(ids), lambda: texts.tokenizer.decode(ids, skip_special=False))
        return msgspec.json.encode(DetokenizeReply(text))

    def spell(self, problem: Problem) -> bytes:
        return openai_error(problem)
