"""What a run of many cases comes to: counts, and how often each value of each dimension ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.trial.dimensions import OPTIONS
from tests.trial.drawing import PARAMETERS
from tests.trial.trial import Report


@dataclass
class Summary:
    cases: int = 0
    refused: int = 0
    failed: int = 0
    weak: int = 0
    tokens: int = 0
    samples: int = 0
    cut: int = 0
    refused_requests: int = 0
    ran: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Value -> cases that ran with it and were not refused, by dimension."""
    sentences: Counter[str] = field(default_factory=Counter)
    """Refusals, by their beginnings."""

    def add(self, report: Report) -> None:
        self.cases += 1
        self.failed += bool(report.problems)
        if report.refused:
            self.refused += 1
            self.sentences[report.refused[:70]] += 1
            return
        verdict, case = report.verdict, report.case
        self.weak += verdict.weak
        self.tokens += verdict.compared
        self.samples += verdict.samples
        self.cut += verdict.cut
        self.refused_requests += len(verdict.refused)
        self.sentences.update(sentence[:70] for sentence in verdict.refused)
        self.ran["model"][case.model.partition(":")[0]] += 1
        for name, option in OPTIONS.items():
            self.ran[name][str(case.get(name, option.usual))] += 1
        for name in PARAMETERS:
            self.ran["requests"][name] += sum(name in ask.settings for ask in case.asks)

    def lines(self) -> list[str]:
        share = f"{self.weak / max(1, self.cases - self.refused):.1%}"
        found = [
            f"{self.cases} cases: {self.failed} failed, {self.refused} refused as a whole; {self.samples} samples, "
            f"{self.tokens} tokens compared.",
            f"Near ties ended the comparison of {self.cut} samples; {share} of the cases compared few tokens. "
            f"{self.refused_requests} single requests were refused.",
            "",
        ]
        for name, counts in self.ran.items():
            values = ", ".join(f"{value or 'none'} {count}" for value, count in counts.most_common())
            found.append(f"{name:16} {values}")
        return found
