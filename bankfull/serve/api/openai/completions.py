"""OpenAI's /v1/completions: plain prompts, one or many, as texts or as token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec

from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.serve.api.calls import (
    Caller,
    SamplingFields,
    StreamOptions,
    check_model,
    decode,
    new_id,
    sampling_params,
    submit_of,
    truncation_of,
)
from bankfull.serve.api.chat import facts_of
from bankfull.serve.api.errors import GenerationFailed, Problem, Refusal, openai_error
from bankfull.serve.api.events import Usage
from bankfull.serve.api.openai.chat_completions import entries_of
from bankfull.serve.api.openai.common import (
    FINGERPRINT,
    PromptLogprob,
    TokenLine,
    UsageReply,
    prompt_logprobs_reply,
    spelled,
    usage_reply,
)
from bankfull.serve.api.openai.prompts import Prompts, encode_prompt, split_prompts
from bankfull.serve.api.openai.turns import PromptGate
from bankfull.serve.api.sse import DONE, EventStream, event
from bankfull.serve.api.texts import SHORT_TEXT, Texts, fit, logprob_entries, refuse_bulk
from bankfull.serve.engine.backend import Backend
from bankfull.serve.engine.prompt_lines import unpack_lines
from bankfull.serve.engine.wire import RequestDone
from bankfull.serve.settings import Settings
from bankfull.submit import Submit
from bankfull.text.tokenizer import Tokenizer

Made = TypeVar("Made")

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default, which clients count on."""


class CompletionCall(SamplingFields, kw_only=True):
    prompt: Prompts
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class LogprobsReply(msgspec.Struct):
    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: LogprobsReply | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType | None = msgspec.UNSET


class CompletionReply(msgspec.Struct):
    """The whole answer, and the shape of each of its chunks."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str = FINGERPRINT
    explain: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    """One for each prompt."""


_decoder = msgspec.json.Decoder(CompletionCall)
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class CompletionSample:
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lines: list[TokenLine] = field(default_factory=list)
    finish: str = "length"
    stop: int | str | None = None

    @property
    def mean_logprob(self) -> float:
        values = [line[token][0] for token, line in zip(self.tokens, self.lines, strict=False)]
        return sum(values) / len(values) if values else float("-inf")


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The parameters that all prompts of one call share."""

    call: CompletionCall
    submit: Submit
    """The request of each prompt, without the prompt."""
    kept: int
    """Samples of each prompt in the answer: fewer than are generated, with best_of."""
    echo: bool

    @property
    def params(self) -> SamplingParams:
        return self.submit.params


class Accounts:
    """The accounts of the time of each prompt that has ended."""

    def __init__(self, prompts: int) -> None:
        self.told: list[dict[str, Any] | None] = [None] * prompts


