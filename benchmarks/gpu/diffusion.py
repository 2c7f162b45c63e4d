"""The work of diffusion language models: several tokens are fixed per forward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bankfull.config import DiffusionChoice
from bankfull.decode.diffusion import Denoising
from bankfull.errors import ConfigError
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.statistics import spread
from benchmarks.gpu.engine import Session, Setup, Trace
from benchmarks.gpu.timeline import Timeline, trace_all
from benchmarks.gpu.works import TOKENS, Figure, Work


def answers_of(trace: Trace) -> dict[int, list[int]]:
    """The tokens of each request in order."""
    found: dict[int, list[int]] = {}
    for (_, request, _), token in zip(trace.tokens, trace.ids, strict=True):
        found.setdefault(request, []).append(token)
    return found


def denoise(
    session: Session, ceilings: Ceilings, *, batch: int, prompt: int, outputs: int, per_step: int, reps: int
) -> Figure:
    """Tokens per second over whole answers, with `per_step` positions fixed in each step, beside the share of tokens
    that one position per step would have given. Random weights are never sure, so no threshold is in use."""
    strategy = session.engine.runner.strategy
    if not isinstance(strategy, Denoising):
        raise ConfigError(f"{session.setup.label} is not a diffusion model; choose another work for it.")
    before = strategy.choice
    prompts = session.prompts(batch, prompt)
    rates, limits, passes = [], [], []
    try:
        strategy.choice = fixed(before, per_step)
        for rep in range(reps + 1):
            trace = session.run(prompts, outputs)
            if rep:  # the first is a warm-up
                rates.append(len(trace.tokens) / trace.seconds)
                limits.append(len(trace.tokens) / session.least(trace.shapes, ceilings))
                passes.append(len(trace.tokens) / batch / len(trace.shapes))
        answers = answers_of(trace)
        strategy.choice = fixed(before, 1)
        reference = answers if per_step == 1 else answers_of(session.run(prompts, outputs))
    finally:
        strategy.choice = before
    more = {
        "tokens per forward": spread(passes).median,
        "% as with one per step": 100 * equal_share(answers, reference),
    }
    return Figure(spread(rates), TOKENS, spread(limits).median, more)


def fixed(choice: DiffusionChoice, per_step: int) -> DiffusionChoice:
    return replace(choice, order="confidence", tokens=per_step, threshold=1.0)


def equal_share(answers: dict[int, list[int]], reference: dict[int, list[int]]) -> float:
    pairs = [pair for request in reference for pair in zip(answers[request], reference[request], strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


def denoise_work(title: str, setup: Setup, *, batch: int, prompt: int, outputs: int, per_step: int, reps: int) -> Work:
    def trace(session: Session) -> Timeline:
        return trace_all(session, session.prompts(batch, prompt), outputs)

    measure = partial(denoise, batch=batch, prompt=prompt, outputs=outputs, per_step=per_step, reps=reps)
    return Work(title, setup, measure, trace)
