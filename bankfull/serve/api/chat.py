"""The core of every chat-like API: from a conversation to the events of its answer.

An API translates its own spelling into an `Ask`, awaits `Chat.answer`, and spells what the `Answer` yields: for each
engine step the `Turn`s of all samples that it added to. Nothing here knows how any API writes them down.

    answer = await chat.answer(ask)          # refused here, before anything was sent
    async with aclosing(answer):             # leaving early aborts the request
        async for turns in answer: ...
    answer.usage
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bankfull.sample.params import SamplingParams
from bankfull.serve.api.errors import GenerationFailed, Refusal
from bankfull.serve.api.events import Finish, OutputParser, Reasoning, Text, ToolArguments, ToolStart, Turn, Usage
from bankfull.serve.api.schema import asked_bytes
from bankfull.serve.api.texts import Texts, fit, is_short, kept_tokens
from bankfull.serve.engine.backend import Backend, Unavailable
from bankfull.serve.engine.wire import Done, Facts, Piece
from bankfull.serve.parsers import grammar_for, parser_for

ENDING_TOKENS = 64
"""Of a prompt: enough to see whether it ends inside of a thought that the template has opened."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(slots=True, kw_only=True)
class Ask:
    """A conversation that wants an answer."""

    messages: list[dict[str, Any]]
    """As chat templates take them: role, content as one text, tool_calls whose arguments are objects, ..."""
    params: SamplingParams
    tools: list[dict[str, Any]] | None = None
    """As chat templates take them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: ToolChoice = "auto"
    parallel_tools: bool = True
    reasoning: bool = True
    """Tell thoughts apart from the answer; False leaves them in its text."""
    template_options: dict[str, Any] = field(default_factory=dict)
    truncate: int | None = None
    """Keep so many of the prompt's last tokens; -1: as many as fit. None: a prompt that is too long is refused."""
    priority: int = 0
    salt: str = ""
    deadline: float | None = None
    """Seconds from now."""
    explain: bool = False
    """Tell where the time went: `Answer.done.account`."""


class Chat:
    def __init__(self, backend: Backend, texts: Texts) -> None:
        self.backend, self.texts = backend, texts

    async def answer(self, ask: Ask) -> Answer:
        """Renders and checks the conversation; the engine hears of it when the answer is first awaited."""
        started = time.monotonic()
        context = facts_of(self.backend).max_len
        tools = callable_tools(ask)
        self.backend.expect(ask.params.n, ask.priority)
        prompt = await self.prompt(ask)
        prompt = fit(prompt, context, ask.params, ask.truncate, "messages")
        ending = self.texts.tokenizer.decode(prompt[-ENDING_TOKENS:], skip_special=False)
        # Tools may be as large as a body, and each sample has a parser that knows them.
        params, parsers = await self.texts.run_if(
            asked_bytes() if tools else 0, lambda: self._readers(ask, tools, ending)
        )
        left = None if ask.deadline is None else max(0.0, ask.deadline - (time.monotonic() - started))
        steps = self.backend.generate(
            prompt, params, priority=ask.priority, salt=ask.salt, deadline=left, explain=ask.explain
        )
        return Answer(prompt, steps, parsers)

    def _readers(
        self, ask: Ask, tools: list[dict[str, Any]] | None, ending: str
    ) -> tuple[SamplingParams, list[OutputParser]]:
        """The params with what forces a call, and a parser for each sample."""
        source, choice = self._source(tools), _as_template_choice(ask.tool_choice)
        takes_tools = self.texts.takes_tools
        params = ask.params
        if tools and ask.tool_choice != "auto":
            grammar = grammar_for(
                source,
                tools,
                choice,
                ask.parallel_tools,
                takes_tools=takes_tools,
                reasoning=ask.reasoning,
                prompt=ending,
            )
            if grammar is None:
                raise Refusal(
                    "This model's way of writing tool calls cannot be forced: set tool_choice to auto.",
                    param="tool_choice",
                )
            params = replace(params, structured=grammar)
        parsers = [
            parser_for(
                source,
                tools=tools,
                tool_choice=choice,
                reasoning=ask.reasoning,
                takes_tools=takes_tools,
                parallel=ask.parallel_tools,
                prompt=ending,
            )
            for _ in range(params.n)
        ]
        if any(parser.wants_special_tokens for parser in parsers):
            params = replace(params, skip_special_tokens=False)
        return params, parsers

    async def prompt(self, ask: Ask, *, fits: bool = True) -> list[int]:
        """The conversation as token ids: no more than the context holds unless `fits` is False or the call lets it be
        cut. What could never fit is refused by its length."""
        tools = callable_tools(ask)
        context = facts_of(self.backend).max_len
        keep = kept_tokens(ask.truncate, context)
        # What a template makes of a caller's options nobody knows; switches are in common use, and harmless.
        plain = tools is None and all(isinstance(value, bool) for value in ask.template_options.values())
        plain = plain and (self.texts.template is None or self.texts.template.at_once)
        return await self.texts.run_short(
            plain and is_short(ask.messages),
            asked_bytes(),
            lambda: self.texts.encode_chat(
                ask.messages, context, fits=fits, keep=keep, tools=tools, options=ask.template_options
            ),
        )

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        template = self.texts.template
        if template is None:
            return ""
        return template.tool_source if tools else template.source


