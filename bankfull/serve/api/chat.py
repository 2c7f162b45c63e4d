"""The core of every chat-like API: from a conversation to the events of its answer.

An API translates its own call into an `Ask`, awaits `Chat.answer`, and writes the `Turn`s that the `Answer` yields for
each engine step in its own format. Nothing here depends on the format of an API.

    answer = await chat.answer(ask)          # refused here, before anything was sent
    async with aclosing(answer):             # leaving early aborts the request
        async for turns in answer: ...
    answer.usage
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bankfull.outputs import Delta, Logprob
from bankfull.sample.params import SamplingParams
from bankfull.serve.api.calls import asked_bytes
from bankfull.serve.api.errors import GenerationFailed, Problem, Refusal
from bankfull.serve.api.events import OutputParser, Reasoning, Text, ToolArguments, ToolStart, Turn, Usage
from bankfull.serve.api.prices import TokenPrices
from bankfull.serve.api.texts import Slices, Texts, fit, is_short, kept_tokens
from bankfull.serve.engine.backend import Backend, Unavailable
from bankfull.serve.engine.wire import Facts, RequestDone
from bankfull.serve.parsers import grammar_for, parser_for
from bankfull.submit import Submit
from bankfull.types import Keep

SHORT_PIN = 300.0
"""Seconds up to which a pin has the price of a short one."""
ENDING_TOKENS = 64
"""Last tokens of a prompt that show whether it ends inside of reasoning that the template has opened."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(slots=True)
class CacheMark:
    """A place in a conversation: the conversation, and its tools, with a sentinel at that place. The prompt up to there
    is pinned in the prefix cache."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    seconds: float
    """Time since its last use after which the pin ends."""


@dataclass(slots=True, kw_only=True)
class Ask:
    """A conversation that wants an answer."""

    messages: list[dict[str, Any]]
    """Messages as chat templates take them: role, content as one text, tool_calls whose arguments are objects, ..."""
    submit: Submit
    """The request, without its prompt."""
    tools: list[dict[str, Any]] | None = None
    """Tools as chat templates take them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: ToolChoice = "auto"
    parallel_tools: bool = True
    reasoning: bool = True
    """Whether reasoning is separated from the answer; False leaves it in the text."""
    template_options: dict[str, Any] = field(default_factory=dict)
    truncate: int | None = None
    """Number of the prompt's last tokens to keep; -1: as many as fit. None: a prompt that is too long is refused."""
    marks: list[CacheMark] = field(default_factory=list)


class Chat:
    def __init__(
        self, backend: Backend, texts: Texts, prices: TokenPrices | None = None, pin_minimum: int = 1024
    ) -> None:
        """`pin_minimum`: tokens that a prefix needs to be pinned."""
        self.backend, self.texts = backend, texts
        self._prices, self._pin_minimum = prices, pin_minimum

    async def answer(self, ask: Ask) -> Answer:
        """Renders and checks the conversation, and submits it to the engine."""
        context, params = facts_of(self.backend).max_len, ask.submit.params
        tools = callable_tools(ask)
        self.backend.expect(params.n, ask.submit.priority)
        prompt = await self.prompt(ask)
        prompt = fit(prompt, context, params, ask.truncate, "messages")
        ending = self.texts.tokenizer.decode(prompt[-ENDING_TOKENS:], skip_special=False)
        # Tools may be as large as a body, and each sample has a parser for them.
        params, parsers = await self.texts.run_if(
            asked_bytes() if tools else 0, lambda: self._readers(ask, tools, ending)
        )
        keeps = await self._keeps(ask, tools, prompt) if ask.marks else []
        steps = self.backend.generate(replace(ask.submit, prompt=prompt, params=params, keeps=keeps))
        return Answer(prompt, steps, parsers, keeps, self._prices)

    async def _keeps(self, ask: Ask, tools: list[dict[str, Any]] | None, prompt: list[int]) -> list[Keep]:
        """The prefixes of the prompt that are pinned, the shortest first."""
        context, options = facts_of(self.backend).max_len, ask.template_options

        def measured() -> Slices[list[Keep]]:
            pinned: list[Keep] = []
            for mark in ask.marks:
                other = yield from self.texts.encode_chat(
                    mark.messages, context, fits=False, tools=None if tools is None else mark.tools, options=options
                )
                pinned.append((common_length(prompt, other), mark.seconds))
            return pinned

        keeps: list[Keep] = await self.texts.run(len(ask.marks) * asked_bytes(), measured)
        return sorted(keep for keep in keeps if keep[0] >= self._pin_minimum)

    def _readers(
        self, ask: Ask, tools: list[dict[str, Any]] | None, ending: str
    ) -> tuple[SamplingParams, list[OutputParser]]:
        """The sampling parameters, with a grammar where a call is forced, and a parser for each sample."""
        source, choice = self._source(tools), _as_template_choice(ask.tool_choice)
        takes_tools = self.texts.takes_tools
        params = ask.submit.params
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
        """The conversation as token ids: no more than the context holds, unless `fits` is False or the call truncates.
        A text that could never fit is refused by its length in characters."""
        tools = callable_tools(ask)
        context = facts_of(self.backend).max_len
        keep = kept_tokens(ask.truncate, context)
        # A template may do anything with a caller's options; boolean switches are common, and cheap.
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
    """The tools that the model may call, or None. Contradictions are refused."""
    tools = None if ask.tool_choice == "none" else ask.tools or None
    named = ask.tool_choice.name if isinstance(ask.tool_choice, NamedTool) else None
    if not tools and (named is not None or ask.tool_choice == "required"):
        raise Refusal("tool_choice asks for a call, but there are no tools: add them.", param="tool_choice")
    if named is not None and named not in [tool["function"]["name"] for tool in tools or ()]:
        raise Refusal(f"tool_choice names {named!r}, which is not among tools.", param="tool_choice")
    if tools and ask.submit.params.structured is not None:
        raise Refusal(
            "A structured output leaves no room for tool calls: leave one of them out, or set tool_choice to none.",
            param="tools",
        )
    return tools


