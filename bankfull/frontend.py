"""Between people and the engine: prompts become requests, settled tokens become text.

One `Frontend` serves the offline API, the asyncio engine and the command line alike; none of them owns a second loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from torch import Tensor

from bankfull.engine import Engine
from bankfull.errors import RequestError
from bankfull.outputs import CompletionOutput, Delta, Logprob, Metrics, RequestOutput
from bankfull.runtime.device_runner import Extra, TokenLogprobs
from bankfull.runtime.rows import Job
from bankfull.sample.grammar import GrammarCompiler, Matcher
from bankfull.sample.params import SamplingParams
from bankfull.text.detokenize import Detokenizer
from bankfull.text.stop import StopTable, StopText
from bankfull.text.template import ChatTemplate, encode_chat
from bankfull.text.tokenizer import Tokenizer
from bankfull.types import Finish, Output, Request

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(slots=True)
class Sample:
    """One of a request's n sequences, as text."""

    output: CompletionOutput
    detokenizer: Detokenizer | None
    stop: StopText | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is checked and ready to be queued: all that its samples share is here, and made once."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int
    generates: bool
    matchers: tuple[Matcher, ...]
    """One for each sample, where there is a grammar."""
    stops: StopTable | None
    allowed_mask: Tensor | None
    """The tokens that it may use, packed."""
    priority: int
    salt: str
    pool: str | None
    tenant: str


@dataclass(slots=True)
class Pending:
    """A request that has not ended."""

    result: RequestOutput
    params: SamplingParams
    stop_ids: frozenset[int]
    samples: list[Sample]
    arrived: float
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    pooled: dict[int, Any] = field(default_factory=dict)
    """Position -> hidden state, or sum of hidden states from there on."""


