"""OpenAI's /v1/responses: its answers, whole or as typed events. Nothing is stored."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from bankfull.serve.api.blocks import AnswerBlock, Began, Blocks, Change, ChosenToken, Ended, Grew
from bankfull.serve.api.calls import Caller, check_model, decode, new_id
from bankfull.serve.api.chat import Answer, AnswerStream, Chat
from bankfull.serve.api.errors import Problem, openai_error
from bankfull.serve.api.events import Turn, Usage
from bankfull.serve.api.openai.chat_completions import TokenLogprob, account_of, entries_of, logprobs_of
from bankfull.serve.api.openai.responses_call import (
    NAMES,
    ChosenFunction,
    FunctionTool,
    ReasoningOptions,
    ResponsesCall,
    Status,
    TextFormat,
    TextOptions,
    ask_of,
)
from bankfull.serve.api.own_names import own_names
from bankfull.serve.api.sse import EventStream, event
from bankfull.serve.api.switches import Switches
from bankfull.serve.settings import Settings
from bankfull.text.tokenizer import Tokenizer

# -- the answer


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[TokenLogprob] = []
    annotations: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    cost: float | msgspec.UnsetType = msgspec.UNSET


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(msgspec.Struct, kw_only=True):
    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningOptions
    temperature: float
    text: TextOptions
    tool_choice: str | ChosenFunction
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[Item] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False
    explain: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    """Account of the time, at the end and if the call has `explain`."""


_decoder = msgspec.json.Decoder(ResponsesCall)
_encode = msgspec.json.Encoder().encode
_ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class Responses:
    """The endpoint."""

    def __init__(self, chat: Chat, settings: Settings) -> None:
        self._chat, self._settings = chat, settings
        self._switches = Switches(chat.texts.template)

    async def answer(self, body: bytes, caller: Caller) -> bytes | EventStream:
        with own_names(NAMES):
            call = decode(body, _decoder)
            model = check_model(self._settings, call.model)
            defaults = self._chat.texts.defaults if self._settings.use_generation_config else {}
            ask = ask_of(call, caller, defaults, self._switches)
            answer = await self._chat.answer(ask)
        params, explain = ask.submit.params, ask.submit.explain
        reply = _opened(call, model, params.temperature, params.top_p)
        output = ResponseOutput(self._chat.texts.tokenizer, call.top_logprobs or 0)
        if call.stream:
            return ResponseStream(answer, reply, output, explain=explain)
        await output.blocks.add_all(answer)
        lines = entries_of(answer.usage, None, params.logprobs)
        return await self._chat.texts.run_if(lines, lambda: _encode(_closed(reply, output, answer, explain=explain)))

    def spell(self, problem: Problem) -> bytes:
        return openai_error(problem)


class ResponseOutput:
    """The items of an answer; each block is one, and keeps its id."""

    def __init__(self, tokenizer: Tokenizer, top_logprobs: int) -> None:
        self.blocks = Blocks()
        self._tokenizer, self._top = tokenizer, top_logprobs
        self._ids: list[str] = []

    def id_of(self, block: AnswerBlock) -> str:
        while len(self._ids) <= block.index:
            self._ids.append(new_id(_ID_PREFIXES[self.blocks.all[len(self._ids)].kind]))
        return self._ids[block.index]

    def items(self) -> list[Item]:
        return [self.item(block) for block in self.blocks.all]

    def item(self, block: AnswerBlock) -> Item:
        """The block's item as it stands: whole, cut short, or still open."""
        last = block.index == len(self.blocks.all) - 1
        cut_short = last and (self.blocks.cut_short or block is self.blocks.open)
        return self._item(block, "incomplete" if cut_short else "completed", [self.part(block)])

    def empty_item(self, block: AnswerBlock) -> Item:
        return self._item(block, "in_progress", [])

    def part(self, block: AnswerBlock) -> OutputText | ReasoningText:
        text = block.text
        return ReasoningText(text) if block.kind == "reasoning" else OutputText(text, self.logprobs(block.lines))

    def logprobs(self, lines: list[ChosenToken]) -> list[TokenLogprob]:
        if not lines:
            return []
        tokens, positions = [token for token, _ in lines], [line for _, line in lines]
        return logprobs_of(tokens, positions, self._tokenizer, self._top).content

    def _item(self, block: AnswerBlock, status: Status, parts: list[Any]) -> Item:
        name = self.id_of(block)
        if block.kind == "call":
            return FunctionCallItem(name, status, block.id, block.name, block.text if parts else "")
        return MessageItem(name, status, parts) if block.kind == "text" else ReasoningItem(name, status, parts)