class Completions:
    """The endpoint."""

    def __init__(self, backend: Backend, texts: Texts, settings: Settings) -> None:
        self._backend, self._texts, self._settings = backend, texts, settings
        self.prices = settings.prices

    async def answer(self, body: bytes, caller: Caller) -> bytes | EventStream:
        call = decode(body, _decoder)
        model = check_model(self._settings, call.model)
        job = self._job(call, caller)
        prompts = await self._prompts(job)
        if call.stream:
            return CompletionStream(self, job, prompts, model)
        usage, accounts = Usage(sum(map(len, prompts)), prices=self.prices), Accounts(len(prompts))
        turns = self.turns(job)
        choices = await gather(
            [self._whole(job, turns, prompt, number, usage, accounts) for number, prompt in enumerate(prompts)]
        )
        flat = [choice for several in choices for choice in several]
        reply = CompletionReply(
            new_id("cmpl-"),
            int(time.time()),
            model,
            flat,
            usage_reply(usage),
            explain=accounts.told if call.explain else msgspec.UNSET,
        )
        return await self._texts.run_if(entries_of(usage, call.prompt_logprobs, call.logprobs), lambda: _encode(reply))

    def spell(self, problem: Problem) -> bytes:
        return openai_error(problem)

    def generate(self, job: CompletionJob, prompt: list[int]) -> AsyncIterator[list[Delta | RequestDone]]:
        return self._backend.generate(replace(job.submit, prompt=prompt))

    def text_of(self, prompt: list[int]) -> str:
        return self._texts.tokenizer.decode(prompt, skip_special=False)

    def turns(self, job: CompletionJob) -> PromptGate:
        return PromptGate(self._settings.prompts_at_once, job.submit.deadline)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._texts.tokenizer

    def _job(self, call: CompletionCall, caller: Caller) -> CompletionJob:
        _refuse_contradictions(call)
        kept = 1 if call.n is None else call.n
        sampled = kept if call.best_of is None else call.best_of
        if sampled < kept:
            raise Refusal(f"best_of is {sampled}, below n of {kept}: raise it, or leave it out.", param="best_of")
        defaults = self._texts.defaults if self._settings.use_generation_config else {}
        logprobs, prompt_logprobs = call.logprobs, call.prompt_logprobs
        if sampled > kept and logprobs is None:
            logprobs = 0  # the best are chosen by them
        if call.echo and call.logprobs is not None:
            prompt_logprobs = max(call.logprobs, prompt_logprobs or 0)
        max_tokens = DEFAULT_MAX_TOKENS if call.max_tokens is None else call.max_tokens
        params = sampling_params(
            call, defaults, n=sampled, logprobs=logprobs, prompt_logprobs=prompt_logprobs, max_tokens=max_tokens
        )
        submit = submit_of(call, caller, params, explain=bool(call.explain))
        return CompletionJob(call, submit, kept, bool(call.echo))

    async def _prompts(self, job: CompletionJob) -> list[list[int]]:
        call, facts = job.call, facts_of(self._backend)
        self._backend.expect(job.params.n, job.submit.priority)
        truncate = truncation_of(call.truncate_prompt_tokens)
        prompts: list[list[int]] = []
        entries = 0
        for given in split_prompts(call.prompt, self._settings.max_prompts, "prompt"):
            ids = await encode_prompt(self._texts, given, facts, truncate, add_special=call.add_special_tokens)
            prompts.append(fit(ids, facts.max_len, job.params, truncate, "prompt"))
            entries += logprob_entries(len(prompts[-1]), job.params, facts.max_len)
            refuse_bulk(entries)
        return prompts

    async def _whole(
        self, job: CompletionJob, turns: PromptGate, prompt: list[int], number: int, usage: Usage, accounts: Accounts
    ) -> list[CompletionChoice]:
        first = number * job.kept
        samples = [CompletionSample() for _ in range(job.params.n)]
        done: RequestDone | None = None
        async with turns.turn(lambda: self.generate(job, prompt)) as steps:
            async for items in steps:
                for item in items:
                    if isinstance(item, RequestDone):
                        done = item
                        accounts.told[number] = item.account
                        continue
                    refuse_failure(item)
                    sample = samples[item.index]
                    sample.text.append(item.text)
                    sample.tokens += item.token_ids
                    sample.lines += item.logprobs or ()
                    if item.finish_reason is not None:
                        sample.finish, sample.stop = item.finish_reason, item.stop_reason
        usage.completion_tokens += sum(len(sample.tokens) for sample in samples)
        usage.cached_tokens += done.cached_tokens if done else 0
        packed = done.prompt_logprobs if done else None
        if job.params.max_tokens == 0:
            samples = samples[:1] * job.kept  # nothing was generated, so all samples are the same
        best = sorted(samples, key=lambda sample: -sample.mean_logprob) if len(samples) > job.kept else samples

        def spelled() -> list[CompletionChoice]:
            lines = unpack_lines(packed, prompt, self.tokenizer)
            return [self._choice(job, prompt, lines, first + i, sample) for i, sample in enumerate(best[: job.kept])]

        return await self._texts.run_if(
            0 if job.params.logprobs is None and packed is None else SHORT_TEXT + 1, spelled
        )

    def _choice(
        self,
        job: CompletionJob,
        prompt: list[int],
        prompt_lines: list[TokenLine | None] | None,
        index: int,
        sample: CompletionSample,
    ) -> CompletionChoice:
        text = "".join(sample.text)
        logprobs = None
        if job.call.logprobs is not None:
            logprobs = LogprobsReply()
            offset = 0
            if job.echo:
                offset = add_logprobs(logprobs, prompt, prompt_lines or (), self.tokenizer, 0)
            add_logprobs(logprobs, sample.tokens, sample.lines, self.tokenizer, offset)
        if job.echo:
            text = self.text_of(prompt) + text
        choice = CompletionChoice(index, text, logprobs, sample.finish, sample.stop)
        if job.call.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs_reply(prompt_lines)
        return choice


def _refuse_contradictions(call: CompletionCall) -> None:
    if call.suffix is not None:
        raise Refusal("suffix is not supported: leave it out.", param="suffix", code="unsupported_parameter")
    if call.stream_options is not None and not call.stream:
        raise Refusal("stream_options is for streams only: set stream, or leave it out.", param="stream_options")
    if call.stream_options is not None and call.stream_options.include_drafts:
        raise Refusal(
            "include_drafts is for chat completions: leave it out.",
            param="stream_options",
            code="unsupported_parameter",
        )
    if call.stream:
        if call.best_of is not None and call.best_of > (call.n or 1):
            raise Refusal("best_of cannot be streamed: the best is known at the end.", param="best_of")
        if call.prompt_logprobs is not None or (call.echo and call.logprobs is not None):
            raise Refusal("The prompt's logprobs cannot be streamed: leave stream out.", param="stream")


def refuse_failure(delta: Delta) -> None:
    if delta.finish_reason in ("error", "abort"):
        raise GenerationFailed(delta.error)


