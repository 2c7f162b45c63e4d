"""`bankfull bench`: measure a model or a server, next to the machine's limits."""

from __future__ import annotations

import json as json_text
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bankfull.cli.load import (
    LOCAL,
    ArrivalOptions,
    DeviceName,
    ModelFiles,
    Name,
    PricePerHour,
    SloText,
    Url,
    WorkOptions,
    load_of,
    price_of,
    save_text,
    server_at,
    server_key,
    write_files,
)
from bankfull.cli.options import EngineOptions, Json, flat
from bankfull.cli.policies import policies, tradeoff
from bankfull.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from bankfull.bench.offline import OfflineLoad
    from bankfull.bench.report.report import LoadReport

REQUESTS = 8
"""Default number of concurrent requests for `bench throughput`."""

bench = typer.Typer(
    rich_markup_mode=None,
    help="Measure a model in this process (latency, throughput), scheduling policies (policies, tradeoff), or any "
    "server over HTTP (serve, sweep, compare). "
    "Set BANKFULL_API_KEY if the server needs a key.",
)


@bench.callback(invoke_without_command=True)
def kinds(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise ConfigError(f"Choose a benchmark: {', '.join(command.__name__ for command in COMMANDS)}.")


PromptLen = Annotated[int, typer.Option(help="Tokens in each prompt.")]
OutputLen = Annotated[int, typer.Option(help="Tokens generated for each prompt.")]
Reps = Annotated[int, typer.Option(help="Repetitions after one warm-up run.")]
Seed = Annotated[int, typer.Option(help="Random seed of the prompts and of sampling.")]
Temperature = Annotated[float, typer.Option(help="0: greedy decoding; above 0: sampling.")]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")]
Profile = Annotated[bool, typer.Option("--profile", help="Run once more and show the time of each kernel of a step.")]
Markdown = Annotated[Path | None, typer.Option(help="Write the report to this Markdown file.")]
Html = Annotated[Path | None, typer.Option(help="Write the report with charts to this self-contained HTML file.")]
Result = Annotated[
    Path | None, typer.Option(help="Write the results to this JSON file, with the field names of vllm bench serve.")
]
Details = Annotated[bool, typer.Option("--details", help="Include the times of each request in the JSON object.")]


def latency(
    *,
    engine: EngineOptions,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 128,
    reps: Reps = 5,
    seed: Seed = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    profile: Profile = False,
    json: Json = False,
) -> None:
    """Measure prefill and decode of one stream, next to this machine's limit.

    Prompts are distinct sequences of random token ids. The machine's limits are measured in the same run, before and
    after, and the better values are used. The host's share is the time outside the kernels of a captured step:
    scheduling, sampling, detokenization, and operations that cannot be captured. Answers to random prompts repeat
    themselves, which flatters speculative decoding: `bench speculative` measures that.
    """
    from bankfull.bench.offline import OfflineLoad

    _offline(
        "latency", engine, OfflineLoad(prompt_len, output_len, 1, reps, seed, temperature, top_k, top_p), profile, json
    )


def throughput(
    *,
    engine: EngineOptions,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 128,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.")] = REQUESTS,
    reps: Reps = 5,
    seed: Seed = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    profile: Profile = False,
    json: Json = False,
) -> None:
    """Measure many concurrent requests, next to this machine's limit. Everything else is as for latency."""
    from bankfull.bench.offline import OfflineLoad

    load = OfflineLoad(prompt_len, output_len, concurrency, reps, seed, temperature, top_k, top_p)
    _offline("throughput", engine, load, profile, json)


def _offline(kind: str, engine: EngineOptions, load: OfflineLoad, profile: bool, json: bool) -> None:
    from bankfull.bench.offline import Bench

    # Without a text to continue, the model repeats itself: drafts by lookup would flatter the engine.
    llm = replace(engine, speculative=engine.speculative or "off").load()

    from bankfull.cli.terminal import print_table, progress

    dtype = str(llm.loaded.build.dtype).removeprefix("torch.")
    with progress("repetitions", load.reps) as advance:
        runner = Bench(llm, load, dtype=dtype, profile=profile)
        report = runner.run(kind, lambda done: advance(done, kind))
    if json:
        print(json_text.dumps({"model": engine.model, **report.as_json()}))
        return
    from bankfull.bench.offline_tables import bench_table, notes, profile_tables

    asked = f"{load.requests} x {load.prompt_len} in, {load.output_len} out, {dtype}{load.sampling}"
    print_table(bench_table(report, f"{kind} of {engine.model}: {asked}"))
    for table in profile_tables(report):
        print_table(table)
    for line in notes(report):
        print(line)


def speculative(
    *,
    engine: EngineOptions,
    ways: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME[:MODEL][,KEY=VALUE]",
            help="A way of speculative decoding (see --speculative); may be given several times.",
            show_default="suffix, ngram and auto",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="A prompt set; may be given several times.", show_default="all five"),
    ] = None,
    output_len: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 1,
    reps: Annotated[int, typer.Option(min=1, help="Repetitions of each pair of runs, after one warm-up.")] = 3,
    seed: Seed = 0,
    temperature: Temperature = 0.0,
    chart: Annotated[Path | None, typer.Option(help="Draw the gains to this .svg or .png file.")] = None,
    json: Json = False,
) -> None:
    """Measure speculative decoding beside plain decoding, in alternation, on prompt sets of several kinds.

    The sets are chat, code-edit, quotes, translation and extraction. Answers end at the model's end of text or after
    --output-len tokens. Tokens inside repetition loops are left out: a loop flatters every drafter.
    """
    from bankfull.cli.speculative import measure

    measure(engine, ways, sets, output_len, concurrency, reps, seed, temperature, chart, json)


