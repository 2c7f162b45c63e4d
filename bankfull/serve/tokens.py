"""/tokenize and /detokenize, in the shape that vLLM's clients know."""

from __future__ import annotations

from typing import Any

import msgspec

from bankfull.sample.params import SamplingParams
from bankfull.serve.calls import Caller
from bankfull.serve.chat import Ask, Chat, facts_of
from bankfull.serve.errors import Problem, Refusal, openai_error
from bankfull.serve.openai_chat import Message, Tool, template_messages, template_tools
from bankfull.serve.openai_common import check_model
from bankfull.serve.prompts import checked_ids
from bankfull.serve.schema import decode
from bankfull.serve.settings import Settings


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
        texts = self._chat.texts
        if call.messages is not None:
            ask = Ask(
                messages=template_messages(call.messages), params=SamplingParams(), tools=template_tools(call.tools),
                template_options=call.chat_template_kwargs or {},
            )  # fmt: skip
            ids = await self._chat.prompt(ask)
        else:
            ids = await texts.run(texts.encode, call.prompt or "", None, add_special=call.add_special_tokens)
        strings = [texts.tokenizer.token_text(token) for token in ids] if call.return_token_strs else None
        return msgspec.json.encode(TokenizeReply(len(ids), facts_of(self._chat.backend).max_len, ids, strings))

    def spell(self, problem: Problem) -> bytes:
        return openai_error(problem)


class Detokenize:
    """The endpoint."""

    def __init__(self, chat: Chat, settings: Settings) -> None:
        self._chat, self._settings = chat, settings

    async def answer(self, body: bytes, caller: Caller) -> bytes:
        call = decode(body, _detokenize)
        check_model(self._settings, call.model)
        texts = self._chat.texts
        ids = await checked_ids(texts, call.tokens, facts_of(self._chat.backend).vocab, "tokens")
        text = await texts.run(texts.tokenizer.decode, ids, skip_special=False)
        return msgspec.json.encode(DetokenizeReply(text))

    def spell(self, problem: Problem) -> bytes:
        return openai_error(problem)
