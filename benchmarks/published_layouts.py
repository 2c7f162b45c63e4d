"""Predictions of layouts beside published figures: python -m benchmarks.published_layouts

gpt-fast's tensor-parallel series, and the example with which DistServe's authors explain the separation of prefill and
decode. Both are predicted from the catalogue's data sheets; nothing is measured here. Prints the tables of
docs/parallel.md as Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from bankfull.bench.load.sweep import Search
from bankfull.limits.layout.measured import dims_of
from bankfull.limits.machine import catalogue
from bankfull.limits.meter.closed_form import forms_by_operation
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.recipe import recipe_of
from bankfull.models.registry import Config
from bankfull.plan.calibrate import step_times
from bankfull.plan.configurations import Configuration, PreparedModel, Stored, grid, prepare, separated
from bankfull.plan.efficiency import assumed
from bankfull.plan.layouts import ParallelLayout
from bankfull.plan.outcome import PILING, Objectives
from bankfull.plan.separate import PlannedPools
from bankfull.plan.simulate import Run, simulate
from bankfull.plan.sites import sites_of
from bankfull.plan.step_times import StepTimes
from bankfull.plan.traffic import TraceRequest, parse_traffic
from bankfull.ranks.mesh import MeshSpec
from bankfull.traffic.slo import Slo

LLAMA_2_7B: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
OPT_13B: Config = {
    "model_type": "opt",
    "hidden_size": 5120,
    "word_embed_proj_dim": 5120,
    "ffn_dim": 20480,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "dtype": "float16",
}
DEVICE = "a100-80gb"
GPT_FAST = {1: 104.9, 2: 168.8, 4: 254.0, 8: 328.4}
"""Tokens per second of Llama-2-7B in bfloat16 at batch 1, by number of A100 80 GB (gpt-fast's README)."""
GPT_FAST_CONTEXT = 106
"""A prompt of 6 tokens and the middle of 200 new ones."""
WHOLE, CHUNKED = "together, whole prompts", "together, prompts in chunks"
DISTSERVE = {WHOLE: 1.6, "prefill alone": 5.6, "decode alone": 10.0, "prefill=2,decode=1": 3.3}
"""Requests per second and device of a model of 13 billion parameters (DistServe's authors, blog of March 2024)."""
SLO = Slo(ttft=0.4, tpot=0.04)
TRAFFIC = "rate=4/s, in=512, out=64"
CHUNK = 128
"""Step token budget where prefill and decode share a device and prompts are cut into chunks."""


@dataclass(frozen=True)
class SeriesRow:
    devices: int
    published: float
    limit: float
    assumed: float
    """Predicted with assumed efficiency factors."""
    fitted: float
    """Predicted with one factor and one fixed time, fitted to one and two devices."""


def tensor_parallel_series() -> list[SeriesRow]:
    known = catalogue.load()
    device = known.find(DEVICE)
    links = known.interconnect(device)
    assert links is not None
    recipe = recipe_of(LLAMA_2_7B, "cuda")
    dims, forms = dims_of(recipe), forms_by_operation(recipe.metered())
    alone = step_times(recipe, "cuda", assumed("cuda"), device.ceilings(), forms)
    step = StepShape.decode(1, GPT_FAST_CONTEXT)

    def times(devices: int) -> StepTimes:
        layout = ParallelLayout(MeshSpec(tp=devices), dims, links)
        return StepTimes(forms, alone.ceilings, alone.rates, alone.efficiency, True, layout)

    exchange = {n: ParallelLayout(MeshSpec(tp=n), dims, links).seconds(1, 1) for n in GPT_FAST}
    ideal = {n: times(n).least(step) for n in GPT_FAST}
    # Two published times determine the slowdown of what is divided, and the time that is not.
    spent = {n: 1 / rate - exchange[n] for n, rate in GPT_FAST.items()}
    slowdown = (spent[1] - spent[2]) / (ideal[1] - ideal[2])
    fixed = spent[1] - slowdown * ideal[1]
    return [
        SeriesRow(n, rate, 1 / ideal[n], 1 / times(n).likely(step), 1 / (slowdown * ideal[n] + fixed + exchange[n]))
        for n, rate in GPT_FAST.items()
    ]


@dataclass(frozen=True)
class SeparationRow:
    engines: str
    devices: int
    published: float | None
    predicted: float
    """Highest rate of requests per second and device."""


def separation_example(requests: int, precision: float = 0.05) -> list[SeparationRow]:
    prepared = _opt()
    base = next(grid(prepared))
    pair = separated(base, PlannedPools(2, 1))
    received = replace(base.replica(_longest()), received=True)

    def decode(trace: Sequence[TraceRequest]) -> Run:
        return simulate(received, trace)

    def prefill(trace: Sequence[TraceRequest]) -> Run:
        return simulate(base.replica(_longest()), [replace(one, output=1) for one in trace])

    chunked = replace(base, step_tokens=CHUNK)
    found = {
        WHOLE: (1, _goodput(base, SLO, requests, precision)),
        CHUNKED: (1, _goodput(chunked, SLO, requests, precision)),
        "prefill alone": (1, _highest(prefill, prepared, Slo(ttft=SLO.ttft), requests, precision)),
        "decode alone": (1, _highest(decode, prepared, Slo(tpot=SLO.tpot), requests, precision)),
        "prefill=2,decode=1": (3, _goodput(pair, SLO, requests, precision)),
    }
    return [
        SeparationRow(name, devices, DISTSERVE.get(name), rate / devices) for name, (devices, rate) in found.items()
    ]


def _opt() -> PreparedModel:
    [site] = sites_of(DEVICE)
    recipe = recipe_of(OPT_13B, "cuda")
    return prepare(site, Stored(), recipe, step_times(recipe, "cuda", assumed("cuda"), site.ceilings))


def _longest() -> int:
    return parse_traffic(TRAFFIC).longest


def _goodput(configuration: Configuration, slo: Slo, requests: int, precision: float) -> float:
    return _highest(
        lambda trace: configuration.run(trace, _longest()), configuration.prepared, slo, requests, precision
    )


def _highest(
    run: Callable[[Sequence[TraceRequest]], Run], prepared: PreparedModel, slo: Slo, requests: int, precision: float
) -> float:
    """Highest rate at which nine of ten requests meet the objectives and the queue does not grow."""
    traffic, objectives = parse_traffic(TRAFFIC), Objectives(slo)

    def attained(rate: float, number: int) -> float:
        found = run(traffic.at(rate).trace(requests, prepared.metered.model.vocab))
        met = sum(objectives.met(one) for one in found.requests) / len(found.requests)
        return met if found.piling_up <= PILING else 0.0

    return Search(1.0, 256.0, 0.9, precision, confirmations=0).run(attained).rate or 0.0


def series_table(rows: Sequence[SeriesRow]) -> str:
    lines = [
        "| A100 80 GB | published, tok/s | predicted | error | predicted, fitted to 1 and 2 | error | limit |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        fitted = "fitted" if row.devices <= 2 else f"{row.fitted / row.published - 1:+.0%}"
        lines.append(
            f"| {row.devices} | {row.published} | {row.assumed:.1f} | {row.assumed / row.published - 1:+.0%} | "
            f"{row.fitted:.1f} | {fitted} | {row.limit:.0f} |"
        )
    return "\n".join(lines)


def separation_table(rows: Sequence[SeparationRow]) -> str:
    lines = [
        "| engines | devices | published, requests/s per device | relative | predicted | relative |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    first = rows[0]
    for row in rows:
        published = "- | -"
        if row.published is not None and first.published is not None:
            published = f"{row.published} | {row.published / first.published:.1f}x"
        lines.append(
            f"| {row.engines} | {row.devices} | {published} | {row.predicted:.1f} | "
            f"{row.predicted / first.predicted:.1f}x |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests of each simulated trace (default 200)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    if not 10 <= options.requests <= 100_000:
        parser.error(f"--requests {options.requests} is out of range; give 10 to 100000.")
    series, separation = tensor_parallel_series(), separation_example(options.requests)
    if options.json:
        print(json.dumps({"gpt_fast": [asdict(r) for r in series], "distserve": [asdict(r) for r in separation]}))
        return 0
    print(series_table(series), separation_table(separation), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