def _opened(call: ResponsesCall, model: str, temperature: float, top_p: float) -> ResponseReply:
    text = call.text or TextOptions()
    return ResponseReply(
        id=new_id("resp_"),
        created_at=int(time.time()),
        model=model,
        instructions=call.instructions,
        max_output_tokens=call.max_output_tokens,
        metadata=call.metadata or {},
        parallel_tool_calls=call.parallel_tool_calls is not False,
        reasoning=call.reasoning or ReasoningOptions(),
        temperature=temperature,
        text=TextOptions(text.format or TextFormat("text")),
        tool_choice=call.tool_choice or "auto",
        tools=call.tools or [],
        top_logprobs=call.top_logprobs or 0,
        top_p=top_p,
        truncation=call.truncation or "disabled",
        user=call.user,
        safety_identifier=call.safety_identifier,
        prompt_cache_key=call.prompt_cache_key,
    )


def _closed(reply: ResponseReply, output: ResponseOutput, answer: Answer, *, explain: bool) -> ResponseReply:
    cut_short = output.blocks.cut_short
    return msgspec.structs.replace(
        reply,
        status="incomplete" if cut_short else "completed",
        output=output.items(),
        usage=_usage(answer.usage),
        incomplete_details=IncompleteDetails() if cut_short else None,
        completed_at=None if cut_short else int(time.time()),
        explain=account_of(answer) if explain else msgspec.UNSET,
    )


def _failed(reply: ResponseReply, output: ResponseOutput, problem: Problem) -> ResponseReply:
    code = "server_error" if problem.status >= 500 else "invalid_prompt"
    error = ResponseError("rate_limit_exceeded" if problem.status == 429 else code, problem.message)
    return msgspec.structs.replace(reply, status="failed", output=output.items(), error=error)


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
        msgspec.UNSET if usage.cost is None else usage.cost,
    )


class ResponseStream(AnswerStream):
    """The typed events of one answer."""

    def __init__(self, answer: Answer, reply: ResponseReply, output: ResponseOutput, *, explain: bool = False) -> None:
        super().__init__(answer)
        self._reply, self._output, self._explain = reply, output, explain
        self._sent = 0
        self._head = b""
        """The common part of the open block's deltas."""

    def spell(self, turns: list[Turn]) -> bytes:
        events = self._opening()
        for turn in turns:
            for change in self._output.blocks.add(turn):
                self._spell(change, events)
        return b"".join(events)

    def ending(self) -> bytes:
        reply = _closed(self._reply, self._output, self.answer, explain=self._explain)
        return b"".join(self._opening()) + self._event(f"response.{reply.status}", response=reply)

    def failure(self, problem: Problem) -> bytes:
        begun = self._sent > 0
        told = self._event("error", code=problem.code, message=problem.message, param=problem.param)
        if not begun:
            return told
        return told + self._event("response.failed", response=_failed(self._reply, self._output, problem))

    def _opening(self) -> list[bytes]:
        if self._sent:
            return []
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._reply) for name in names]

    def _event(self, name: str, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event(_encode(data), name)

    def _spell(self, change: Change, events: list[bytes]) -> None:
        match change:
            case Grew(block, text, lines):
                logprobs = b""
                if block.kind == "text":
                    logprobs = b',"logprobs":' + _encode(self._output.logprobs(lines))
                events.append(b'%b%d,"delta":%b%b}\n\n' % (self._head, self._sent, _encode(text), logprobs))
                self._sent += 1
            case Began(block):
                self._begin(block, events)
            case Ended(block):
                self._end(block, events)

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._output.id_of(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _begin(self, block: AnswerBlock, events: list[bytes]) -> None:
        item = self._output.empty_item(block)
        events.append(self._event("response.output_item.added", output_index=block.index, item=item))
        place = self._place(block)
        if block.kind != "call":
            # Not the block's own text: within one step it may have grown already.
            part = ReasoningText("") if block.kind == "reasoning" else OutputText("")
            events.append(self._event("response.content_part.added", **place, part=part))
        name = _event_name(block, "delta")
        data = _encode({"type": name, **place})
        self._head = f"event: {name}\ndata: ".encode() + data[:-1] + b',"sequence_number":'

    def _end(self, block: AnswerBlock, events: list[bytes]) -> None:
        place, item = self._place(block), self._output.item(block)
        if isinstance(item, FunctionCallItem):
            whole: dict[str, Any] = {"arguments": item.arguments}
        else:
            whole = {"text": item.content[0].text}
            if isinstance(item, MessageItem):
                whole["logprobs"] = item.content[0].logprobs
        events.append(self._event(_event_name(block, "done"), **place, **whole))
        if not isinstance(item, FunctionCallItem):
            events.append(self._event("response.content_part.done", **place, part=item.content[0]))
        events.append(self._event("response.output_item.done", output_index=block.index, item=item))


def _event_name(block: AnswerBlock, what: str) -> str:
    kinds = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
    return f"response.{kinds[block.kind]}.{what}"
