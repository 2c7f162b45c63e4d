"""A smaller case that fails in the same way: without requests, then options, then settings, then tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.trial.case import Ask, Case

MOST_RUNS = 300
NEED_TEMPERATURE = ("temperature", "seed", "n", "best_of", "top_k", "top_p", "min_p", "typical_p")


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest cut first."""
    for at in range(len(case.asks)):
        if len(case.asks) > 1:
            yield replace(case, asks=case.asks[:at] + case.asks[at + 1 :])
    for name in case.options:
        yield case.without(name)
    for at, ask in enumerate(case.asks):
        for less in _smaller_asks(ask):
            yield replace(case, asks=(*case.asks[:at], less, *case.asks[at + 1 :]))


def _smaller_asks(ask: Ask) -> Iterator[Ask]:
    for name in ask.settings:
        if name == "temperature":
            yield Ask(ask.prompt, {k: v for k, v in ask.settings.items() if k not in NEED_TEMPERATURE})
        elif name not in ("max_tokens", "seed"):
            yield ask.without(name)
    length = len(ask.prompt)
    for cut in (length // 2, 1):
        if 0 < cut < length:
            yield replace(ask, prompt=ask.prompt[cut:])
            yield replace(ask, prompt=ask.prompt[:-cut])
    most = ask.get("max_tokens", 1)
    for fewer in {most // 2, most - 1}:
        if fewer >= max(1, ask.get("min_tokens", 0)) and fewer < most:
            yield replace(ask, settings={**ask.settings, "max_tokens": fewer})


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Repeats the first cut that still fails until none does."""
    runs, found = 0, True
    while found and runs < MOST_RUNS:
        found = False
        for less in smaller(case):
            runs += 1
            if runs > MOST_RUNS:
                break
            if fails(less):
                case, found = less, True
                break
    return case