def diffusion(
    *,
    engine: EngineOptions,
    ways: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="KEY=VALUE[,KEY=VALUE]",
            help="A way of denoising (see --diffusion); may be given several times.",
            show_default="threshold=1, 0.9 and 0.7",
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts, one on each line of a text file.", show_default="random token ids")
    ] = None,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 1,
    reps: Annotated[int, typer.Option(min=1, help="Repetitions of each way, after one warm-up.")] = 3,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Measure denoising of a diffusion model: tokens/s and tokens per forward pass beside what they cost.

    The cost is the share of tokens that differ from one token per step, and the KL divergence of the predictions from
    those without a cache, which is 0 where the cache is exact.
    """
    from bankfull.cli.diffusion import measure

    measure(engine, ways, prompts, prompt_len, output_len, concurrency, reps, seed, json)


def serve(
    *,
    url: Url = LOCAL,
    model: Name = None,
    work: WorkOptions,
    arrivals: ArrivalOptions,
    slo: SloText = None,
    price: PricePerHour = None,
    price_of_device: DeviceName = None,
    model_files: ModelFiles = None,
    markdown: Markdown = None,
    html: Html = None,
    result: Result = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Send requests to a running server at a given rate, and measure TTFT, TPOT, ITL, E2E and goodput.

    The client is open-loop: it sends each request at its scheduled time, however slow the server is, and measures from
    that time. A bankfull server also reports its use of the machine. Energy is measured if the server runs on this
    machine and the machine has readable counters.
    """
    from bankfull.bench.load.run import LoadRunner
    from bankfull.bench.report.json_fields import as_vllm
    from bankfull.bench.report.text import tables
    from bankfull.cli.terminal import print_table, progress

    load = load_of(work, arrivals, slo)
    costs = price_of(price, price_of_device)
    runner = LoadRunner(server_at(url, model), price=costs, files=model_files)
    with progress("requests", load.turns) as advance:
        report = runner.run(load, advance=advance)
    write_files(report, markdown, html, result, details)
    if json:
        print(json_text.dumps(as_vllm(report, details)))
    else:
        for table in tables(report):
            print_table(table)
        for line in report.warnings():
            print(f"note: {line}")
    return 0 if report.measured.good else 1


