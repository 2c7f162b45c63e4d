"""The number of replicas: fixed, or the bounds of autoscaling."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bankfull.errors import ConfigError

MOST_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """A fixed number of replicas, or the bounds of autoscaling."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> ReplicaRange:
        match = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text.strip())
        least = int(match[1]) if match else 0
        most = int(match[2]) if match and match[2] else least
        if not 1 <= least <= most <= MOST_REPLICAS:
            raise ConfigError(
                f"{text[:40]!r} is no number of replicas: give one from 1 to {MOST_REPLICAS}, or a range such as 1..4."
            )
        return cls(least, most)

    @property
    def scales(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}..{self.most}" if self.scales else str(self.least)