async def gather(works: list[Coroutine[Any, Any, Made]]) -> list[Made]:
    """All of them; when one fails, the others end first."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def add_logprobs(
    reply: LogprobsReply, tokens: list[int], lines: Sequence[TokenLine | None], tokenizer: Tokenizer, offset: int
) -> int:
    """Adds one entry per token to `reply`; the offset of the next token's text."""
    for token, line in zip(tokens, lines, strict=False):
        reply.tokens.append(spelled(tokenizer, token))
        reply.token_logprobs.append(None if line is None else line[token][0])
        tops = None if line is None else {spelled(tokenizer, other): pair[0] for other, pair in line.items()}
        reply.top_logprobs.append(tops)
        reply.text_offset.append(offset)
        offset += len(tokenizer.token_text(token))
    return offset


class CompletionStream:
    """The chunks of all prompts of a call, as they come."""

    def __init__(self, api: Completions, job: CompletionJob, prompts: list[list[int]], model: str) -> None:
        self._api, self._job, self._prompts = api, job, prompts
        self._options = job.call.stream_options or StreamOptions()
        self._usage, self._accounts = Usage(sum(map(len, prompts)), prices=api.prices), Accounts(len(prompts))
        self._empty = CompletionReply(new_id("cmpl-"), int(time.time()), model, [])
        head, _, tail = _encode(self._empty).partition(b'"choices":[]')
        self._head = b"data: " + head + b'"choices":['
        self._tail = b"]" + (b',"usage":null' if self._options.include_usage else b"") + tail + b"\n\n"
        self._offsets = [len(api.text_of(p)) if job.echo else 0 for p in prompts for _ in range(job.kept)]
        self._turns = api.turns(job)
        self._steps = self._merged() if len(prompts) > 1 else self._chunks(0)
        self._ended = False

    def __aiter__(self) -> CompletionStream:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            return await anext(self._steps)
        except StopAsyncIteration:
            self._ended = True
        wants_usage, wants_accounts = self._options.include_usage, self._job.call.explain
        if not wants_usage and not wants_accounts:
            return DONE
        last = msgspec.structs.replace(
            self._empty,
            usage=usage_reply(self._usage) if wants_usage else msgspec.UNSET,
            explain=self._accounts.told if wants_accounts else msgspec.UNSET,
        )
        return event(_encode(last)) + DONE

    async def aclose(self) -> None:
        await self._steps.aclose()

    def failure(self, problem: Problem) -> bytes:
        return event(openai_error(problem)) + DONE

    async def _chunks(self, number: int) -> AsyncGenerator[bytes, None]:
        """One prompt's chunks, for each engine step."""
        job, prompt, first = self._job, self._prompts[number], number * self._job.kept
        echoed = not job.echo
        async with self._turns.turn(lambda: self._api.generate(job, prompt)) as steps:
            async for items in steps:
                chunks: list[bytes] = []
                if not echoed:
                    echoed = True
                    text = self._api.text_of(prompt)
                    chunks += [self._chunk(CompletionChoice(first + i, text)) for i in range(job.kept)]
                for item in items:
                    if isinstance(item, RequestDone):
                        self._usage.cached_tokens += item.cached_tokens
                        self._accounts.told[number] = item.account
                    else:
                        refuse_failure(item)
                        self._usage.completion_tokens += len(item.token_ids)
                        chunks.append(self._chunk(self._choice(first + item.index, item)))
                yield b"".join(chunks)

    async def _merged(self) -> AsyncGenerator[bytes, None]:
        """The chunks of several prompts; those that have arrived are sent together."""
        ready: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()

        async def pump(number: int) -> None:
            try:
                async for chunk in self._chunks(number):
                    ready.put_nowait(chunk)
                ready.put_nowait(None)
            except Exception as error:
                ready.put_nowait(error)

        tasks = [asyncio.ensure_future(pump(number)) for number in range(len(self._prompts))]
        left = len(tasks)
        try:
            while left:
                items = [await ready.get()]
                while not ready.empty():
                    items.append(ready.get_nowait())
                for item in items:
                    if isinstance(item, BaseException):
                        raise item
                left -= sum(item is None for item in items)
                yield b"".join(item for item in items if isinstance(item, bytes))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        logprobs = None
        if delta.logprobs and self._job.call.logprobs is not None:
            logprobs = LogprobsReply()
            self._offsets[index] = add_logprobs(
                logprobs, delta.token_ids, delta.logprobs, self._api.tokenizer, self._offsets[index]
            )
        return CompletionChoice(index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)

    def _chunk(self, choice: CompletionChoice) -> bytes:
        tail = self._tail
        if self._options.continuous_usage_stats:
            tail = tail.replace(b'"usage":null', b'"usage":' + _encode(usage_reply(self._usage)), 1)
        return self._head + _encode(choice) + tail