def callable_tools(ask: Ask) -> list[dict[str, Any]] | None:
    """The tools that the model may call; None when there are none. What contradicts itself is refused."""
    tools = None if ask.tool_choice == "none" else ask.tools or None
    named = ask.tool_choice.name if isinstance(ask.tool_choice, NamedTool) else None
    if not tools and (named is not None or ask.tool_choice == "required"):
        raise Refusal("tool_choice asks for a call, but there are no tools: add them.", param="tool_choice")
    if named is not None and named not in [tool["function"]["name"] for tool in tools or ()]:
        raise Refusal(f"tool_choice names {named!r}, which is not among tools.", param="tool_choice")
    if tools and ask.params.structured is not None:
        raise Refusal(
            "A structured output leaves no room for tool calls: leave one of them out, or set tool_choice to none.",
            param="tools",
        )
    return tools


class Answer:
    """What comes of an `Ask`. Iterating gives, for each engine step, what it added to which sample."""

    __slots__ = ("_calls", "_parsers", "_steps", "_unsaid", "done", "prompt", "usage")

    def __init__(
        self, prompt: list[int], steps: AsyncIterator[list[Piece | Done]], parsers: list[OutputParser]
    ) -> None:
        self.prompt = prompt
        self.usage = Usage(len(prompt))
        self.done: Done | None = None
        """The engine's own account, once all samples have ended."""
        self._steps = steps
        self._parsers = parsers
        self._calls = [False] * len(parsers)
        self._unsaid = [0] * len(parsers)

    @property
    def samples(self) -> int:
        return len(self._parsers)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[Turn]:
        turns: list[Turn] = []
        for item in await anext(self._steps):
            if isinstance(item, Piece):
                turns.append(self._turn(item))
            else:
                self.done = item
                self.usage.cached_tokens = item.cached_tokens
        return turns

    async def aclose(self) -> None:
        """Abort what still runs."""
        close = getattr(self._steps, "aclose", None)
        if close is not None:
            await close()

    def _turn(self, piece: Piece) -> Turn:
        if piece.finish == "error" or piece.finish == "abort":
            raise GenerationFailed(piece.error)
        index = piece.index
        parser = self._parsers[index]
        events = parser.push(piece.text) if piece.text else []
        finish = None
        if piece.finish is not None:
            events = events + parser.finish()
        self._unsaid[index] += len(piece.tokens)
        self.usage.completion_tokens += len(piece.tokens)
        for event in events:
            if isinstance(event, ToolStart):
                self._calls[index] = True
            elif isinstance(event, Reasoning):
                self.usage.reasoning_tokens += self._unsaid[index]
            self._unsaid[index] = 0
        if piece.finish is not None:
            called = self._calls[index] and piece.finish == "stop"
            finish = Finish("tool_calls" if called else piece.finish, piece.stop)
        return Turn(index, events, piece.tokens, piece.logprobs, finish)


@dataclass(slots=True)
class Call:
    """A whole tool call; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Sample:
    """One whole answer."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, tuple[float, str]]] = field(default_factory=list)
    finish: Finish | None = None


async def collect(answer: Answer) -> list[Sample]:
    """The whole answer, for callers that do not stream."""
    samples = [Sample(index) for index in range(answer.samples)]
    texts: list[list[str]] = [[] for _ in samples]
    thoughts: list[list[str]] = [[] for _ in samples]
    arguments: list[list[list[str]]] = [[] for _ in samples]
    try:
        async for turns in answer:
            for turn in turns:
                sample = samples[turn.index]
                sample.tokens += turn.tokens
                sample.logprobs += turn.logprobs or ()
                sample.finish = turn.finish or sample.finish
                for event in turn.events:
                    match event:
                        case Text(text):
                            texts[turn.index].append(text)
                        case Reasoning(text):
                            thoughts[turn.index].append(text)
                        case ToolStart(_, id, name):
                            sample.calls.append(Call(id, name))
                            arguments[turn.index].append([])
                        case ToolArguments(number, text):
                            arguments[turn.index][number].append(text)
    finally:
        await answer.aclose()
    for sample in samples:
        sample.text, sample.reasoning = "".join(texts[sample.index]), "".join(thoughts[sample.index])
        for call, pieces in zip(sample.calls, arguments[sample.index], strict=True):
            call.arguments = "".join(pieces)
    return samples


def facts_of(backend: Backend) -> Facts:
    facts = backend.facts
    if facts is None:
        raise Unavailable("The model is being loaded; try again in a moment.")
    return facts


def _as_template_choice(choice: ToolChoice) -> str | dict[str, Any]:
    """The spelling that the parsers take."""
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice
