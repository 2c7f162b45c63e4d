"""The works: each is a run of the engine, a figure from it, and the limit of the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bankfull.errors import ConfigError
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.model.memory import sequence_bytes
from bankfull.limits.statistics import Spread, spread
from benchmarks.gpu.cover import covered
from benchmarks.gpu.engine import Session, Setup
from benchmarks.gpu.peer import PeerLoad
from benchmarks.gpu.timeline import Timeline, trace_all, trace_decode

TOKENS, MILLISECONDS, STEP_TIME = "tok/s", "ms", "ms a step"
TRACED_STEPS = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """The result of a work."""

    values: Spread
    """Values over the repetitions."""
    unit: str
    limit: float | None = None
    """Limit in the same unit, for the steps of the median repetition."""
    more: dict[str, float] = field(default_factory=dict)
    """Other figures of the same runs, by name and unit."""

    @property
    def percent(self) -> float | None:
        """Percent of the limit; for a time, the limit in percent of it."""
        if self.limit is None:
            return None
        reached = self.values.median / self.limit
        return 100 / reached if self.unit == MILLISECONDS else 100 * reached


@dataclass(frozen=True, slots=True)
class Work:
    title: str
    setup: Setup
    measure: Callable[[Session, Ceilings], Figure]
    trace: Callable[[Session], Timeline]
    peer: PeerLoad | None = None
    """The same load for another engine; None = there is no equivalent."""


def decode(session: Session, ceilings: Ceilings, *, batch: int, prompt: int, outputs: int, reps: int) -> Figure:
    """Tokens per second while all sequences of the batch decode and no prefill runs."""
    rates, limits, times = [], [], []
    state = sequence_bytes(session.made.layout, prompt + outputs)
    for rep in range(reps + 1):
        trace = session.run(session.prompts(batch, prompt), outputs)
        begin, end = trace.all_started, trace.first_ended
        tokens = sum(begin < now <= end for now, _, _ in trace.tokens)
        steps = tokens // batch
        if not steps:
            raise ConfigError(f"{batch} sequences never decoded together: the engine has too few rows or pages.")
        shapes = [shape for shape in trace.decode_shapes() if len(shape.counts) == batch][-steps:]
        if rep:  # the first is a warm-up
            rates.append(tokens / (end - begin))
            times.append((end - begin) / steps)
            limits.append(tokens / session.least(shapes, ceilings))
    return Figure(
        spread(rates),
        TOKENS,
        spread(limits).median,
        {STEP_TIME: 1e3 * spread(times).median, "bytes of state per sequence": float(state)},
    )


def by_context(session: Session, ceilings: Ceilings, *, contexts: Sequence[int], outputs: int, reps: int) -> Figure:
    """Time per token of one sequence after the longest context, beside those after the others."""
    times, limit = {}, 0.0
    for context in contexts:
        found = decode(session, ceilings, batch=1, prompt=context, outputs=outputs, reps=reps)
        assert found.limit is not None
        times[context], limit = found.more[STEP_TIME], 1e3 / found.limit
    more = {f"ms at {context}": value for context, value in times.items()}
    more["% from the fastest to the slowest"] = 100 * (max(times.values()) / min(times.values()) - 1)
    return Figure(spread([times[contexts[-1]]]), MILLISECONDS, limit, more)


def prefill(session: Session, ceilings: Ceilings, *, batch: int, prompt: int, reps: int) -> Figure:
    """Prompt tokens per second until every sequence has its first token."""
    rates, limits, operations = [], [], []
    for rep in range(reps + 1):
        trace = session.run(session.prompts(batch, prompt), 1)
        if rep:
            rates.append(batch * prompt / trace.all_started)
            limits.append(batch * prompt / session.least(trace.shapes, ceilings))
            operations.append(session.cost(trace.shapes).flops / trace.all_started)
    return Figure(spread(rates), TOKENS, spread(limits).median, {"TFLOP/s": 1e-12 * spread(operations).median})


def first_token(session: Session, ceilings: Ceilings, *, prompt: int, reps: int) -> Figure:
    """Time to first token of a single request. The limit counts the prefill steps only: the loop has launched the next
    step by then."""
    times, limits = [], []
    for rep in range(reps + 1):
        trace = session.run([session.prompt(prompt)], 2)
        if rep:
            own = [shape for shape in trace.shapes if shape.lengths[0] <= prompt]
            times.append(1e3 * trace.all_started)
            limits.append(1e3 * session.least(own, ceilings))
    return Figure(spread(times), MILLISECONDS, spread(limits).median)


def offline(
    session: Session, ceilings: Ceilings, *, requests: int, shortest: int, longest: int, outputs: int, reps: int
) -> Figure:
    """Output tokens per second over a whole run, prefill included."""
    rates, limits, steps = [], [], []
    for _ in range(reps):
        trace = session.run(mixed_prompts(session, requests, shortest, longest), outputs)
        rates.append(len(trace.tokens) / trace.seconds)
        limits.append(len(trace.tokens) / session.least(trace.shapes, ceilings))
        steps.append(len(trace.shapes))
    return Figure(spread(rates), TOKENS, spread(limits).median, {"steps": spread(steps).median})


def host_share(
    session: Session, ceilings: Ceilings, *, requests: int, shortest: int, longest: int, outputs: int, reps: int
) -> Figure:
    """Share of the time in such a run in which the device waited for the host."""
    shares = []
    for _ in range(reps):
        with covered(session.engine) as device:
            session.run(mixed_prompts(session, requests, shortest, longest), outputs)
        shares.append(100 * device.idle_share())
    more = {}
    if session.made.device.kind == "cuda":
        # The device's clock shows idle time between launches; idle time inside a launch needs a trace.
        steady = trace_decode(session, session.prompts(requests, shortest), 2 * TRACED_STEPS + 8, TRACED_STEPS)
        more["% idle in a traced decode step"] = 100 * steady.idle
    return Figure(spread(shares), "% of the time", None, more)


def mixed_prompts(session: Session, requests: int, shortest: int, longest: int) -> list[list[int]]:
    """Lengths evenly spaced from the shortest to the longest, in a fixed order."""
    span = max(1, requests - 1)
    lengths = [shortest + (longest - shortest) * i // span for i in range(requests)]
    order = sorted(range(requests), key=lambda i: i * 7919 % requests)
    return [session.prompt(lengths[i]) for i in order]


def decode_work(title: str, setup: Setup, *, batch: int, prompt: int, outputs: int, reps: int) -> Work:
    def trace(session: Session) -> Timeline:
        return trace_decode(session, session.prompts(batch, prompt), outputs, min(TRACED_STEPS, outputs // 2))

    measure = partial(decode, batch=batch, prompt=prompt, outputs=outputs, reps=reps)
    return Work(title, setup, measure, trace, PeerLoad(batch, prompt, decodes=True))


def prefill_work(title: str, setup: Setup, *, batch: int, prompt: int, reps: int) -> Work:
    def trace(session: Session) -> Timeline:
        return trace_all(session, session.prompts(batch, prompt), 1)

    measure = partial(prefill, batch=batch, prompt=prompt, reps=reps)
    return Work(title, setup, measure, trace, PeerLoad(batch, prompt, decodes=False))


def context_work(title: str, setup: Setup, *, contexts: Sequence[int], outputs: int, reps: int) -> Work:
    def trace(session: Session) -> Timeline:
        return trace_decode(session, [session.prompt(contexts[-1])], outputs, min(TRACED_STEPS, outputs // 2))

    return Work(title, setup, partial(by_context, contexts=contexts, outputs=outputs, reps=reps), trace)


def first_token_work(title: str, setup: Setup, *, prompt: int, reps: int) -> Work:
    def trace(session: Session) -> Timeline:
        return trace_all(session, [session.prompt(prompt)], 1)

    return Work(title, setup, partial(first_token, prompt=prompt, reps=reps), trace)


def mixed_work(
    title: str, setup: Setup, measure: Callable[..., Figure], *, requests: int, longest: int, **load: Any
) -> Work:
    def trace(session: Session) -> Timeline:
        return trace_decode(session, session.prompts(requests, longest // 2), 2 * TRACED_STEPS + 8, TRACED_STEPS)

    return Work(title, setup, partial(measure, requests=requests, longest=longest, **load), trace)


LLAMA = Setup("llama-3-8b")
LLAMA_PROMPTS = Setup("llama-3-8b", step_tokens=16384)
"""For prefill alone: the more tokens share a step, the less time is lost between steps. With other sequences
decoding, a step of half that length halves their wait."""
TINY = Setup("qwen3-8b-tiny", dtype="float32", rows=8, step_tokens=64, max_len=256)
MIXED = {"requests": 256, "shortest": 100, "longest": 1024, "outputs": 256}
ONE = {"batch": 1, "prompt": 128, "outputs": 384, "reps": 5}

WORKS: dict[str, Work] = {
    "decode": decode_work("8B, batch 1, context 128-512", LLAMA, **ONE),
    "batch32": decode_work("8B, batch 32, context 448-576", LLAMA, batch=32, prompt=448, outputs=128, reps=5),
    "offline": mixed_work("8B, 256 requests, 100-1024 in, 256 out", LLAMA, offline, **MIXED, reps=3),
    "host": mixed_work("the same, device idle time", LLAMA, host_share, **MIXED, reps=1),
    "ttft-128": first_token_work("8B, first token after 128", LLAMA, prompt=128, reps=15),
    "ttft-1024": first_token_work("8B, first token after 1024", LLAMA, prompt=1024, reps=15),
    "prefill": prefill_work("8B, prefill 8 x 2048, in one step", LLAMA_PROMPTS, batch=8, prompt=2048, reps=5),
    "decode-int8": decode_work("8B, batch 1, context 128-512", Setup("llama-3-8b", "int8:row,tables"), **ONE),
    "decode-int4": decode_work("8B, batch 1, context 128-512", Setup("llama-3-8b", "int4:128,tables"), **ONE),
    "decode-fp8": decode_work("8B, batch 1, context 128-512", Setup("llama-3-8b", "fp8,tables"), **ONE),
    "decode-q4_k": decode_work("8B, batch 1, context 128-512", Setup("llama-3-8b", "q4_k,tables"), **ONE),
    "ttft-128-3b": first_token_work("3B, first token after 128", Setup("llama-3.2-3b"), prompt=128, reps=15),
    "decode-0.6b": decode_work("0.6B, batch 1, context 128-512", Setup("qwen3-0.6b"), **ONE),
    "ttft-128-0.6b": first_token_work("0.6B, first token after 128", Setup("qwen3-0.6b"), prompt=128, reps=15),
    "decode-135m": decode_work("135M, batch 1, context 128-512", Setup("smollm2-135m"), **ONE),
}
"""Ordered so that works with the same set-up follow each other."""
TINY_MIXED = {"requests": 12, "shortest": 5, "longest": 60, "outputs": 12}
TINY_WORKS: dict[str, Work] = {
    "tiny-decode": decode_work("tiny, batch 1", TINY, batch=1, prompt=16, outputs=24, reps=2),
    "tiny-batch": decode_work("tiny, batch 4", TINY, batch=4, prompt=12, outputs=24, reps=2),
    "tiny-prefill": prefill_work("tiny, prefill 3 x 50", TINY, batch=3, prompt=50, reps=2),
    "tiny-ttft": first_token_work("tiny, first token after 100", TINY, prompt=100, reps=2),
    "tiny-offline": mixed_work("tiny, 12 requests", TINY, offline, **TINY_MIXED, reps=2),
    "tiny-host": mixed_work("tiny, device idle time", TINY, host_share, **TINY_MIXED, reps=2),
    "tiny-int4": decode_work(
        "tiny, batch 1",
        Setup("qwen3-8b-tiny", "int4:32,tables", "float32", 8, 64, 256),
        batch=1,
        prompt=16,
        outputs=24,
        reps=2,
    ),
}
"""Works that test the benchmark itself."""
