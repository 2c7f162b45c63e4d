"""`bankfull bench`: how fast a model runs here, beside what this machine could do."""

from __future__ import annotations

import json as json_text
from typing import Annotated

import typer

from bankfull.cli.options import EngineOptions, Json

KINDS = ("latency", "throughput")
REQUESTS = 8
"""At once, where throughput is asked for and nothing is said."""


def bench(
    kind: Annotated[str, typer.Argument(help="latency (one stream) or throughput (many requests at once).")],
    *,
    engine: EngineOptions,
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens generated for each prompt.")] = 128,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once, for throughput.", show_default=str(REQUESTS))
    ] = None,
    reps: Annotated[int, typer.Option(help="Repetitions, after one that warms up.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the random prompts, and of sampling.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 = greedy decoding; above it, tokens are sampled.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this share.")] = 1.0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run once more and show where the time of a step goes, kernel by kernel.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure prefill, decoding or batched generation, and compare with this machine's limit.

    Prompts are random token ids and all different. The machine's own ceilings are measured in the same run, once
    before and once after, and the better ones are used. The host's share is the time outside of the tape's kernels and
    the head's: planning, choosing tokens, text, and operations that break off the tape.
    """
    from bankfull.errors import ConfigError

    if kind not in KINDS:
        raise ConfigError(f"There is no benchmark {kind!r}; use {' or '.join(KINDS)}.")
    if kind == "latency" and concurrency not in (None, 1):
        raise ConfigError(f"--concurrency {concurrency} needs `bankfull bench throughput`; latency has one stream.")
    requests = 1 if kind == "latency" else REQUESTS if concurrency is None else concurrency
    from bankfull.limits.bench import Bench, Load

    load = Load(prompt_len, output_len, requests, reps, seed, temperature, top_k, top_p)
    llm = engine.load()

    from bankfull.cli.terminal import print_table, progress

    dtype = str(llm.loaded.build.dtype).removeprefix("torch.")
    with progress("repetitions", reps) as advance:
        bench = Bench(llm, load, dtype=dtype, expand=engine.expand, profile=profile)
        report = bench.run(kind, lambda done: advance(done, kind))
    if json:
        print(json_text.dumps({"model": engine.model, **report.as_json()}))
        return
    from bankfull.limits.bench_show import bench_table, notes, profile_tables

    asked = f"{requests} x {prompt_len} in, {output_len} out, {dtype}{load.sampling}"
    print_table(bench_table(report, f"{kind} of {engine.model}: {asked}"))
    for table in profile_tables(report):
        print_table(table)
    for line in notes(report):
        print(line)
