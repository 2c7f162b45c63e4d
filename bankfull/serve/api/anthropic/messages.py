"""Anthropic's /v1/messages and /v1/messages/count_tokens: their answers, whole or as events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.serve.api.anthropic.breakpoints import breakpoints_of
from bankfull.serve.api.anthropic.messages_call import NAMES, CountTokensCall, MessagesCall, ask_of, prompt_of
from bankfull.serve.api.anthropic.partial_json import partial_object
from bankfull.serve.api.blocks import AnswerBlock, Began, Blocks, Change, Ended, Grew
from bankfull.serve.api.calls import Caller, check_model, decode, new_id
from bankfull.serve.api.chat import Answer, AnswerStream, Chat
from bankfull.serve.api.errors import Problem
from bankfull.serve.api.events import Turn, Usage
from bankfull.serve.api.openai.chat_completions import account_of
from bankfull.serve.api.own_names import own_names
from bankfull.serve.api.sse import EventStream, event
from bankfull.serve.api.switches import Switches
from bankfull.serve.settings import Settings
from bankfull.submit import Submit

# -- the answer


class TextReply(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingReply(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""
    """Always empty: nothing is signed, but clients need the field."""


class ToolUseReply(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentReply = TextReply | ThinkingReply | ToolUseReply
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingDetails(msgspec.Struct):
    thinking_tokens: int


class CacheCreation(msgspec.Struct):
    """Prompt tokens that the call has newly pinned, by their lifetime."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(msgspec.Struct):
    input_tokens: int
    """Prompt tokens that were not in the cache and are not pinned there."""
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    cost: float | msgspec.UnsetType = msgspec.UNSET


class MessageReply(msgspec.Struct):
    id: str
    model: str
    content: list[ContentReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    explain: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    """Account of the time, if the call has `explain`."""


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageError(msgspec.Struct):
    type: str
    message: str


class MessageErrorReply(msgspec.Struct):
    """Anthropic's format of every error."""

    error: MessageError
    type: Literal["error"] = "error"


_decoder = msgspec.json.Decoder(MessagesCall)
_count_decoder = msgspec.json.Decoder(CountTokensCall)
_encode = msgspec.json.Encoder().encode
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(problem: Problem) -> bytes:
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    return _encode(MessageErrorReply(MessageError(_ERROR_TYPES.get(problem.status, other), problem.message)))


class Messages:
    """The endpoint."""

    def __init__(self, chat: Chat, settings: Settings) -> None:
        self._chat, self._settings = chat, settings
        self._switches = Switches(chat.texts.template)

    async def answer(self, body: bytes, caller: Caller) -> bytes | EventStream:
        with own_names(NAMES):
            call = decode(body, _decoder)
            model = check_model(self._settings, call.model)
            defaults = self._chat.texts.defaults if self._settings.use_generation_config else {}
            answer = await self._chat.answer(ask_of(call, caller, defaults, self._switches))
        if call.stream:
            return MessageStream(answer, model, explain=bool(call.explain))
        blocks = Blocks()
        await blocks.add_all(answer)
        content = [_content(block) for block in blocks.all]
        return _encode(
            MessageReply(
                new_id("msg_"),
                model,
                content,
                *_stopped(blocks.end),
                _usage(answer.usage),
                explain=account_of(answer) if call.explain else msgspec.UNSET,
            )
        )

    def spell(self, problem: Problem) -> bytes:
        return anthropic_error(problem)


class CountTokens:
    """The endpoint that only counts."""

    def __init__(self, chat: Chat, settings: Settings) -> None:
        self._chat, self._settings = chat, settings
        self._switches = Switches(chat.texts.template)

    async def answer(self, body: bytes, caller: Caller) -> bytes | EventStream:
        with own_names(NAMES):
            call = decode(body, _count_decoder)
            check_model(self._settings, call.model)
            breakpoints_of(call)
            prompt = await self._chat.prompt(prompt_of(call, Submit([], SamplingParams()), self._switches), fits=False)
        return _encode(TokenCount(len(prompt)))

    def spell(self, problem: Problem) -> bytes:
        return anthropic_error(problem)


def _content(block: AnswerBlock) -> ContentReply:
    if block.kind == "call":
        return ToolUseReply(block.id, block.name, partial_object(block.text))
    return TextReply(block.text) if block.kind == "text" else ThinkingReply(block.text)


def _stopped(end: Delta | None) -> tuple[StopReason, str | None]:
    if end is None or end.finish_reason == "length":
        return "max_tokens", None
    if end.finish_reason == "tool_calls":
        return "tool_use", None
    return ("stop_sequence", end.stop_reason) if isinstance(end.stop_reason, str) else ("end_turn", None)


def _usage(usage: Usage) -> MessageUsage:
    return MessageUsage(
        usage.prompt_tokens - usage.cached_tokens - usage.written_5m - usage.written_1h,
        usage.cached_tokens,
        usage.completion_tokens,
        ThinkingDetails(usage.reasoning_tokens),
        usage.written_5m + usage.written_1h,
        CacheCreation(usage.written_5m, usage.written_1h),
        msgspec.UNSET if usage.cost is None else usage.cost,
    )


class MessageStream(AnswerStream):
    """The events of one answer."""

    def __init__(self, answer: Answer, model: str, *, explain: bool = False) -> None:
        super().__init__(answer)
        self._model, self._explain = model, explain
        self._blocks = Blocks()
        self._head = b""
        """The common part of the open block's deltas."""
        self._begun = False

    def spell(self, turns: list[Turn]) -> bytes:
        events = self._opening()
        for turn in turns:
            events += map(self._spelled, self._blocks.add(turn))
        return b"".join(events)

    def failure(self, problem: Problem) -> bytes:
        return event(anthropic_error(problem), "error")

    def _opening(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        # The number of cached tokens is sent at the end, when it is known.
        usage = _usage(Usage(self.answer.usage.prompt_tokens))
        message = MessageReply(new_id("msg_"), self._model, [], None, None, usage)
        return [_event("message_start", message=message), _event("ping")]

    def ending(self) -> bytes:
        reason, sequence = _stopped(self._blocks.end)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        told = {"explain": account_of(self.answer)} if self._explain else {}
        usage = _usage(self.answer.usage)
        last = [_event("message_delta", delta=delta, usage=usage, **told), _event("message_stop")]
        return b"".join([*self._opening(), *last])

    def _spelled(self, change: Change) -> bytes:
        match change:
            case Grew(_, text, _):
                return b"%b%b}}\n\n" % (self._head, _encode(text))
            case Began(block):
                self._head = _delta_head(block)
                # Not the block itself: within one step it may have grown already.
                empty = AnswerBlock(block.index, block.kind, block.id, block.name)
                return _event("content_block_start", index=block.index, content_block=_content(empty))
            case Ended(block):
                return _event("content_block_stop", index=block.index)


def _event(name: str, **fields: Any) -> bytes:
    return event(_encode({"type": name, **fields}), name)


def _delta_head(block: AnswerBlock) -> bytes:
    kinds = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
    kind, field = kinds.get(block.kind, ("input_json_delta", "partial_json"))
    whole = _event("content_block_delta", index=block.index, delta={"type": kind, field: ""})
    return whole.removesuffix(b'""}}\n\n')
