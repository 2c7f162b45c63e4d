"""The slow baseline for comparisons: greedy, without a KV cache, so each token runs the whole sequence again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bankfull.cli.answer import FinishedAnswer, interrupts
from bankfull.errors import ConfigError
from bankfull.frontend import Prompt
from bankfull.limits.meter.step import StepShape
from bankfull.llm import LLM
from bankfull.outputs import CompletionOutput, Delta, Metrics, RequestOutput
from bankfull.text.detokenize import Detokenizer
from bankfull.types import Finish

UNDERSTOOD = ("max_tokens", "ignore_eos", "seed")


def check_naive(given: dict[str, Any]) -> None:
    odd = [name for name, value in given.items() if name not in UNDERSTOOD and (name, value) != ("temperature", 0.0)]
    if odd:
        shown = ", ".join("--" + name.replace("_", "-") for name in odd)
        raise ConfigError(f"--naive decodes greedily and does not support {shown}; leave out one of the two.")


def naive_answer(
    llm: LLM, prompt: Prompt, given: dict[str, Any], show: Callable[[Delta], None] | None
) -> FinishedAnswer:
    """The engine's greedy answer, up to rounding."""
    from bankfull.runtime.naive import generate

    front = llm.loaded.frontend
    text, ids = front.encode(prompt)
    room = front.max_len - len(ids)
    if given.get("max_tokens", 1) > room:
        raise ConfigError(
            f"The prompt leaves room for {room} tokens, fewer than --max-tokens asks for; lower --max-tokens."
        )
    stop_ids = frozenset[int]() if given.get("ignore_eos") else llm.tokenizer.eos_ids
    output, detokenizer = CompletionOutput(0), Detokenizer(llm.tokenizer)
    result = RequestOutput(0, text, ids, [output], metrics=Metrics(time.time()))
    tokens, metrics, begun = list(ids), result.metrics, time.monotonic()
    with interrupts() as interrupted:
        while output.finish_reason is None and not interrupted():
            [token], _ = generate(llm.loaded.model, tokens, 1, llm.loaded.device.torch)
            tokens.append(token)
            metrics.output_tokens += 1
            metrics.ttft = metrics.ttft or time.monotonic() - begun
            if token in stop_ids:
                output.finish_reason = Finish.STOP.value
            elif metrics.output_tokens == given.get("max_tokens", room):
                output.finish_reason = Finish.LENGTH.value
            piece = "" if token in stop_ids else detokenizer.push([token])
            if output.finish_reason is not None:
                piece += detokenizer.finish()
            output.text += piece
            if show is not None:
                show(Delta(0, 0, piece, [token]))
        stopped = interrupted()
    metrics.finished = time.monotonic() - begun
    output.token_ids = tokens[len(ids) :]
    result.finished = True
    # The limit is that of decoding with a KV cache: each token is computed once.
    steps = [StepShape.decode(1, length) for length in range(len(ids) + 1, len(tokens))]
    return FinishedAnswer(result, [StepShape.prefill(len(ids))], steps, stopped)
