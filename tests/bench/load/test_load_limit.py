"""Utilization and the limits of requests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from bankfull.bench.load.request_limits import RequestLimits
from bankfull.bench.load.run import LoadRunner, LoadTest
from bankfull.bench.load.server import ServerUnderTest, parse_address
from bankfull.bench.load.utilization import Ceiling, CountedWork, parse_counters, utilization
from bankfull.bench.load.workloads import Synthetic, parse_lengths
from bankfull.limits.meter.closed_form import closed_form
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.ops.cost import Rates
from bankfull.traffic.arrivals import Arrivals
from bankfull.traffic.slo import parse_slo
from tests.bench.load.kit import outcome
from tests.limits.models import LLAMA
from tests.tiny import speaking_folder

TEXT = """# HELP bankfull:engine_busy_seconds_total Seconds inside steps.
bankfull:engine_busy_seconds_total{model_name="a \\"b\\"",step_kind="decode"} 2.5
bankfull:engine_busy_seconds_total{model_name="a",step_kind="prompt"} 1
bankfull:engine_bytes_moved_total{model_name="a",step_kind="decode"} 1e9
bankfull:engine_bytes_moved_total{model_name="a",step_kind="prompt"} 2e8
bankfull:engine_flops_total{model_name="a",step_kind="decode"} 3e9
bankfull:engine_flops_total{model_name="a",step_kind="prompt"} 4e9
"""
CEILINGS = """bankfull:ceiling_bytes_per_second{model_name="a"} 1e+10
bankfull:ceiling_flops_per_second{model_name="a"} 5e10
"""


def test_metrics_of_ours_are_read_and_others_are_not() -> None:
    found = parse_counters(TEXT + CEILINGS)
    assert found is not None and found.work == {
        "decode": CountedWork(2.5, 1e9, 3e9),
        "prompt": CountedWork(1.0, 2e8, 4e9),
    }
    assert found.ceiling == Ceiling(1e10, 5e10)
    without = parse_counters(TEXT)
    assert without is not None and without.ceiling is None
    assert parse_counters("vllm:num_requests_running 3\n") is None and parse_counters(None) is None


def test_a_run_is_the_difference_and_a_restart_is_none() -> None:
    before, after = (
        parse_counters(TEXT + CEILINGS),
        parse_counters(TEXT.replace("2.5", "4.5").replace(" 1e9", " 9e9") + CEILINGS),
    )
    found = utilization(before, after, 4.0)
    assert found is not None and found.whole == CountedWork(2.0, 8e9, 0.0) and found.mbu() == pytest.approx(0.4)
    assert utilization(after, before, 4.0) is None, "falling counters mean a restarted process"
    assert utilization(before, parse_counters(TEXT), 4.0) is None and utilization(None, after, 4.0) is None
    assert utilization(before, before, 4.0) is None, "no work between the two"


def test_the_least_times_are_those_of_the_steps_that_one_request_needs() -> None:
    form = closed_form(MeteredModel(LLAMA))
    limits = RequestLimits(form, Ceiling(1e9, 1e10))

    def least(step: StepShape) -> float:
        return form.cost(step).seconds(Rates.flat(1e10), 1e9)

    one = outcome(0.0, (1.0, 2.0, 3.0, 4.0), prompt=50)
    assert limits.ttft(one) == pytest.approx(least(StepShape.prefill(50)))
    assert limits.tpot(one) == pytest.approx(least(StepShape.decode(1, 52)))
    assert limits.ttft(replace(one, cached_tokens=40)) == pytest.approx(least(StepShape.prefill(10, past=40)))
    assert limits.ttft(replace(one, cached_tokens=50)) == pytest.approx(least(StepShape.prefill(1, past=49)))
    mean = limits.mean([one, outcome(0.0, (1.0,), prompt=50), outcome(0.0, (), error="x")])
    assert mean["tpot"] == pytest.approx(limits.tpot(one))
    assert mean["e2e"] == pytest.approx(limits.ttft(one) + 3 * least(StepShape.decode(1, 52)) / 2)
    assert limits.mean([]) == {}


def test_with_drafts_a_token_takes_its_share_of_a_step() -> None:
    form = closed_form(MeteredModel(LLAMA))
    limits = RequestLimits(form, Ceiling(1e9, 1e10))
    one = outcome(0.0, (1.0, 2.0, 3.0, 4.0), prompt=50)
    counters = """bankfull:generation_tokens_total{model_name="a"} %d
