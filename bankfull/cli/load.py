"""Options of the commands that measure a running server."""

from __future__ import annotations

import json as json_text
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.service import KEY_VARIABLE
from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.bench.load.run import LoadTest
    from bankfull.bench.load.server import ServerUnderTest
    from bankfull.bench.report.report import LoadReport, Price

LOCAL = "http://127.0.0.1:8000"
REQUESTS = 100

Url = Annotated[str, typer.Option(help="Address of an OpenAI-compatible server.", envvar="BANKFULL_URL")]
Name = Annotated[
    str | None,
    typer.Option("-m", "--model", help="The model's name on the server.", show_default="the first model listed"),
]
ModelFiles = Annotated[
    Path | None,
    typer.Option(
        help="The served model's files on this machine, to compute the limits of a local server.",
        show_default="as reported by a bankfull server",
    ),
]
PricePerHour = Annotated[float | None, typer.Option("--price", help="Price of the serving machine per hour.")]
DeviceName = Annotated[
    str | None, typer.Option("--price-of", help="Device of the catalogue whose price per hour is used.")
]
SloText = Annotated[
    str | None,
    typer.Option("--slo", help='Latency objectives of each request: "ttft=500ms, tpot=50ms" (also itl, e2e).'),
]


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """The requests."""

    requests: Annotated[
        int | None, typer.Option(help="Number of conversations.", show_default=f"{REQUESTS}, or all of a trace")
    ] = None
    input_len: Annotated[str, typer.Option(help="Tokens in a prompt: 512, 100-900, 512~0.8 (log-normal).")] = "512"
    output_len: Annotated[
        str | None, typer.Option(help="Tokens in an answer, in the same form.", show_default="128, or as recorded")
    ] = None
    prefixes: Annotated[int, typer.Option(help="Number of distinct shared prefixes among the prompts.")] = 0
    prefix_len: Annotated[int, typer.Option(help="Tokens in each shared prefix.")] = 0
    turns: Annotated[int, typer.Option(help="User turns in each conversation.")] = 1
    pause: Annotated[float, typer.Option(help="Seconds between an answer and the next turn.")] = 0.0
    sharegpt: Annotated[Path | None, typer.Option(help="A file of conversations in ShareGPT format.")] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="A file of recorded arrival times and lengths: Mooncake JSON lines or Azure .csv."),
    ] = None
    trace_speed: Annotated[float, typer.Option(help="Speed-up of the trace.")] = 1.0
    prompts: Annotated[
        str, typer.Option(help="Prompts as ids, text, or auto: ids if the server reports token ids.")
    ] = "auto"
    api: Annotated[str, typer.Option(help="API to call: completions or chat.")] = "completions"
    extra_body: Annotated[
        str | None, typer.Option(help='Extra fields of each request body, as JSON: {"top_p": 0.9}.')
    ] = None
    no_ignore_eos: Annotated[bool, typer.Option("--no-ignore-eos", help="Let the model end its answers.")] = False
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="Most concurrent requests; waiting time beyond them is measured.", show_default="any"),
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 600.0
    seed: Annotated[int, typer.Option(help="Random seed of prompts, lengths and arrivals.")] = 0


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """Arrival times of the requests."""

    rate: Annotated[float, typer.Option(help="Conversations per second; inf: all at the start.")] = 1.0
    arrivals: Annotated[str, typer.Option(help="poisson, gamma (with --burstiness) or constant.")] = "poisson"
    burstiness: Annotated[
        float, typer.Option(help="Shape of gamma arrivals: below 1 they are bursty, above 1 even.")
    ] = 1.0


def load_of(work: WorkOptions, arrivals: ArrivalOptions, slo: str | None) -> LoadTest:
    from bankfull.bench.load.client import RequestOptions
    from bankfull.bench.load.run import LoadTest
    from bankfull.bench.load.workloads import RecordedTrace, ShareGpt, Synthetic, Workload, parse_lengths
    from bankfull.traffic.arrivals import MOST_ARRIVALS, Arrivals
    from bankfull.traffic.slo import Slo, parse_slo

    if work.sharegpt is not None and work.trace is not None:
        raise ConfigError("--sharegpt and --trace exclude each other; give one of the two.")
    if work.trace is None and work.trace_speed != 1.0:
        raise ConfigError("--trace-speed is that of a recorded trace; give --trace FILE, too, or leave it out.")
    output = None if work.output_len is None else parse_lengths(work.output_len)
    count = REQUESTS if work.requests is None else work.requests
    workload: Workload
    if work.trace is not None:
        workload = RecordedTrace(work.trace, work.trace_speed)
        count = MOST_ARRIVALS if work.requests is None else work.requests
    elif work.sharegpt is not None:
        workload = ShareGpt(work.sharegpt, output, work.turns)
    else:
        wanted = parse_lengths("128") if output is None else output
        workload = Synthetic(parse_lengths(work.input_len), wanted, work.prefixes, work.prefix_len, work.turns)
    request_options = RequestOptions(
        work.api,
        not work.no_ignore_eos,
        {"temperature": 0.0, **_fields(work.extra_body)},
        work.pause,
        work.max_concurrency,
        work.timeout,
    )
    kind = "gamma" if arrivals.burstiness != 1.0 and arrivals.arrivals == "poisson" else arrivals.arrivals
    return LoadTest(
        workload,
        Arrivals(arrivals.rate, kind, arrivals.burstiness),
        count,
        work.seed,
        Slo() if slo is None else parse_slo(slo),
        request_options,
        work.prompts,
    )


def server_at(url: str, model: str | None) -> ServerUnderTest:
    from bankfull.bench.load.server import ServerUnderTest, parse_address

    return ServerUnderTest(parse_address(url), server_key(), model)


def server_key() -> str | None:
    return os.environ.get(KEY_VARIABLE) or None


def price_of(per_hour: float | None, device: str | None) -> Price | None:
    from bankfull.bench.report.report import Price

    if per_hour is not None and device is not None:
        raise ConfigError("--price and --price-of exclude each other; give one of the two.")
    if per_hour is not None:
        if not 0 <= per_hour < float("inf"):
            raise ConfigError(f"--price {per_hour} must be a number of at least 0.")
        return Price(per_hour, "as given")
    return None if device is None else _from_catalogue(device)


def _from_catalogue(device: str) -> Price:
    from bankfull.bench.report.report import Price
    from bankfull.limits.machine.catalogue import load

    entry = load().find(device)
    if entry.dollars_per_hour is None:
        raise ConfigError(f"The catalogue has no price for {entry.name}; give one with --price.")
    doubt = "" if entry.price_source else ", an assumption"
    return Price(entry.dollars_per_hour, f"catalogue price of {entry.name}{doubt}")


def write_files(
    report: LoadReport, markdown: Path | None, html: Path | None, result: Path | None, details: bool
) -> None:
    if markdown is not None:
        from bankfull.bench.report.text import as_markdown

        save_text(markdown, as_markdown(report))
    if html is not None:
        from bankfull.bench.report.html import as_html

        save_text(html, as_html(report))
    if result is not None:
        from bankfull.bench.report.json_fields import as_vllm

        save_text(result, json_text.dumps(as_vllm(report, details)) + "\n")


def save_text(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; choose another file.") from None


def _fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        body = json_text.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ConfigError(f"--extra-body {text!r} is not a JSON object.")
    return body
