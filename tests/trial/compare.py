"""Compares what a run gave with the plain loop, up to the first near tie of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.trial import best_of, chat
from tests.trial.case import Ask, Case
from tests.trial.outcome import Got, Outcome
from tests.trial.plain import Expected, Memory, log_softmax
from tests.trial.run_engine import cuts_of

LOGPROB_SLACK = 4.0
"""Log-probabilities may be off by this many times the tolerance of logits."""


@dataclass
class Verdict:
    problems: list[str] = field(default_factory=list)
    compared: int = 0
    """Tokens that were equal."""
    samples: int = 0
    cut: int = 0
    """Samples whose comparison a near tie ended."""
    refused: list[str] = field(default_factory=list)
    """Requests that were refused, by their sentences."""

    @property
    def weak(self) -> bool:
        return self.samples > 0 and self.compared < 2 * self.samples


def compare(
    case: Case,
    outcomes: Sequence[Outcome],
    expected: Sequence[Sequence[Expected]],
    memories: Sequence[Memory],
    tolerance: float,
) -> Verdict:
    """`memories`: of the model that each request ran on."""
    verdict = Verdict()
    for number, (ask, outcome) in enumerate(zip(case.asks, outcomes, strict=True)):
        if outcome.refused:
            verdict.refused.append(outcome.refused)
            if "\n" in outcome.refused or not outcome.refused.rstrip().endswith((".", "?")):
                verdict.problems.append(f"request {number}: the refusal is not one sentence: {outcome.refused!r}")
            continue
        at = f"request {number}"
        if outcome.failed:
            wants = expected[number]
            if all(one.finish != "error" and one.doubtful > len(one.tokens) for one in wants):
                verdict.problems.append(f"{at}: it failed ({outcome.failed}), which no sample should")
            continue
        if len(outcome.samples) != ask.get("n", 1):
            verdict.problems.append(f"{at}: {len(outcome.samples)} samples of {ask.get('n', 1)}")
            continue
        whole = all(one.doubtful > len(one.tokens) for one in expected[number])
        cuts = cuts_of(ask, expected[number]) if "cuts" in ask.settings else [0] * ask.get("n", 1)
        wants = best_of.shown(ask, expected[number], 2 * LOGPROB_SLACK * tolerance)
        for child, (got, want) in enumerate(zip(outcome.samples, wants, strict=True)):
            problem, same = _sample(ask, got, want, cuts[child], tolerance)
            verdict.samples += 1
            verdict.cut += not same
            whole &= same
            verdict.compared += min(len(want.tokens), want.doubtful) if not problem else 0
            if problem:
                verdict.problems.append(f"{at}, sample {child}: {problem}")
        verdict.problems += [f"{at}: {p}" for p in _counts(case, number, outcome, expected[number], whole)]
        if outcome.prompt_logprobs is not None and not any(got.finish == "abort" for got in outcome.samples):
            verdict.problems += [f"{at}: {p}" for p in _prompt_lines(ask, outcome, memories[number], tolerance)]
    return verdict


def _sample(ask: Ask, got: Got, want: Expected, cut: int, tolerance: float) -> tuple[str, bool]:
    """What is wrong, and whether all of the sample was compared."""
    aborted = "abort" in ask.settings and got.finish == "abort"
    if got.tokens is None:
        return _seen_by_a_client(ask, got, want, aborted, tolerance)
    doubtful = want.doubtful if want.doubtful >= cut else 1 << 30
    certain = min(len(want.tokens), doubtful)
    if aborted:
        certain = min(certain, len(got.tokens))
        if len(got.tokens) > len(want.tokens) and doubtful > len(want.tokens):
            return f"tokens {got.tokens} go on after the end {want.tokens}", True
    if got.tokens[:certain] != want.tokens[:certain]:
        where = next(
            (i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b), len(got.tokens)
        )
        return f"token {where} of {got.tokens} differs from {want.tokens}" + (
            f" ({got.error})" if got.error else ""
        ), True
    if problem := _logprobs(ask, got, want, certain, cut, tolerance):
        return problem, True
    if got.streamed is not None and got.streamed != got.text:
        return f"the pieces {got.streamed!r} are not the text {got.text!r}", True
    if doubtful < len(want.tokens) or (want.finish == "error" and doubtful == len(want.tokens)):
        return "", False
    if aborted:
        return "", True
    if len(got.tokens) != len(want.tokens):
        return f"{len(got.tokens)} tokens {got.tokens}, not {len(want.tokens)} {want.tokens}; {got.finish}", True
    return _ending(ask, got, want), True


def _seen_by_a_client(ask: Ask, got: Got, want: Expected, aborted: bool, tolerance: float) -> tuple[str, bool]:
    if want.doubtful <= len(want.tokens):
        return "", False
    if aborted and "tools" in ask.settings:
        same = chat.begins(chat.Message(got.text, got.calls), chat.read(ask, want.text))
        return ("" if same else f"text {got.text!r} and calls {got.calls} do not begin {want.text!r}"), True
    if aborted:
        same = want.text.startswith(got.text)
        return ("" if same else f"text {got.text!r} does not begin {want.text!r}"), True
    if got.values is not None:
        truth = [float(line[token]) for line, token in zip(want.logprobs, want.tokens, strict=True)]
        near = (abs(a - b) <= LOGPROB_SLACK * tolerance for a, b in zip(got.values, truth, strict=False))
        if len(got.values) != len(truth) or not all(near):
            return f"logprobs {got.values}, not {truth}", True
    elif ask.get("logprobs") is not None and want.finish != "error":
        return "no logprobs", True
    return _ending(ask, got, want), True


def _ending(ask: Ask, got: Got, want: Expected) -> str:
    chats = "tools" in ask.settings and got.tokens is None  # else no server has read the text
    calls = chats and want.finish == "stop" and chat.read(ask, want.text).calls
    if got.finish != ("tool_calls" if calls else want.finish):
        return f"ends with {got.finish} ({got.error}), not {want.finish}; tokens {got.tokens}"
    if got.stop_reason != want.stop_reason:
        return f"stop reason {got.stop_reason!r}, not {want.stop_reason!r}"
    if chats:
        complete = want.finish == "stop" and want.stop_reason is None
        return chat.problem(ask, chat.Message(got.text, got.calls), want.text, complete)
    if got.text != want.text and want.finish != "error":
        return f"text {got.text!r}, not {want.text!r}"
    return ""


def _logprobs(ask: Ask, got: Got, want: Expected, certain: int, cut: int, tolerance: float) -> str:
    if (width := ask.get("logprobs")) is None or got.logprobs is None:
        return "" if width is None else "no logprobs"
    for place, line in enumerate(got.logprobs):
        if place + cut >= certain:
            break
        truth = want.logprobs[place + cut]
        token = want.tokens[place + cut]
        if token not in line or (not {width, width + 1} & {len(line)} and len(line) != max(1, width)):
            return f"logprobs {place} have {len(line)} entries for {width}: {line}"
        for other, value in line.items():
            if abs(value - truth[other]) > LOGPROB_SLACK * tolerance:
                return f"logprob {place} of token {other} is {value}, not {truth[other]}"
        if width and min(line.values()) < np.sort(truth)[-width] - LOGPROB_SLACK * tolerance and len(line) <= width:
            return f"logprobs {place} are not of the {width} best: {line}"
    return ""


def _prompt_lines(ask: Ask, outcome: Outcome, memory: Memory, tolerance: float) -> list[str]:
    lines = outcome.prompt_logprobs or []
    truth = log_softmax(memory.prefetch(ask.prompt))
    if len(lines) != len(ask.prompt) or (lines and lines[0] is not None):
        return [f"{len(lines)} lines of prompt logprobs for {len(ask.prompt)} tokens"]
    for place, line in enumerate(lines[1:], 1):
        if line is None or ask.prompt[place] not in line:
            return [f"prompt logprob {place} is {line}"]
        for other, value in line.items():
            if abs(value - truth[place - 1][other]) > LOGPROB_SLACK * tolerance:
                return [f"prompt logprob {place} of token {other} is {value}, not {truth[place - 1][other]}"]
    return []


def _counts(case: Case, number: int, outcome: Outcome, want: Sequence[Expected], whole: bool) -> list[str]:
    ask, problems = case.asks[number], []
    if outcome.prompt_tokens is not None and outcome.prompt_tokens != len(ask.prompt):
        problems.append(f"{outcome.prompt_tokens} prompt tokens, not {len(ask.prompt)}")
    tokens = sum(len(one.tokens) for one in want)
    if whole and outcome.output_tokens is not None and "abort" not in ask.settings and outcome.output_tokens != tokens:
        problems.append(f"{outcome.output_tokens} output tokens, not {tokens}")
    if outcome.cached and not case.get("prefix_cache", True) and not case.get("preempt"):
        problems.append(f"{outcome.cached} cached tokens without a prefix cache")
    if (
        outcome.cached is not None
        and _never_thrown_out(case)
        and outcome.cached > (most := _shared(case, number, want))
    ):
        problems.append(f"{outcome.cached} cached tokens, but only {most} were known before")
    return problems


def _never_thrown_out(case: Case) -> bool:
    """No sequence finds pages of its own, as one does that was preempted or resumed."""
    return not case.get("preempt") and case.get("pool") != "tight" and not case.get("tiers")


def _shared(case: Case, number: int, want: Sequence[Expected]) -> int:
    """Tokens that the request has in common with another one under the same salt."""
    ask = case.asks[number]
    if ask.get("n", 1) > 1 or "cuts" in ask.settings:
        return len(ask.prompt) + max((len(one.tokens) for one in want), default=0)
    others = (other for i, other in enumerate(case.asks) if i != number and other.get("salt") == ask.get("salt"))
    return max((_common(ask.prompt, other.prompt) for other in others), default=0)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The whole of `one`, if `other` ends within it: the other's answer may go on like it."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return len(one)
