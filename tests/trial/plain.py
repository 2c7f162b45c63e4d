"""The oracle: a plain loop over one sample. No cache, no batch, no drafts, and nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.trial import vocabulary
from tests.trial.case import Ask
from tests.trial.chooser import Choice, choose, possible, stop_ids
from tests.trial.denoise import Shape, Way, denoised
from tests.trial.grammar_walk import GrammarWalk

BEYOND = 5
"""Tokens that the loop continues after the end of a sample, for drafts that go too far."""


@dataclass
class Expected:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = "length"
    stop_reason: int | str | None = None
    logprobs: list[NDArray[np.float64]] = field(default_factory=list)
    """The log-softmax of the raw logits at each token's position."""
    doubtful: int = 1 << 30
    """The first token that rounding could have changed."""
    beyond: list[int] = field(default_factory=list)


class Memory:
    """Logits of whole sequences: of a prefix, whatever follows it, they are the same, if the model is `causal`."""

    def __init__(self, compute: Callable[[Sequence[int]], NDArray[np.float64]], causal: bool = True) -> None:
        self._compute, self._causal = compute, causal
        self._known: list[tuple[tuple[int, ...], NDArray[np.float64]]] = []

    def prefetch(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        whole = tuple(tokens)
        for known, logits in self._known:
            if known == whole or (self._causal and known[: len(whole)] == whole):
                return logits[: len(whole)]
        self._known.append((whole, self._compute(whole)))
        return self._known[-1][1]

    def last(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        return self.prefetch(tokens)[-1]


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    moved = logits - logits.max(-1, keepdims=True)
    found: NDArray[np.float64] = moved - np.log(np.exp(moved).sum(-1, keepdims=True))
    return found


def answer(
    memory: Memory,
    ask: Ask,
    child: int,
    vocab: int,
    tolerance: float,
    longest: int,
    *,
    beyond: bool = False,
    follow: Sequence[int] = (),
) -> Expected:
    """`follow`: tokens that were drawn with other numbers. The loop takes them where they could be drawn at all, and
    says how such a sample ends."""
    found = Expected()
    structured = ask.get("structured")
    grammar = None if structured is None else GrammarWalk(structured, vocab)
    limit = min(ask.get("max_tokens", longest), longest - len(ask.prompt))
    ends = stop_ids(ask)
    for place in range(limit):
        line = memory.last([*ask.prompt, *found.tokens])
        allowed = None if grammar is None else grammar.allowed()
        choice = choose(line, ask, found.tokens, child, allowed, tolerance)
        if place < len(follow) and possible(line, ask, found.tokens, allowed, tolerance)[follow[place]]:
            choice = Choice(follow[place], False)
        if choice.doubtful:
            found.doubtful = min(found.doubtful, place)
        if choice.token is None:
            found.finish = "error"
            break
        found.tokens.append(choice.token)
        found.logprobs.append(log_softmax(line))
        if choice.token in ends:
            found.finish = "stop"
            if choice.token in ask.get("stop_token_ids", ()):
                found.stop_reason = choice.token
        complete = grammar is not None and found.finish != "stop" and grammar.take(choice.token)
        ended = found.finish == "stop" or place == limit - 1
        if (stop := _stop_string(ask, found.tokens, ended or complete, vocab)) is not None:
            found.finish, found.stop_reason, ended = "stop", stop, True
        if complete:
            found.finish, ended = "stop", True
        if ended:
            break
    found.text = text_of(ask, found, vocab)
    if beyond:
        _go_on(memory, ask, child, found, tolerance, longest)
    return found


def denoised_answer(
    memory: Memory, shape: Shape, way: Way, ask: Ask, child: int, vocab: int, tolerance: float, longest: int
) -> Expected:
    """Of a diffusion model: whole blocks, which end within one at a limit, an end token or a stop string."""
    found, ends = Expected(), stop_ids(ask)
    limit = min(len(ask.prompt) + ask.get("max_tokens", longest), longest)
    while len(ask.prompt) + len(found.tokens) < limit:
        known = [*ask.prompt, *found.tokens]
        block, near = denoised(memory.prefetch, shape, way, ask, child, known, limit, longest, tolerance)
        if near:
            found.doubtful = min(found.doubtful, len(found.tokens))
        if not block:
            break
        for token in block[: limit - len(known)]:
            found.tokens.append(token)
            if token in ends:
                found.finish = "stop"
                found.stop_reason = token if token in ask.get("stop_token_ids", ()) else None
            ended = found.finish == "stop" or len(ask.prompt) + len(found.tokens) == limit
            if (stop := _stop_string(ask, found.tokens, ended, vocab)) is not None:
                found.finish, found.stop_reason = "stop", stop
            if found.finish == "stop":
                break
        if found.finish == "stop":
            break
    found.text = text_of(ask, found, vocab)
    return found


def _go_on(memory: Memory, ask: Ask, child: int, found: Expected, tolerance: float, longest: int) -> None:
    while len(found.beyond) < BEYOND and len(ask.prompt) + len(found.tokens) + len(found.beyond) < longest:
        said = [*found.tokens, *found.beyond]
        choice = choose(memory.last([*ask.prompt, *said]), ask, said, child, None, tolerance)
        if choice.token is None:
            return
        found.beyond.append(choice.token)


def _shown(ask: Ask, tokens: Sequence[int], vocab: int, whole: bool) -> str:
    """The text of tokens: those that end an answer have none, unless a stop token is asked for."""
    kept = list(tokens)
    if kept and kept[-1] in stop_ids(ask):
        asked = kept[-1] in ask.get("stop_token_ids", ())
        if not (asked and ask.get("include_stop_str_in_output")):
            kept.pop()
    decode = vocabulary.text_of if whole else vocabulary.stable_text_of
    return decode(kept, vocab, spells=not ask.get("skip_special_tokens", True))


def _start(ask: Ask, tokens: Sequence[int], vocab: int) -> int:
    """Where stop strings begin to count."""
    early = tokens[: max(0, ask.get("min_tokens", 0) - 1)]
    return len(vocabulary.stable_text_of(early, vocab, spells=not ask.get("skip_special_tokens", True)))


def _stop_string(ask: Ask, tokens: Sequence[int], ended: bool, vocab: int) -> str | None:
    """The stop string that is completed first, the longest of several; text before `min_tokens` does not count."""
    stops, least = ask.get("stop", ()), ask.get("min_tokens", 0)
    if not stops or len(tokens) < least:
        return None
    text = _shown(ask, tokens, vocab, ended)
    start = _start(ask, tokens, vocab)
    complete = [(at + len(stop), -len(stop), stop) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(complete)[2] if complete else None


def text_of(ask: Ask, found: Expected, vocab: int) -> str:
    text = _shown(ask, found.tokens, vocab, whole=True)
    if isinstance(found.stop_reason, str):
        at = text.find(found.stop_reason, _start(ask, found.tokens, vocab))
        text = text[: at + (len(found.stop_reason) if ask.get("include_stop_str_in_output") else 0)]
    return text
