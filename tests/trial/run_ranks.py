"""Runs a case on an engine over several ranks, which are threads here: rank 0 plans, the others run what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.lookahead import Jacobi, Lookahead
from bankfull.decode.plain import Plain
from bankfull.errors import BankfullError
from bankfull.frontend import Frontend
from bankfull.parallel.refused import refuse_layout
from bankfull.runtime.device import Cpu
from bankfull.runtime.fake import Late
from bankfull.text.load import load_tokenizer
from bankfull.weights.source import open_model
from tests.parallel import split_bench
from tests.trial.outcome import Outcome, Refused
from tests.trial.plain import Expected
from tests.trial.run_engine import Loop, truths_of
from tests.trial.setup import Setup

STRATEGIES: dict[str, Any] = {
    "off": lambda seed: Plain(),
    "lookup": lambda seed: Plain(),
    "jacobi": lambda seed: Jacobi(1 + seed % 5),
    "lookahead": lambda seed: Lookahead(1 + seed % 5, 2 + seed % 3, 1 + seed % 4),
}
"""Ways of drafting that every rank can make by itself, or that the host does alone."""


def run(setup: Setup, expected: Sequence[Sequence[Expected]]) -> list[Outcome]:
    run, sched, state = _accepted(setup)
    seed, name = setup.case.seed, setup.case.get("strategy", "off")
    lookup = None if setup.lookup is None else setup.lookup(truths_of(setup, expected))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_bench, "folder_of", lambda shape: setup.model.folder)
        try:
            spread = split_bench.SplitBench(
                setup.case.model,
                run.parallel,
                lambda pages: STRATEGIES[name](seed),
                partial(Late, seed) if setup.late else Cpu,
                sched=sched,
                state=state,
                max_len=setup.longest,
                lookup=lookup,
            )
        except BankfullError as error:
            raise Refused(str(error)) from error
        with spread as bench:
            tokenizer, template = load_tokenizer(open_model(setup.model.folder))
            front = Frontend(bench.engine, tokenizer, template, vocab=setup.model.vocab, max_len=setup.longest)
            loop = Loop(setup, front, expected, bench.poison)
            loop.run()
    return loop.outcomes


def _accepted(setup: Setup) -> tuple[RunConfig, SchedConfig, StateConfig]:
    try:
        run, sched, state = setup.configs()
        refuse_layout(run, state, open_model(setup.model.folder).config)
    except BankfullError as error:
        raise Refused(str(error)) from error
    return run, sched, state