bankfull:spec_decode_num_draft_tokens_total{model_name="a"} %d
bankfull:spec_decode_num_accepted_tokens_total{model_name="a"} %d
"""
    before, after = parse_counters(TEXT + counters % (100, 5, 1)), parse_counters(TEXT + counters % (130, 65, 11))
    assert before is not None and after is not None
    tokens = after.tokens - before.tokens
    # 30 tokens, 10 of them accepted drafts: 20 steps of a sequence, with 60 drafts.
    assert tokens.steps == 20 and tokens.tokens_per_step == 1.5 and tokens.drafts_per_step == 3
    step = form.cost(StepShape((4,), (55,), 4)).seconds(Rates.flat(1e10), 1e9)
    assert limits.step(one, tokens) == pytest.approx(step) and limits.tpot(one, tokens) == pytest.approx(step / 1.5)
    mean = limits.mean([one], tokens)
    assert mean["itl"] == pytest.approx(step) and mean["tpot"] == pytest.approx(step / 1.5)
    assert mean["e2e"] == pytest.approx(limits.ttft(one) + 3 * step / 1.5)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """`bankfull serve` with a tiny model, on a machine with cached ceilings."""
    cache = tmp_path_factory.mktemp("cache")
    variables = {**os.environ, "BANKFULL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    measure = "from bankfull.limits.machine.ceilings import measure; measure(budget=0.2)"
    subprocess.run([sys.executable, "-c", measure], env=variables, check=True)
    command = [sys.executable, "-m", "bankfull", "serve", str(speaking_folder()), "--port", "0", "--memory", "8MiB"]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"base_url (http://127.0.0.1:\d+)/v1", "".join(process.stdout.readline() for _ in range(5)))
    assert found is not None
    yield ServerUnderTest(parse_address(found[1] + "/v1"))
    process.kill()
    process.wait()


def test_a_bankfull_server_reports_its_utilization(own_server: ServerUnderTest) -> None:
    workload = Synthetic(parse_lengths("12-20"), parse_lengths("6"), prefixes=1, prefix_tokens=32)
    load = LoadTest(workload, Arrivals(40.0), 24, slo=parse_slo("ttft=10s, tpot=1s"))
    report = LoadRunner(own_server).run(load)
    m = report.measured
    assert own_server.ours and len(m.good) == 24 and m.output_tokens == 24 * 6
    assert all(44 <= one.input_tokens <= 52 for one in m.good), "prompts of ids have exact lengths"
    assert m.cached_tokens is not None and m.cached_tokens > 0, "prefixes are shared"
    assert report.utilization is not None and (report.utilization.mbu("decode") or 0) > 0
    assert (report.utilization.percent_of_limit or 0) > 0 and 0 < report.utilization.busy <= 1
    assert set(report.least) == {"ttft", "tpot", "itl", "e2e"}, "its files are here, under the name that it reports"
    assert m.goodput == pytest.approx(m.request_rate) and asdict(report.setting)["api"] == "completions"


def test_conversations_with_a_bankfull_server_continue(own_server: ServerUnderTest) -> None:
    load = LoadTest(Synthetic(parse_lengths("6"), parse_lengths("4"), turns=2), Arrivals(20.0), 4)
    turns = sorted(LoadRunner(own_server).run(load).measured.outcomes, key=lambda one: one.turn)
    assert [one.turn for one in turns] == [0] * 4 + [1] * 4 and not any(one.error for one in turns)
    assert min(one.input_tokens for one in turns[4:]) > max(one.input_tokens for one in turns[:4])
