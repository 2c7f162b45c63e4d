"""Prices of tokens, for the cost in `usage`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from bankfull.errors import ConfigError

PER = 1_000_000
"""Tokens that a price is for."""
CACHED, WRITTEN_5M, WRITTEN_1H = 0.1, 1.25, 2.0
"""Prices of cached input, and of input that is pinned for 5 minutes or an hour, as multiples of the input's, where they
are not given: those of the large APIs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Prices of a million tokens, in any one currency."""

    input: float
    output: float
    cached: float
    """Price of input that was read from the prefix cache."""
    write_5m: float
    write_1h: float
    """Prices of input that was pinned in the cache."""

    def cost(self, usage: PricedUsage) -> float:
        plain = usage.prompt_tokens - usage.cached_tokens - usage.written_5m - usage.written_1h
        parts = (
            (plain, self.input),
            (usage.cached_tokens, self.cached),
            (usage.written_5m, self.write_5m),
            (usage.written_1h, self.write_1h),
            (usage.completion_tokens, self.output),
        )
        return round(sum(tokens * price for tokens, price in parts) / PER, 12)


@dataclass(slots=True)
class PricedUsage:
    """The tokens of a call, by what they cost."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    written_5m: int = 0
    written_1h: int = 0
    """Prompt tokens that the call has newly pinned."""


def parse_prices(text: str) -> TokenPrices:
    """The prices that a text gives as `input=3, output=15, cached=0.3, write-5m=3.75, write-1h=6`; the last three have
    defaults."""
    known = {field.name.replace("_", "-"): field.name for field in fields(TokenPrices)}
    given: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not equals or name not in known or known[name] in given or not 0 <= price < math.inf:
            raise ConfigError(
                f"--prices {text!r}: {part.strip()!r} is not a price per million tokens; give each of "
                f"{', '.join(known)} at most once, as in input=3, output=15."
            )
        given[known[name]] = price
    if missing := [name for name in ("input", "output") if name not in given]:
        raise ConfigError(
            f"--prices {text!r} has no price for {' and '.join(missing)}; add it, as in input=3, output=15."
        )
    base = given["input"]
    defaults = {"cached": CACHED * base, "write_5m": WRITTEN_5M * base, "write_1h": WRITTEN_1H * base}
    return TokenPrices(**{**defaults, **given})
