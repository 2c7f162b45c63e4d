"""Prompts for benchmarks of speculative decoding: how much of a text can be guessed depends on the text.

They were written for this purpose. Heads and draft models are never trained on them.
"""

from __future__ import annotations

import json
from importlib.resources import files

from bankfull.errors import ConfigError

SETS = ("chat", "code-edit", "quotes", "translation", "extraction")
LONGEST_PERIOD = 64
"""Longest repeated part that counts as a loop, in tokens."""
LEAST_REPEATED = 16
"""Fewest repeated tokens that count as a loop."""


def prompt_set(name: str) -> list[str]:
    """The prompts of a set, each the first message of a user."""
    if name not in SETS:
        raise ConfigError(f"The prompt set {name[:40]!r} is unknown; use {', '.join(SETS)}.")
    text = files("bankfull.bench").joinpath("prompts", f"{name.replace('-', '_')}.json").read_text()
    prompts: list[str] = json.loads(text)
    return prompts


def before_loop(tokens: list[int]) -> int:
    """Tokens before the first loop: a part of at most LONGEST_PERIOD tokens that is repeated at least twice, and at
    least LEAST_REPEATED tokens long in sum. Small models loop, and a loop is guessed by every drafter. The part itself
    is no repetition, so it counts."""
    first = len(tokens)
    for period in range(1, LONGEST_PERIOD + 1):
        run = 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run >= max(2 * period, LEAST_REPEATED):
                first = min(first, i + 1 - run)
                break
    return first