def sweep(
    *,
    url: Url = LOCAL,
    model: Name = None,
    work: WorkOptions,
    slo: Annotated[str, typer.Option("--slo", help='Latency objectives of each request: "ttft=500ms, tpot=50ms".')],
    target: Annotated[float, typer.Option(help="Fraction of the requests that must meet every objective.")] = 0.9,
    first_rate: Annotated[float, typer.Option(help="First rate to try, in requests per second.")] = 1.0,
    highest_rate: Annotated[float, typer.Option(help="Highest rate to try.")] = 1000.0,
    precision: Annotated[
        float, typer.Option(help="Largest relative gap between the answer and a rate that fails.")
    ] = 0.05,
    confirmations: Annotated[int, typer.Option(help="Confirmation runs that the answer must pass.")] = 2,
    seconds: Annotated[float, typer.Option(help="Duration of each trial in seconds.")] = 30.0,
    least_requests: Annotated[int, typer.Option(help="Fewest requests of each trial.")] = 50,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma (with --burstiness) or constant.")] = "poisson",
    burstiness: Annotated[
        float, typer.Option(help="Shape of gamma arrivals: below 1 they are bursty, above 1 even.")
    ] = 1.0,
    price: PricePerHour = None,
    price_of_device: DeviceName = None,
    model_files: ModelFiles = None,
    html: Html = None,
    json: Json = False,
) -> int:
    """Find the highest request rate at which a running server meets the latency objectives.

    The rate doubles until a trial fails; then bisection narrows the gap. Confirmation runs check the answer. Each trial
    uses new prompts and arrival times.
    """

    from bankfull.bench.load.run import LoadRunner
    from bankfull.bench.load.sweep import Search
    from bankfull.bench.report.json_fields import as_vllm
    from bankfull.bench.report.sweep import answer, hopeless, sweep_html, sweep_table
    from bankfull.cli.terminal import print_table, progress
    from bankfull.traffic.arrivals import Arrivals

    if work.trace is not None or work.requests is not None:
        raise ConfigError(
            "A sweep chooses arrival times and the number of requests itself; leave out --trace and --requests."
        )
    if not 0 < seconds <= 86400 or least_requests < 1:
        raise ConfigError(f"--seconds {seconds} and --least-requests {least_requests} must be above 0.")
    search = Search(first_rate, highest_rate, target, precision, confirmations)
    load = load_of(work, ArrivalOptions(first_rate, arrivals, burstiness), slo)
    runner = LoadRunner(server_at(url, model), price=price_of(price, price_of_device), files=model_files)
    reports: list[LoadReport] = []
    alone = runner.alone(load)
    if not alone.attained():
        raise RequestError(hopeless(alone))

    def trial(rate: float, number: int) -> float:
        asked = replace(
            load,
            arrivals=Arrivals(rate, load.arrivals.kind, burstiness),
            seed=load.seed + number,
            requests=max(least_requests, round(rate * seconds)),
        )
        now = f"{rate:.4g} requests/s"
        reports.append(runner.run(asked, advance=lambda done, note: advance(number, f"{now}, {done} done")))
        attained = reports[-1].measured.attained()
        advance(len(reports), f"{now}: {100 * attained:.3g}% attained")
        return attained

    with progress("trials", None) as advance:
        result = search.run(trial)
    if html is not None:
        save_text(html, sweep_html(result, search, reports))
    if json:
        runs = [as_vllm(report) for report in reports]
        print(json_text.dumps({"slo": str(load.slo), "target": target, **result.as_json(), "runs": runs}))
    else:
        print_table(sweep_table(result, reports))
        print(answer(result, search, str(load.slo)))
    return 0 if result.rate is not None else 1


