"""One case from its text to a verdict."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, field, replace
from functools import lru_cache

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.loading import load
from bankfull.runtime import naive
from tests.tiny import DEVICE
from tests.trial import run_engine, run_ranks, run_server
from tests.trial.best_of import made
from tests.trial.case import Ask, Case
from tests.trial.compare import Verdict, compare
from tests.trial.denoise import Way
from tests.trial.models import TrialModel, others_of
from tests.trial.outcome import Outcome
from tests.trial.plain import Expected, Memory, answer, denoised_answer
from tests.trial.run_engine import Refused
from tests.trial.setup import Setup, setup_of

DRIVERS = {"engine": run_engine.run, "http": run_server.run, "ranks": run_ranks.run}


@dataclass
class Report:
    case: Case
    problems: list[str] = field(default_factory=list)
    refused: str = ""
    """The sentence with which the whole case was refused."""
    verdict: Verdict = field(default_factory=Verdict)


def run_case(case: Case) -> Report:
    report = Report(case)
    try:
        setup = setup_of(case)
        report.verdict = _verdict(setup)
        report.problems = report.verdict.problems
    except Refused as refused:
        report.refused = str(refused)
        if "\n" in report.refused:
            report.problems = [f"the refusal is not one sentence: {report.refused!r}"]
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        report.problems = [
            f"{type(error).__name__}: {error} ({place.filename.rpartition('bankfull/')[2]}:{place.lineno})"
        ]
    return report


def _verdict(setup: Setup) -> Verdict:
    memory, asks = _memory(setup, setup.model), setup.case.asks
    ahead = setup.needs_truths or any("cuts" in ask.settings for ask in asks)
    expected = (
        [_answers(setup, memory, ask, beyond=setup.needs_truths) for ask in asks] if ahead else [[] for _ in asks]
    )
    outcomes = DRIVERS[setup.driver](setup, expected)
    others = next((_memory(setup, others_of(setup.case.model)) for one in outcomes if one.after), memory)
    memories = [others if one.after else memory for one in outcomes]
    if not ahead or any(outcome.after for outcome in outcomes):
        expected = []
        for ask, outcome, memory in zip(asks, outcomes, memories, strict=True):
            for sample in outcome.samples:  # its tokens as a hint: one pass for all positions
                if sample.tokens and setup.model.denoising is None:
                    memory.prefetch([*ask.prompt, *sample.tokens][: setup.longest])
            expected.append(_answers(setup, memory, ask) if not outcome.refused else [])
    if setup.other_tokens:
        pairs = zip(memories, asks, outcomes, expected, strict=True)
        expected = [_followed(setup, *pair) for pair in pairs]
    expected = [_of_old_weights(outcome, wants) for outcome, wants in zip(outcomes, expected, strict=True)]
    return compare(setup.case, outcomes, expected, memories, setup.tolerance)


def _memory(setup: Setup, model: TrialModel) -> Memory:
    return Memory(_rounding(setup, model) if setup.rounds else model.logits, model.denoising is None)


def _of_old_weights(outcome: Outcome, expected: list[Expected]) -> list[Expected]:
    """What follows a write in the midst of a sample is of no one model."""
    if outcome.before is None:
        return expected
    pairs = zip(expected, outcome.before, strict=True)
    return [replace(one, doubtful=min(one.doubtful, count)) for one, count in pairs]


def _answers(setup: Setup, memory: Memory, ask: Ask, *, beyond: bool = False) -> list[Expected]:
    how = (setup.model.vocab, setup.tolerance, setup.longest)
    if (shape := setup.model.denoising) is not None:
        way = Way.parse(setup.run.get("diffusion", ""))
        return [denoised_answer(memory, shape, way, ask, child, *how) for child in range(made(ask))]
    return [answer(memory, ask, child, *how, beyond=beyond) for child in range(made(ask))]


def _followed(setup: Setup, memory: Memory, ask: Ask, outcome: Outcome, own: list[Expected]) -> list[Expected]:
    """Of sampled requests the samples that have the engine's tokens; a client does not see which tokens they are."""
    if not ask.get("temperature") or outcome.refused or outcome.failed:
        return own
    if any(got.tokens is None for got in outcome.samples):
        return [replace(one, doubtful=0) for one in own]
    how = (setup.model.vocab, setup.tolerance, setup.longest)
    return [answer(memory, ask, i, *how, follow=got.tokens or ()) for i, got in enumerate(outcome.samples)]


def _rounding(setup: Setup, model: TrialModel):  # type: ignore[no-untyped-def]
    """Logits of the engine's own model in one pass over a whole sequence: it rounds as the engine does."""
    options = {name: value for name, value in setup.run.items() if name != "parallel"}
    rounding = _rounding_model(str(model.folder), json.dumps(options, sort_keys=True))
    return lambda tokens: naive.logits(rounding, list(tokens), DEVICE).double().cpu().numpy()


@lru_cache(maxsize=64)
def _rounding_model(folder: str, options: str):  # type: ignore[no-untyped-def]
    run = {"dtype": "float32", "device": DEVICE.type, "threads": 1, "activations": "float"}
    run |= {**json.loads(options), "speculative": "off"}
    try:
        return load(folder, RunConfig(**run), SchedConfig(rows=1, step_tokens=16), StateConfig(), 64).model
    except ValueError as error:
        raise Refused(str(error)) from error