class Answer:
    """The answer to an `Ask`. Iterating gives the turns of each engine step."""

    __slots__ = ("_calls", "_keeps", "_parsers", "_steps", "_unsaid", "done", "prompt", "usage")

    def __init__(
        self,
        prompt: list[int],
        steps: AsyncIterator[list[Delta | RequestDone]],
        parsers: list[OutputParser],
        keeps: Sequence[Keep] = (),
        prices: TokenPrices | None = None,
    ) -> None:
        self.prompt = prompt
        self.usage = Usage(len(prompt), prices=prices)
        self._keeps = keeps
        self.done: RequestDone | None = None
        """The engine's summary, once all samples have ended."""
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
            if isinstance(item, Delta):
                turns.append(self._turn(item))
            else:
                self.done = item
                self.usage.cached_tokens = item.cached_tokens
                for (_, seconds), tokens in zip(self._keeps, item.kept, strict=False):  # none if it ran elsewhere
                    if seconds > SHORT_PIN:
                        self.usage.written_1h += tokens
                    else:
                        self.usage.written_5m += tokens
        return turns

    async def aclose(self) -> None:
        """Abort the request if it still runs."""
        close = getattr(self._steps, "aclose", None)
        if close is not None:
            await close()

    def _turn(self, delta: Delta) -> Turn:
        finish, index, tokens = delta.finish_reason, delta.index, len(delta.token_ids)
        if finish == "error" or finish == "abort":
            raise GenerationFailed(delta.error)
        parser = self._parsers[index]
        events = parser.push(delta.text) if delta.text else []
        if finish is not None:
            events = events + parser.finish()
        self._unsaid[index] += tokens
        self.usage.completion_tokens += tokens
        for event in events:
            if isinstance(event, ToolStart):
                self._calls[index] = True
            elif isinstance(event, Reasoning):
                self.usage.reasoning_tokens += self._unsaid[index]
            self._unsaid[index] = 0
        if finish == "stop" and self._calls[index]:
            delta = replace(delta, finish_reason="tool_calls")
        return delta, events


class AnswerStream(ABC):
    """An answer as events, for `sse.send_events`: an API writes the turns of each step in its own format."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._ended = False

    @abstractmethod
    def spell(self, turns: list[Turn]) -> bytes:
        """The events of one step."""

    @abstractmethod
    def ending(self) -> bytes:
        """The events that follow those of the last step."""

    @abstractmethod
    def failure(self, problem: Problem) -> bytes:
        """The last events of a stream that fails."""

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            turns = await self.answer.__anext__()
        except StopAsyncIteration:
            self._ended = True
            return self.ending()
        return self.spell(turns)

    async def aclose(self) -> None:
        await self.answer.aclose()


@dataclass(slots=True)
class Call:
    """A whole tool call; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeSample:
    """One whole answer."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: int | str | None = None


async def collect(answer: Answer) -> list[WholeSample]:
    """The whole answer, for callers that do not stream."""
    samples = [WholeSample(index) for index in range(answer.samples)]
    texts: list[list[str]] = [[] for _ in samples]
    thoughts: list[list[str]] = [[] for _ in samples]
    arguments: list[list[list[str]]] = [[] for _ in samples]
    try:
        async for turns in answer:
            for delta, events in turns:
                index = delta.index
                sample = samples[index]
                sample.tokens += delta.token_ids
                sample.logprobs += delta.logprobs or ()
                if delta.finish_reason is not None:
                    sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
                for event in events:
                    match event:
                        case Text(text):
                            texts[index].append(text)
                        case Reasoning(text):
                            thoughts[index].append(text)
                        case ToolStart(_, id, name):
                            sample.calls.append(Call(id, name))
                            arguments[index].append([])
                        case ToolArguments(number, text):
                            arguments[index][number].append(text)
    finally:
        await answer.aclose()
    for sample in samples:
        sample.text, sample.reasoning = "".join(texts[sample.index]), "".join(thoughts[sample.index])
        for call, pieces in zip(sample.calls, arguments[sample.index], strict=True):
            call.arguments = "".join(pieces)
    return samples


def common_length(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def facts_of(backend: Backend) -> Facts:
    facts = backend.facts
    if facts is None:
        raise Unavailable("The model is being loaded; try again in a moment.")
    return facts


def _as_template_choice(choice: ToolChoice) -> str | dict[str, Any]:
    """The tool choice in the format that the parsers take."""
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice
