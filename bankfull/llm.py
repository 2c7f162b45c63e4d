"""The offline API, similar to vLLM's `LLM`."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from bankfull import prepare
from bankfull.best_of import Choose, rank, ranked_params
from bankfull.errors import RequestError
from bankfull.familiar import configure
from bankfull.frontend import Frontend, Pending, Prompt
from bankfull.live_weights import Weights, WrittenWeights, stage_weights
from bankfull.loading import Loaded, load
from bankfull.outputs import Delta, EmbeddingOutput, RequestOutput, ScoreOutput
from bankfull.sample.params import SamplingParams
from bankfull.sample.recommended import recommended

Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[RequestOutput], None]

LONGEST_SLEEP = 0.05
"""Seconds after which an idle loop looks again, for interrupts."""


class LLM:
    """A model on this machine. `model` is a path, a hub id or a short name; the default is `smollm2`. Options may have
    the names of other libraries (`bankfull.familiar`)."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        device: Any = "auto",
        dtype: Any = "auto",
        max_model_len: int | None = None,
        loaded: Loaded | None = None,
        **options: Any,
    ) -> None:
        if loaded is None:
            named = {"device": device, "dtype": dtype, "max_model_len": max_model_len}
            said = {name: value for name, value in named.items() if value not in ("auto", None)}
            loaded = load(model, *configure({**said, **options}))
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self._front = loaded.frontend
        self._front.engine.scheduler.sealed = True  # while one call runs, no other can bring a request
        prepare(self)

    @property
    def max_model_len(self) -> int:
        return self.loaded.sizes.max_len

    def default_params(self) -> SamplingParams:
        """The sampling parameters of calls without any: the model's recommendation (see docs/sampling.md)."""
        return self._recommended

    @cached_property
    def _recommended(self) -> SamplingParams:
        return SamplingParams(**recommended(self.loaded.files, chats=self.loaded.template is not None))

    # -- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        choose: Choose | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. If a prompt cannot be served, this raises before any of them runs.

        `n`: samples of each prompt, instead of that of the parameters. `choose`: ranks the samples of each prompt, the
        best one first. "logprob" ranks by the mean log-probability of a sample's tokens. A function is called with each
        sample and its request, and returns the sample's score; the highest one is the best. All samples are returned,
        and `index` keeps the number of each."""
        many = as_prompts(prompts)
        asked = self._params_for(len(many), sampling_params)
        params = asked if n is None else [replace(one, n=n) for one in asked]
        if choose is not None:
            params = [ranked_params(one, choose) for one in params]
        if priority is not None and len(priority) != len(many):
            raise RequestError(f"{len(many)} prompts came with {len(priority)} priorities; give one for each.")
        ids = self._submit_all(many, params, priority or [0] * len(many))
        if not use_tqdm:
            results = self._finish(ids, progress)
        else:
            with _progress_bar(len(ids), progress) as bar:
                results = self._finish(ids, bar)
        if choose is not None:
            for result, one in zip(results, asked, strict=True):
                rank(result, choose, shows_logprobs=one.logprobs is not None)
        return results

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        n: int | None = None,
        choose: Choose | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """The outputs of generate() for one conversation or several, formatted with the model's chat template."""
        several = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        how = {"tools": tools, "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts = [self._front.encode_chat(m, **how) for m in several]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, n=n, choose=choose, progress=progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **how: Any) -> Iterator[Delta]:
        """The answer in pieces, as they are generated. Closing the iterator aborts the request."""
        request = self._front.submit(prompt, sampling_params or self.default_params(), **how)
        try:
            while not self._front.pending[request].result.finished:
                for delta in advance(self._front):
                    if delta.request_id == request:
                        yield delta
        finally:
            self._front.abort(request)
            self._front.pending.pop(request, None)

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[ScoreOutput]:
        """The logprob of every token of a text after the first."""
        many = as_prompts(texts)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
        outputs = self._finish(self._submit_all(many, [params] * len(many), [0] * len(many)), None)
        scores = []
        for output in outputs:
            lines = output.prompt_logprobs or []
            values = [
                line[t].logprob for t, line in zip(output.prompt_token_ids, lines, strict=True) if line is not None
            ]
            scores.append(ScoreOutput(output.prompt_token_ids, values))
        return scores

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: str = "last", normalize: bool = True
    ) -> list[EmbeddingOutput]:
        """Hidden states after the last norm: of the last token, or the mean over the prompt."""
        if pooling not in ("last", "mean"):
            raise RequestError(f"pooling={pooling!r} is unknown; use 'last' or 'mean'.")
        many = as_prompts(prompts)
        params = [SamplingParams(detokenize=False)] * len(many)
        ids = self._submit_all(many, params, [0] * len(many), pool=pooling)
        pending = [self._front.pending[i] for i in ids]
        results = self._finish(ids, None)
        outputs = []
        for one, result in zip(pending, results, strict=True):
            if (error := result.outputs[0].error) is not None:
                raise RequestError(error)
            vector = embedding_of(one, pooling, normalize)
            outputs.append(EmbeddingOutput(result.request_id, result.prompt_token_ids, vector, result.metrics))
        return outputs

    # -- weights

    def write_weights(self, weights: Weights, *, restart: bool = False) -> WrittenWeights:
        """Replace all weights between two steps, by those of another model with the same configuration, tensors and
        schemes, or by `{name: tensor}`. Streams go on: with the state that they have, or, with `restart`, computed anew
        from their tokens. Nothing else finds state of the old weights."""
        return stage_weights(self.loaded, weights).write(restart)

    # -- the loop

    def _params_for(self, count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if given is None:
            return [self.default_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise RequestError(
                f"{count} prompts came with {len(given)} SamplingParams; give one for all or one for each."
            )
        return list(given)

    def _submit_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: Sequence[int], **how: Any
    ) -> list[Hashable]:
        ids: list[Hashable] = []
        try:
            for prompt, param, rank in zip(prompts, params, priority, strict=True):
                ids.append(self._front.submit(prompt, param, priority=rank, **how))
        except RequestError as error:
            for request in ids:
                self._front.abort(request)
                self._front.pending.pop(request, None)
            if len(prompts) > 1:
                raise RequestError(f"Prompt {len(ids)}: {error}") from None
            raise
        return ids

    def _finish(self, ids: Sequence[Hashable], progress: Progress | None) -> list[RequestOutput]:
        """Run until all of `ids` have ended."""
        scheduler = self._front.engine.scheduler
        before, scheduler.sealed = scheduler.sealed, True  # no request arrives before these are finished
        waiting = set(ids)
        try:
            while waiting:
                ended = {d.request_id for d in advance(self._front) if d.finish_reason} & waiting
                for request in ended:
                    result = self._front.pending[request].result
                    if result.finished:
                        waiting.discard(request)
                        if progress is not None:
                            progress(result)
        except BaseException:
            for request in ids:  # an interrupt must not leave requests behind
                self._front.abort(request)
                self._front.pending.pop(request, None)
            raise
        finally:
            scheduler.sealed = before
        return [self._front.take(request) for request in ids]


def advance(front: Frontend) -> list[Delta]:
    """Run one step of the engine; sleep briefly when nothing can run yet."""
    deltas = front.step()
    if front.engine.busy and front.engine.scheduler.stuck:
        wake = front.engine.wake_at()
        seconds = LONGEST_SLEEP if wake is None else min(wake - time.monotonic(), LONGEST_SLEEP)
        time.sleep(max(0.0, seconds))
    return deltas


def embedding_of(pending: Pending, pooling: str, normalize: bool) -> list[float]:
    """The vector of a finished request with pooling."""
    vector = sum(pending.pooled.values())
    if pooling == "mean":
        vector = vector / len(pending.result.prompt_token_ids)
    if normalize:
        vector = vector / vector.norm().clamp_min(1e-12)
    return vector.tolist()


@contextmanager
def _progress_bar(count: int, also: Progress | None) -> Iterator[Progress]:
    """A progress bar of finished requests, on stderr."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=count)

        def tick(result: RequestOutput) -> None:
            bar.advance(task)
            if also is not None:
                also(result)

        yield tick


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string, a dict or a list of token ids is one prompt; any other sequence contains several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"Prompts must be strings, lists of token ids or dicts, not {type(prompts).__name__}.")
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
