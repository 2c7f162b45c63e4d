"""What a case's options come to: the configurations of an engine, and what stands around it. Each dimension writes its
part (`dimensions.py`); the drivers read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.strategy import Strategy
from tests.kit import GuessLookup
from tests.tiny import DEVICE
from tests.trial import chat
from tests.trial.case import Case
from tests.trial.models import LONGEST, TrialModel, model_of

Truths = Sequence[Sequence[int]]
EXACT, ROUNDED, ROUNDED_APART = 2e-3, 0.05, 0.3
"""How far logits may be off: where the plain loop computes exactly, where both round, and where ranks round their own
parts of a token's values, each by a scale of its own, and the plain loop all of them by one."""


@dataclass
class Setup:
    case: Case
    model: TrialModel
    run: dict[str, Any] = field(default_factory=dict)
    sched: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    driver: str = "engine"
    service: str = ""
    """Engines behind the server, if they are several: replicas, separate (for prompts and for decoding)."""
    late: bool = False
    captured: bool = True
    tight: bool = False
    """The pool of pages is hardly larger than the longest sequence."""
    preempts: bool = False
    written: str = ""
    """Whether other weights are written at some step, and what becomes of running sequences then. Requests that have
    the setting `later` come after it."""
    tiers: str = ""
    """Below the device, by hand: host, both. A CPU's loader refuses host memory, which a GPU's takes."""
    rounds: bool = False
    """The plain loop runs the engine's own model, because it has to round as the engine does."""
    strategy: Callable[[Truths], Strategy] | None = None
    """Makes the strategy, from the sequences that the plain loop gives."""
    lookup: Callable[[Truths], GuessLookup] | None = None
    other_tokens: bool = False
    """Sampled requests get tokens by other random numbers than the plain loop's."""

    @property
    def tolerance(self) -> float:
        if not self.rounds:
            return EXACT
        return ROUNDED_APART if self.run.get("activations") == "token" and self.run.get("parallel") else ROUNDED

    @property
    def needs_truths(self) -> bool:
        return self.strategy is not None or self.lookup is not None

    def configs(self) -> tuple[RunConfig, SchedConfig, StateConfig]:
        run = {"dtype": "float32", "device": DEVICE.type, "threads": 1, "speculative": "off"}
        run |= {"activations": "float", **self.run}
        sched = {"rows": 4, "step_tokens": 16, "quantum_ms": 0.01, "starvation": 0.01, **self.sched}
        state = {"page_tokens": 4, "snapshot_every": 2, **self.state}
        return RunConfig(**run), SchedConfig(**sched), StateConfig(**state)

    @property
    def longest(self) -> int:
        return LONGEST


def suits_late(layout: str) -> bool:
    """Whether ranks may have the late device, which stands for one that runs beside its host: it runs work no later
    than its host waits for it. But the host of a pipeline's stage waits for the results of the last one instead."""
    return "pp=" not in layout


def setup_of(case: Case) -> Setup:
    from tests.trial.dimensions import OPTIONS

    model = model_of(case.model)
    made = Setup(replace(case, asks=tuple(chat.meant(ask, model.vocab) for ask in case.asks)), model)
    for name, value in case.options.items():
        OPTIONS[name].use(made, value)
    return made