def compare(
    *,
    model: Annotated[str, typer.Option("-m", "--model", help="The model that the started servers run.")] = "smollm2",
    ours: Annotated[
        str | None,
        typer.Option(help="This engine: an address, or a command with {port}.", show_default="bankfull serve"),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="name=http://host:port, or name='command ... {model} ... --port {port}'; may be given several times.",
            show_default="the installed ones",
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(help="Number of alternating pairs of runs.")] = 7,
    work: WorkOptions,
    arrivals: ArrivalOptions,
    slo: SloText = None,
    json: Json = False,
) -> int:
    """Serve a model with this engine and with other engines, send each the same requests, and print the ratios.

    Engines run in alternating pairs: both sides of a pair get the same prompts, each pair has new ones, and the order
    alternates. The idle engine is paused with SIGSTOP. The result is the median ratio of the pairs.
    """
    from bankfull.bench.compare import servers as side_by_side
    from bankfull.bench.compare.tables import notes, problems, ratio_table
    from bankfull.cli.terminal import print_table, say
    from bankfull.weights.locate import locate

    def tell(line: str) -> None:
        say(f"bankfull: {line}")

    peers = [side_by_side.parse_contender(text) for text in peer or ()] or side_by_side.installed_peers()
    if not peers:
        known = ", ".join(how.split()[0] for how in side_by_side.KNOWN_PEERS.values())
        raise ConfigError(f"No peer is installed ({known}); give one with --peer name=http://host:port.")
    if pairs < 1:
        raise ConfigError(f"--pairs {pairs} must be at least 1.")
    load = side_by_side.plain_text(load_of(work, arrivals, slo))
    own = side_by_side.ours() if ours is None else side_by_side.parse_contender(f"{side_by_side.OURS}={ours}")
    started = any(not side.is_address for side in (own, *peers))
    files = str(locate(model)) if started else model
    with side_by_side.RunningServer(own, files, server_key(), tell) as one:
        comparisons = [side_by_side.compare_with(one, contender, load, pairs) for contender in peers]
    if json:
        print(json_text.dumps({"load": load.describe(), "comparisons": [one.as_json() for one in comparisons]}))
    else:
        for comparison in comparisons:
            print_table(ratio_table(comparison))
            for line in problems(comparison):
                print(line)
        for line in notes([row for comparison in comparisons for row in comparison.rows], None):
            print(line)
    return 1 if all(row.problem for comparison in comparisons for row in comparison.rows) else 0


def memory(
    *,
    traffic: Annotated[
        str | None,
        typer.Option(
            help='Traffic as for `bankfull plan`: "rate=5/s, in=200-2000, out=50-400".',
            show_default="rate=20/s, in=20-1000, out=10-1000",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A file of recorded arrival times and lengths: Mooncake JSON lines or Azure .csv."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 500,
    memory_tokens: Annotated[int, typer.Option(help="Tokens whose keys and values fit into the memory.")] = 32768,
    max_model_len: Annotated[int, typer.Option(help="Most tokens of a sequence, including the prompt.")] = 2048,
    page_tokens: Annotated[int, typer.Option(help="Tokens per page.")] = 16,
    rows: Annotated[int, typer.Option(help="Most sequences in the batch.")] = 256,
    step_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 8192,
    step_time: Annotated[float, typer.Option(help="Assumed milliseconds of a step, beside its tokens.")] = 20.0,
    token_time: Annotated[float, typer.Option(help="Assumed microseconds of each token in a step.")] = 50.0,
    seed: Seed = 0,
    chart: Annotated[Path | None, typer.Option(help="Draw the shares of the memory to this .svg or .png file.")] = None,
    json: Json = False,
) -> None:
    """Compare paged memory with contiguous reservations, at the maximum and at the known length, in a simulation.

    The traffic is generated or recorded, and the same for all three. Shown are the memory that is wasted inside and
    between reservations, the sequences that fit at once, and what that does to throughput.
    """
    from bankfull.cli.memory import measure
    from bankfull.plan.memory import MemoryWorld

    world = MemoryWorld(
        capacity=memory_tokens,
        longest=max_model_len,
        page_tokens=page_tokens,
        rows=rows,
        step_tokens=step_tokens,
        step_seconds=step_time / 1e3,
        token_seconds=token_time / 1e6,
    )
    measure(world, traffic, trace, requests, seed, chart, json)


COMMANDS = (latency, throughput, speculative, diffusion, policies, tradeoff, memory, serve, sweep, compare)
for command in COMMANDS:
    bench.command(command.__name__)(flat(command))
