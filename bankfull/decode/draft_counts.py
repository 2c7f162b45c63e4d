"""Counts of verified and accepted draft tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    drafted: list[int] = field(default_factory=list)
    """Draft tokens verified, by their number in a row's drafts; in a chain that is their position."""
    accepted: list[int] = field(default_factory=list)
    """Draft tokens accepted, by the length of the accepted path."""

    def verified(self, drafts: int, accepted: int) -> None:
        """One row has verified this many drafts."""
        if drafts > len(self.drafted):
            more = [0] * (drafts - len(self.drafted))
            self.drafted += more
            self.accepted += more
        for position in range(drafts):
            self.drafted[position] += 1
        for position in range(accepted):
            self.accepted[position] += 1

    @property
    def verifications(self) -> int:
        """Times that a row verified drafts."""
        return self.drafted[0] if self.drafted else 0

    @property
    def acceptance(self) -> list[float]:
        """Fraction of the drafts at each position that were accepted."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]

    @property
    def mean_accepted(self) -> float | None:
        """Accepted drafts per verification; None if nothing was verified."""
        return sum(self.accepted) / self.verifications if self.verifications else None
