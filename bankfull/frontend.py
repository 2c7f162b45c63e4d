"""The front end of the engine: turns prompts into requests, and settled tokens into text.

One `Frontend` serves the offline API, the asyncio engine and the command line alike; none of them owns a second loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from bankfull.engine import Engine
from bankfull.errors import RequestError
from bankfull.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from bankfull.runtime.results import Extra, TokenLogprobs
from bankfull.runtime.rows import Job
from bankfull.sample.denoised import refuse_beside_denoising
from bankfull.sample.generated import checked_generated, end_of
from bankfull.sample.grammar import GrammarCompiler, Matcher
from bankfull.sample.params import SamplingParams
from bankfull.submit import Submit
from bankfull.text.detokenize import Detokenizer
from bankfull.text.stop import StopTable, StopText
from bankfull.text.template import ChatTemplate, encode_chat
from bankfull.text.tokenizer import Tokenizer
from bankfull.types import Finish, Output, Request, StepDrafts

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(slots=True)
class Sample:
    """One of a request's n samples, as text."""

    output: CompletionOutput
    detokenizer: Detokenizer | None
    stop: StopText | None


@dataclass(slots=True)
class Pending:
    """A request from its preparation until it has ended."""

    request: Request
    params: SamplingParams
    result: RequestOutput
    samples: list[Sample]
    matchers: tuple[Matcher, ...] = ()
    """One for each sample under a grammar, until the request is queued."""
    arrived: float = 0.0
    """When the request was queued, on the front end's clock."""
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    pooled: dict[int, Any] = field(default_factory=dict)
    """Position -> hidden state, or sum of the hidden states from there on."""


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
        self.collects = True
        """Whether results have the whole texts and logprobs. Without, texts and logprobs are in the deltas only, and
        prompt logprobs in `Pending`."""
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

    def submit(self, prompt: Prompt, params: SamplingParams, **how: Any) -> Hashable:
        """Prepare and queue a request; its id. `how`: other fields of `Submit`. Every error in it is raised now."""
        return self.queue(self.prepare_prompt(prompt, params, **how))

    def prepare_prompt(self, prompt: Prompt, params: SamplingParams, **how: Any) -> Pending:
        """`prepare` for a prompt of any kind. `how`: other fields of `Submit`."""
        text, ids = self.encode(prompt)
        return self._prepared(Submit(ids, params, **how), text)

    def prepare(self, submit: Submit) -> Pending:
        """All that is slow about a request (tokens, a grammar, tables) and all checks; may run on any thread."""
        self.encode(submit.prompt)
        return self._prepared(submit, None)

    def _prepared(self, submit: Submit, text: str | None) -> Pending:
        """`text`: that of the prompt, if it was given as one."""
        ids, params, pool, generates = submit.prompt, submit.params, submit.pool, submit.generates
        if self.engine.scheduler.canvas is not None:
            refuse_beside_denoising(params, pool)
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
        drafts, lookup = self._chosen_drafts(params.speculative)
        request = Request(
            next(self._numbers) if submit.id is None else submit.id,
            tuple(ids),
            limit,
            stop_ids,
            samples=params.n if generates else 1,
            priority=submit.priority,
            salt=submit.salt.encode(),
            tenant=submit.tenant,
            # Every prompt position has to run when each one's scores or hidden state are part of the answer.
            reuse=params.prompt_logprobs is None and pool != "mean",
            generates=generates,
            scored=params.prompt_logprobs is not None,
            drafts=drafts,
            lookup=lookup,
            reference=self._reference(params) if generates else (),
            keeps=tuple(submit.keeps),
        )
        if submit.generated or submit.finished:
            resumed = checked_generated(submit.generated, submit.finished, params, generates, self.vocab)
            request.generated, request.finished = resumed
        request.payload = Job(params, params.seed or 0, stop_ids, pool, self.engine.allowed_mask(params))
        samples = [self._sample(i, params, stops) for i in range(request.samples)]
        result = RequestOutput(request.id, text, ids, [sample.output for sample in samples])
        pending = Pending(request, params, result, samples, matchers)
        for number in range(len(request.generated)):
            self._replay(pending, number)
        return pending

    def queue(self, pending: Pending) -> Hashable:
        """Hand a prepared request to the engine; its id."""
        request = pending.request
        if pending.params.seed is None:
            request.payload = replace(request.payload, seed=self._seeds.getrandbits(63))
        self.engine.add(request, pending.matchers)
        pending.matchers = ()
        pending.result.metrics.arrival = time.time()
        pending.arrived = self._clock()
        self.pending[request.id] = pending
        return request.id

    def _chosen_drafts(self, chosen: bool | int | str) -> tuple[int | None, bool | None]:
        """The most drafts of a step, and `Request.lookup`."""
        if chosen is True or chosen == "auto":
            return None, None
        if not isinstance(chosen, str):
            return int(chosen), None
        if chosen == "off":
            return 0, None
        ways = self.engine.draft_ways
        if chosen not in ways:
            runs = " and ".join(map(repr, ways)) or f"none ({self.engine.no_drafts or 'it is off'})"
            raise RequestError(
                f"speculative is {chosen[:80]!r}, but the ways of drafting that run here are {runs}: give one of "
                f"{', '.join(map(repr, ('auto', 'off', *ways)))}, a number of draft tokens, true or false."
            )
        return None, ways[chosen]

    def _replay(self, pending: Pending, number: int) -> None:
        """Bring a sample to the state in which another engine has left it. The text of its tokens was sent there."""
        request, sample = pending.request, pending.samples[number]
        tokens, ended, done = request.generated[number], number in request.finished, sample.output
        finish = end_of(request, number)
        if pending.matchers and finish is not Finish.STOP:
            matcher = pending.matchers[number]
            if (taken := matcher.accepts(tokens)) < len(tokens):
                raise RequestError(
                    f"Token {taken + 1} of sample {number} in generated is not allowed by the request's grammar: give "
                    "the grammar under which it was generated."
                )
            for token in tokens:
                matcher.advance(token)
            finish = Finish.STOP if matcher.finished else finish
        if ended and finish is None:
            finish = Finish.ABORT  # unless its text has a stop string
        text = self._text(sample, pending, Output(request.id, number, list(tokens), finish))
        if self.collects:
            done.text = text
        if sample.stop is not None and sample.stop.stopped is not None:
            finish, done.stop_reason = Finish.STOP, sample.stop.stopped
        if finish is not None:
            if not ended:
                raise RequestError(
                    f"Sample {number} has already ended with its {len(tokens)} generated tokens ({finish.value}): list "
                    "it in finished."
                )
            done.finish_reason = finish.value
        pending.result.metrics.output_tokens += len(tokens)

    def _reference(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens of the reference text, if draft tokens are looked up."""
        if not params.reference or self.engine.drafting is None:
            return ()
        ids = self.tokenizer.encode(params.reference, add_bos=False, parse_special=False)
        if len(ids) > self.max_len:
            raise RequestError(
                f"The reference has {len(ids)} tokens, but may have {self.max_len}, as many as the context; shorten it."
            )
        return tuple(ids)

    def _limit(self, prompt_len: int, params: SamplingParams, generates: bool) -> int:
        """The most tokens, prompt included, that a sequence may reach."""
        if not generates:
            return prompt_len
        if prompt_len == self.max_len:
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
        """Run the engine once; the deltas of all requests."""
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
        if output.child == 0 or pending.request.finished:
            metrics.cached_tokens = output.cached
        started = self.engine.started.get(output.request)
        if metrics.queue is None and started is not None:
            metrics.queue = started - pending.arrived
        metrics.blocked = max(metrics.blocked, output.blocked)
        if output.tokens and metrics.ttft is None:
            metrics.ttft = now
        extra: Extra | None = output.extra
        text = self._text(sample, pending, output)
        logprobs = self._take_extra(pending, done, output, extra)
        if sample.stop is not None and sample.stop.stopped is not None and done.finish_reason is None:
            done.stop_reason = sample.stop.stopped
            if output.finish is None:
                self.engine.abort(output.request, Finish.STOP, output.child)
            output.finish = Finish.STOP
        if self.collects:
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
            self._drafts(pending, output, extra),
        )

    def _drafts(self, pending: Pending, output: Output, extra: Extra | None) -> StepDrafts | None:
        if not pending.params.include_drafts:
            return None
        drafts = StepDrafts() if extra is None or extra.drafts is None else extra.drafts
        kept = len(output.tokens)
        # A sequence may end within the accepted drafts: then nothing stands in the place of a rejected one.
        return drafts if drafts.accepted < kept else StepDrafts(kept, [], drafts.verified)

    def _text(self, sample: Sample, pending: Pending, output: Output) -> str:
        """The text that this output adds and that later tokens cannot change. All text so far depends only on all
        tokens so far, not on the steps that gave them: a request can be continued on another engine."""
        done, params = sample.output, pending.params
        done.token_ids += output.tokens
        if sample.detokenizer is None:
            return ""
        tokens = list(output.tokens)
        if output.finish is Finish.STOP and tokens and tokens[-1] in pending.request.stop_ids:
            if tokens[-1] in params.stop_token_ids:
                done.stop_reason = tokens[-1]
            if not (params.include_stop_str_in_output and tokens[-1] in params.stop_token_ids):
                tokens.pop()
        early = 0
        if sample.stop is not None:  # before min_tokens stop strings do not count
            early = max(0, params.min_tokens - 1 - len(done.token_ids) + len(output.tokens))
        text, tokens = sample.detokenizer.push(tokens[:early]), tokens[early:]
        if sample.stop is None or len(done.token_ids) < params.min_tokens:
            text += sample.detokenizer.push(tokens)
            return text if output.finish is None else text + sample.detokenizer.finish()
        for place, token in enumerate(tokens, early + 1):
            text += sample.stop.push(sample.detokenizer.push((token,)))
            if sample.stop.stopped is not None:
                self._cut(done, output, place)
                return text
        if output.finish is not None:
            text += sample.stop.push(sample.detokenizer.finish())
            if sample.stop.stopped is None:
                text += sample.stop.finish()
        return text

    @staticmethod
    def _cut(done: CompletionOutput, output: Output, kept: int) -> None:
        """Remove the tokens after a stop string: accepted drafts, which plain decoding would not have generated."""
        if extra := len(output.tokens) - kept:
            del done.token_ids[-extra:]
            del output.tokens[kept:]
            if output.extra is not None:
                del output.extra.logprobs[kept:]

    def _take_extra(
        self, pending: Pending, done: CompletionOutput, output: Output, extra: Extra | None
    ) -> list[dict[int, Logprob]] | None:
        if extra is None:
            return None
        pending.prompt_logprobs.update(extra.prompt)
        if extra.pooled is not None:
            at, vector = extra.pooled
            # A prompt that was preempted begins anew, perhaps with other chunks.
            pending.pooled = {**{i: part for i, part in pending.pooled.items() if i < at}, at: vector}
        if done.logprobs is None or done.cumulative_logprob is None:
            return None
        fresh = []
        for token, line in zip(output.tokens, extra.logprobs, strict=False):
            fresh.append(self._named(token, line))
            done.cumulative_logprob += line.logprob
        if self.collects:
            done.logprobs += fresh
        return fresh

    def _named(self, token: int, line: TokenLogprobs) -> dict[int, Logprob]:
        """The log-probabilities of one position by token id, the token itself first."""
        named = {token: Logprob(line.logprob, self.tokenizer.token_text(token))}
        for other, value in zip(line.top_ids, line.top_logprobs, strict=True):
            named[other] = Logprob(value, self.tokenizer.token_text(other))
        return named

    def _end(self, pending: Pending, done: CompletionOutput, output: Output) -> None:
        assert output.finish is not None
        done.finish_reason = output.finish.value
        done.error = output.error
        result = pending.result
        if all(s.output.finish_reason is not None for s in pending.samples):
            result.finished = True
            self.engine.started.pop(output.request, None)
            if pending.params.prompt_logprobs is not None and self.collects:
                ids = result.prompt_token_ids
                known = pending.prompt_logprobs
                result.prompt_logprobs = [
                    self._named(token, known[i]) if i in known else None for i, token in enumerate(ids)
                ]