class Frontend:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        vocab: int,
        max_len: int,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.tokenizer, self.template = engine, tokenizer, template
        self.vocab, self.max_len = vocab, max_len
        self.pending: dict[Hashable, Pending] = {}
        self.names_prompts = True
        """Whether log-probabilities of prompts get the texts of their tokens; else they stay in `Pending`."""
        self._clock = clock
        self._numbers = count()
        self._seeds = random.Random(seed)
        self._grammars = GrammarCompiler(tokenizer, vocab)

    # -- in

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its token ids, checked."""
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"}
            if len(prompt) != 1 or not known.issuperset(prompt):
                raise RequestError(
                    "A prompt given as a dict needs exactly one of 'prompt' and 'prompt_token_ids', not "
                    f"{sorted(map(str, prompt))}."
                )
            prompt = next(iter(prompt.values()))
        text: str | None = None
        ids: list[int]
        if isinstance(prompt, str):
            text, ids = prompt, self.tokenizer.encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            ids = list(prompt)  # type: ignore[arg-type]  # checked below, one by one
            for token in ids:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab:
                    raise RequestError(
                        f"Prompt token {token!r} is not an id of this model; ids go from 0 to {self.vocab - 1}."
                    )
        else:
            raise RequestError(f"A prompt is a text or a list of token ids, not {type(prompt).__name__}.")
        if not ids:
            raise RequestError("The prompt is empty; give at least one character or token.")
        if len(ids) > self.max_len:
            raise RequestError(f"The prompt has {len(ids)} tokens, but the context holds {self.max_len}; shorten it.")
        return text, ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        if self.template is None:
            raise RequestError("This model has no chat template; use generate() with a plain prompt instead of chat().")
        return encode_chat(self.tokenizer, self.template, messages, **kwargs)

    def submit(
        self, prompt: Prompt, params: SamplingParams, *, request_id: Hashable | None = None, **how: Any
    ) -> Hashable:
        """Queue a request; its id. Whatever is wrong with it is said now."""
        return self.queue(self.prepare(prompt, params, **how), request_id)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        pool: str | None = None,
        tenant: str = "",
    ) -> Prepared:
        """All that is slow about a request (tokens, a grammar, tables) and all checks; may run on any thread."""
        text, ids = self.encode(prompt)
        generates = pool is None and params.max_tokens != 0
        limit = self._limit(len(ids), params, generates)
        eos = frozenset() if params.ignore_eos else self.tokenizer.eos_ids
        stop_ids = frozenset(params.stop_token_ids) | eos
        params = self._with_word_ids(params)
        self.engine.check_sampling(params, stop_ids)
        matchers: tuple[Matcher, ...] = ()
        if params.structured is not None and generates:
            matcher = self._grammars.compile(params.structured)
            matchers = (matcher, *(matcher.copy() for _ in range(1, params.n)))
        stops = StopTable(params.stop) if params.stop and params.detokenize else None
        allowed_mask = self.engine.allowed_mask(params)
        return Prepared(
            text, ids, params, stop_ids, limit, generates, matchers, stops, allowed_mask, priority, salt, pool, tenant
        )

    def queue(self, prepared: Prepared, request_id: Hashable | None = None) -> Hashable:
        params, pool = prepared.params, prepared.pool
        request_id = next(self._numbers) if request_id is None else request_id
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        request = Request(
            request_id,
            tuple(prepared.ids),
            prepared.limit,
            prepared.stop_ids,
            samples=params.n if prepared.generates else 1,
            priority=prepared.priority,
            salt=prepared.salt.encode(),
            tenant=prepared.tenant,
            # Every prompt position has to run when each one's scores or hidden state are part of the answer.
            reuse=params.prompt_logprobs is None and pool != "mean",
            generates=prepared.generates,
            scored=params.prompt_logprobs is not None,
            payload=Job(params, seed, prepared.stop_ids, pool, prepared.allowed_mask),
        )
        self.engine.add(request, prepared.matchers)
        samples = [self._sample(i, params, prepared.stops) for i in range(request.samples)]
        metrics = Metrics(time.time())
        result = RequestOutput(request_id, prepared.text, prepared.ids, [s.output for s in samples], metrics=metrics)
        self.pending[request_id] = Pending(result, params, prepared.stop_ids, samples, self._clock())
        return request_id

    def _limit(self, prompt_len: int, params: SamplingParams, generates: bool) -> int:
        if not generates:
            return prompt_len
        if prompt_len >= self.max_len:
            raise RequestError(
                f"The prompt has {prompt_len} tokens and fills the context of {self.max_len}; shorten it so that at "
                "least one token can follow."
            )
        if params.max_tokens is None:
            return self.max_len
        if prompt_len + params.max_tokens > self.max_len:
            raise RequestError(
                f"The prompt has {prompt_len} tokens, and with max_tokens={params.max_tokens} it could exceed the "
                f"context of {self.max_len}; use max_tokens of at most {self.max_len - prompt_len}, or leave it out."
            )
        return prompt_len + params.max_tokens

    def _with_word_ids(self, params: SamplingParams) -> SamplingParams:
        """Bad words as tokens, with and without the space that precedes a word inside a text."""
        if not params.bad_words:
            return params
        spellings = [w for word in params.bad_words for w in (word, " " + word.lstrip())]
        ids = {tuple(self.tokenizer.encode(w, add_bos=False, parse_special=False)) for w in spellings}
        return replace(params, bad_word_ids=tuple(sorted(i for i in ids if i)))

    def _sample(self, index: int, params: SamplingParams, stops: StopTable | None) -> Sample:
        wants = params.logprobs is not None
        output = CompletionOutput(index, logprobs=[] if wants else None, cumulative_logprob=0.0 if wants else None)
        detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens) if params.detokenize else None
        stop = None if stops is None else StopText(stops, params.include_stop_str_in_output)
        return Sample(output, detokenizer, stop)

    # -- out

    def abort(self, request_id: Hashable) -> list[Delta]:
        return self._absorb(self.engine.abort(request_id))

    def step(self) -> list[Delta]:
        """Run the engine once; what it added to which request."""
        return self._absorb(self.engine.step())

    def take(self, request_id: Hashable) -> RequestOutput:
        """The whole result of a request that has ended."""
        assert self.pending[request_id].result.finished
        return self.pending.pop(request_id).result

    def _absorb(self, outputs: Sequence[Output]) -> list[Delta]:
        deltas = []
        for output in outputs:
            pending = self.pending.get(output.request)
            if pending is not None:
                deltas.append(self._absorb_one(pending, output))
        return deltas

    def _absorb_one(self, pending: Pending, output: Output) -> Delta:
        sample = pending.samples[output.child]
        done = sample.output
        now = self._clock() - pending.arrived
        metrics = pending.result.metrics
        if output.child == 0:
            metrics.cached_tokens = output.cached
        started = self.engine.started.get(output.request)
        if metrics.queue is None and started is not None:
            metrics.queue = started - pending.arrived
        if output.tokens and metrics.ttft is None:
            metrics.ttft = now
        extra: Extra | None = output.extra
        logprobs = self._take_extra(pending, done, output, extra)
        text = self._text(sample, pending, output)
        if sample.stop is not None and sample.stop.stopped is not None and done.finish_reason is None:
            done.stop_reason = sample.stop.stopped
            if output.finish is None:
                self.engine.abort(output.request, Finish.STOP, output.child)
            output.finish = Finish.STOP
        done.text += text
        metrics.output_tokens += len(output.tokens)
        if output.finish is not None:
            self._end(pending, done, output)
            metrics.finished = now
        return Delta(
            output.request,
            output.child,
            text,
            list(output.tokens),
            logprobs,
            done.finish_reason,
            done.stop_reason,
            done.error,
        )

    def _text(self, sample: Sample, pending: Pending, output: Output) -> str:
        """The text that this output adds and that no later one can take back."""
        done, params = sample.output, pending.params
        done.token_ids += output.tokens
        if sample.detokenizer is None:
            return ""
        tokens = list(output.tokens)
        if output.finish is Finish.STOP and tokens and tokens[-1] in pending.stop_ids:
            if tokens[-1] in params.stop_token_ids:
                done.stop_reason = tokens[-1]
            if not (params.include_stop_str_in_output and tokens[-1] in params.stop_token_ids):
                tokens.pop()
        text = sample.detokenizer.push(tokens)
        if output.finish is not None:
            text += sample.detokenizer.finish()
        if sample.stop is None or len(done.token_ids) < params.min_tokens:
            return text
        text = sample.stop.push(text)
        if output.finish is not None and sample.stop.stopped is None:
            text += sample.stop.finish()
        return text

    def _take_extra(
        self, pending: Pending, done: CompletionOutput, output: Output, extra: Extra | None
    ) -> list[dict[int, Logprob]] | None:
        if extra is None:
            return None
        pending.prompt_logprobs.update(extra.prompt)
        if extra.pooled is not None:
            pending.pooled[extra.pooled[0]] = extra.pooled[1]
        if done.logprobs is None or done.cumulative_logprob is None:
            return None
        fresh = []
        for token, line in zip(output.tokens, extra.logprobs, strict=False):
            fresh.append(self._named(token, line))
            done.cumulative_logprob += line.logprob
        done.logprobs += fresh
        return fresh

    def _named(self, token: int, line: TokenLogprobs) -> dict[int, Logprob]:
        pairs = [*zip(line.top_ids, line.top_logprobs, strict=True)]
        if token not in line.top_ids:
            pairs.insert(0, (token, line.logprob))
        return {i: Logprob(value, self.tokenizer.token_text(i)) for i, value in pairs}

    def _end(self, pending: Pending, done: CompletionOutput, output: Output) -> None:
        assert output.finish is not None
        done.finish_reason = output.finish.value
        done.error = output.error
        result = pending.result
        if all(s.output.finish_reason is not None for s in pending.samples):
            result.finished = True
            self.engine.started.pop(output.request, None)
            if pending.params.prompt_logprobs is not None and self.names_prompts:
                ids = result.prompt_token_ids
                known = pending.prompt_logprobs
                result.prompt_logprobs = [
                    self._named(token, known[i]) if i in known else None for i, token in enumerate(ids)
                ]
