"""OpenAI's /v1/chat/completions: the schema of its calls, and of its answers, whole or streamed."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any, Literal

import msgspec

from bankfull.serve.api.calls import (
    Caller,
    SamplingFields,
    StreamOptions,
    check_model,
    decode,
    new_id,
    refuse_parts,
    sampling_params,
    submit_of,
    truncation_of,
)
from bankfull.serve.api.chat import Answer, AnswerStream, Ask, Chat, NamedTool, ToolChoice, WholeSample, collect
from bankfull.serve.api.errors import Problem, Refusal, openai_error
from bankfull.serve.api.events import Event, Reasoning, Text, ToolStart, Turn, Usage
from bankfull.serve.api.openai.chunk_drafts import ChunkDrafts, chunk_drafts
from bankfull.serve.api.openai.common import (
    FINGERPRINT,
    PromptLogprob,
    TokenLine,
    UsageReply,
    prompt_logprobs_reply,
    usage_reply,
)
from bankfull.serve.api.sse import DONE, EventStream, event
from bankfull.serve.api.switches import Effort, Switches
from bankfull.serve.engine.prompt_lines import unpack_lines
from bankfull.serve.settings import Settings
from bankfull.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
MAX_MESSAGES = 4096
MAX_TOOLS = 256


# -- the call


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[dict[str, Any]] | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionName
    type: Literal["function"] = "function"


class ChatCall(SamplingFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None


# -- the answer


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ReplyMessage(msgspec.Struct, omit_defaults=True):
    content: str | None
    refusal: None
    role: Literal["assistant"] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ReplyMessage
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class ChatReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str = FINGERPRINT
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    explain: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChunkDelta
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    drafts: ChunkDrafts | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageReply | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str = FINGERPRINT
    explain: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET


_decoder = msgspec.json.Decoder(ChatCall)
_encode = msgspec.json.Encoder().encode


class ChatCompletions:
    """The endpoint."""

    def __init__(self, chat: Chat, settings: Settings) -> None:
        self._chat, self._settings = chat, settings
        self._switches = Switches(chat.texts.template)

    async def answer(self, body: bytes, caller: Caller) -> bytes | EventStream:
        call = decode(body, _decoder)
        model = check_model(self._settings, call.model)
        answer = await self._chat.answer(self._ask(call, caller))
        tokenizer, top = self._chat.texts.tokenizer, _top_logprobs(call)
        if call.stream:
            options = call.stream_options or StreamOptions()
            return ChatStream(answer, tokenizer, model, options, top, explain=bool(call.explain))
        samples = await collect(answer)

        def spelled() -> bytes:
            lines = unpack_lines(answer.done.prompt_logprobs if answer.done else None, answer.prompt, tokenizer)
            return _encode(
                ChatReply(
                    new_id("chatcmpl-"),
                    int(time.time()),
                    model,
                    [choice_of(sample, tokenizer, top) for sample in samples],
                    usage_reply(answer.usage),
                    prompt_logprobs=prompt_logprobs_reply(lines),
                    explain=account_of(answer) if call.explain else msgspec.UNSET,
                )
            )

        return await self._chat.texts.run_if(entries_of(answer.usage, call.prompt_logprobs, top), spelled)

    def spell(self, problem: Problem) -> bytes:
        return openai_error(problem)

    def _ask(self, call: ChatCall, caller: Caller) -> Ask:
        _refuse_contradictions(call)
        defaults = self._chat.texts.defaults if self._settings.use_generation_config else {}
        params = sampling_params(call, defaults, logprobs=_top_logprobs(call), max_tokens=call.max_completion_tokens)
        if call.stream_options is not None and call.stream_options.include_drafts:
            params = replace(params, include_drafts=True)
        options = dict(call.chat_template_kwargs or {})
        if call.reasoning_effort is not None:
            options |= self._switches.effort(call.reasoning_effort, "reasoning_effort")
        return Ask(
            messages=template_messages(call.messages),
            submit=submit_of(call, caller, params, explain=bool(call.explain)),
            tools=template_tools(call.tools),
            tool_choice=tool_choice_of(call.tool_choice),
            parallel_tools=call.parallel_tool_calls is not False,
            reasoning=call.include_reasoning is not False,
            template_options=options,
            truncate=truncation_of(call.truncate_prompt_tokens),
        )


def entries_of(usage: Usage, prompt: int | None, top: int | None) -> int:
    """About the number of logprobs in an answer."""
    entries = 0 if prompt is None else usage.prompt_tokens * (prompt + 1)
    return entries + (0 if top is None else usage.completion_tokens * (top + 1))


def _top_logprobs(call: ChatCall) -> int | None:
    return (call.top_logprobs or 0) if call.logprobs else None


def _refuse_contradictions(call: ChatCall) -> None:
    if call.max_tokens is not None and call.max_completion_tokens is not None:
        raise Refusal("max_tokens and max_completion_tokens mean the same: give one.", param="max_tokens")
    if call.top_logprobs is not None and not call.logprobs:
        raise Refusal("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if call.stream_options is not None and not call.stream:
        raise Refusal("stream_options is for streams only: set stream, or leave it out.", param="stream_options")
    if call.stream and call.prompt_logprobs is not None:
        raise Refusal("prompt_logprobs cannot be streamed: leave one of them out.", param="prompt_logprobs")


# -- from OpenAI's messages to those of chat templates


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    if not messages:
        raise Refusal("messages is empty: give at least one.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise Refusal(f"There are {len(messages)} messages: give at most {MAX_MESSAGES}.", param="messages")
    parts = sum(len(m.content) if isinstance(m.content, list) else 0 for m in messages)
    refuse_parts(parts + sum(len(m.tool_calls or ()) for m in messages), "messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise Refusal(
            f"{where}.role is {message.role[:40]!r}: use {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    # Templates know only the older name of this role.
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = _text_of(message.content, where)
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if thought := message.reasoning or message.reasoning_content:
        turn["reasoning_content"] = thought
    if message.tool_calls:
        turn["tool_calls"] = [_template_call(call, where) for call in message.tool_calls]
    elif message.content is None:
        raise Refusal(f"{where}.content is missing.", param=f"{where}.content")
    return turn


def _text_of(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Refusal(
                f"{where}.content[{number}] has the type {str(kind)[:40]!r}: only parts of type 'text' are read.",
                param=f"{where}.content[{number}]",
                code="unsupported_content",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _template_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates write the arguments themselves, so they take them as an object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise Refusal(
            f"{where}.tool_calls holds arguments of {call.function.name[:80]!r} that are no JSON object.",
            param=f"{where}.tool_calls",
        ) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise Refusal(f"There are {len(tools)} tools: give at most {MAX_TOOLS}.", param="tools")
    names = [tool.function.name for tool in tools]
    for name in names:
        if not TOOL_NAME.fullmatch(name):
            raise Refusal(f"tools has the name {name[:80]!r}: use letters, digits, _, -, . and :.", param="tools")
    if len(set(names)) < len(names):
        raise Refusal("tools has a name twice: names must differ.", param="tools")
    functions: list[dict[str, Any]] = [{"type": "function", "function": msgspec.to_builtins(t.function)} for t in tools]
    return functions


def tool_choice_of(choice: str | ChosenTool | None) -> ToolChoice:
    if isinstance(choice, ChosenTool):
        return NamedTool(choice.function.name)
    if choice is None or choice == "auto":
        return "auto"
    if choice == "none":
        return "none"
    if choice == "required":
        return "required"
    raise Refusal(f"tool_choice is {choice[:40]!r}: use auto, none, required, or name a function.", param="tool_choice")


# -- answers in OpenAI's format


def choice_of(sample: WholeSample, tokenizer: Tokenizer, top_logprobs: int | None) -> ChatChoice:
    """`top_logprobs` None: no log-probabilities at all."""
    thought = sample.reasoning or None
    calls = [ToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in sample.calls]
    content = None if calls and not sample.text else sample.text
    message = ReplyMessage(content, None, "assistant", thought, thought, calls or None)
    lines = None
    if top_logprobs is not None:
        lines = logprobs_of(sample.tokens, sample.logprobs, tokenizer, top_logprobs)
    return ChatChoice(sample.index, message, lines, sample.finish_reason, sample.stop_reason)


def logprobs_of(tokens: list[int], lines: list[TokenLine], tokenizer: Tokenizer, top: int | None = None) -> Logprobs:
    """The logprob of each token, and of the `top` likeliest at its position (None: all that the engine sends)."""
    return Logprobs([_token_logprob(token, line, tokenizer, top) for token, line in zip(tokens, lines, strict=False)])


def _token_logprob(token: int, line: TokenLine, tokenizer: Tokenizer, top: int | None) -> TokenLogprob:
    # The engine also sends the chosen token when it is not among the likeliest.
    ranked = sorted(line.items(), key=lambda item: -item[1][0])[:top]
    tops = [TopLogprob(text, value, list(tokenizer.token_bytes(other))) for other, (value, text) in ranked]
    value, text = line[token]
    return TokenLogprob(text, value, list(tokenizer.token_bytes(token)), tops)


def account_of(answer: Answer) -> dict[str, Any] | None:
    """The account of a whole answer's time."""
    return None if answer.done is None else answer.done.account


class ChatStream(AnswerStream):
    """The chunks of one answer. All but the delta is the same in each of them, and encoded once."""

    def __init__(
        self,
        answer: Answer,
        tokenizer: Tokenizer,
        model: str,
        options: StreamOptions,
        top_logprobs: int | None = None,
        *,
        explain: bool = False,
    ) -> None:
        super().__init__(answer)
        self._tokenizer, self._options, self._top, self._explain = tokenizer, options, top_logprobs, explain
        empty = ChatChunk(new_id("chatcmpl-"), int(time.time()), model, [])
        self._empty = empty
        head, _, tail = _encode(empty).partition(b'"choices":[]')
        self._head = b"data: " + head + b'"choices":['
        usage = b',"usage":null' if options.include_usage else b""
        self._tail = b"}]" + usage + tail + b"\n\n"
        self._begun = False

    def spell(self, turns: list[Turn]) -> bytes:
        chunks = [] if self._begun else self._opening()
        self._begun = True
        for turn in turns:
            self._spell(turn, chunks)
        return b"".join(chunks)

    def failure(self, problem: Problem) -> bytes:
        return event(openai_error(problem)) + DONE

    def _opening(self) -> list[bytes]:
        role = _encode(ChunkDelta("assistant", ""))
        return [self._chunk(index, role) for index in range(self.answer.samples)]

    def ending(self) -> bytes:
        wants_usage = self._options.include_usage
        if not wants_usage and not self._explain:
            return DONE
        last = msgspec.structs.replace(
            self._empty,
            usage=usage_reply(self.answer.usage) if wants_usage else msgspec.UNSET,
            explain=account_of(self.answer) if self._explain else msgspec.UNSET,
        )
        return event(_encode(last)) + DONE

    def _spell(self, turn: Turn, chunks: list[bytes]) -> None:
        delta, events = turn
        logprobs = b"null"
        if delta.logprobs:
            logprobs = _encode(logprobs_of(delta.token_ids, delta.logprobs, self._tokenizer, self._top))
            events = events or [Text("")]  # tokens whose text is held back still have log-probabilities
        if delta.drafts is not None and delta.token_ids:
            logprobs += b',"drafts":' + _encode(chunk_drafts(delta, delta.drafts, self._tokenizer))
            events = events or [Text("")]
        for item in events:
            chunks.append(self._chunk(delta.index, _spelled(item), logprobs))
            logprobs = b"null"
        if delta.finish_reason is not None:
            reasons = _encode(delta.finish_reason), _encode(delta.stop_reason)
            ending = b'{"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b' % reasons
            chunks.append(self._closed(delta.index, ending))

    def _chunk(self, index: int, delta: bytes, logprobs: bytes = b"null") -> bytes:
        return self._closed(index, b'{"delta":%b,"logprobs":%b,"finish_reason":null' % (delta, logprobs))

    def _closed(self, index: int, choice: bytes) -> bytes:
        """A whole event from a choice without its index and end."""
        tail = self._tail
        if self._options.continuous_usage_stats:
            tail = tail.replace(b'"usage":null', b'"usage":' + _encode(usage_reply(self.answer.usage)), 1)
        return b'%b%b,"index":%d%b' % (self._head, choice, index, tail)


def _spelled(item: Event) -> bytes:
    match item:
        case Text(text):
            return b'{"content":' + _encode(text) + b"}"
        case Reasoning(text):
            return _encode(ChunkDelta(reasoning=text, reasoning_content=text))
        case ToolStart(index, id, name):
            return _encode(ChunkDelta(tool_calls=[ToolCallDelta(index, id, "function", FunctionDelta(name, ""))]))
    return _encode(ChunkDelta(tool_calls=[ToolCallDelta(item.index, function=FunctionDelta(arguments=item.text))]))
