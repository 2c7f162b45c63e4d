"""A model with an expression that the tape cannot record runs eagerly, and one line names the expression."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

import bankfull
from bankfull import SamplingParams
from bankfull.config import SchedConfig
from bankfull.layers.build import Build
from bankfull.layers.mlp import GatedMLP
from bankfull.models.registry import build_model
from bankfull.ops import kit_for, native
from bankfull.ops.cost import Cost
from bankfull.ops.registry import Operation
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests.kit import Bench, device_of
from tests.tiny import folder_of, speaking_folder

if native.status() is not None:
    pytest.skip("the kernels are not built", allow_module_level=True)

from bankfull.runtime import uncaptured

CPU = torch.device("cpu")
PROMPT = [5, 9, 2, 70, 31, 8, 44]
NEW = 12
WEIGHTS = torch.linspace(-1, 1, 32)
PLAIN = GatedMLP.__call__
COST = r"; expect about \d+% more time per decode step \(measured now\)\."


def scaled(self: GatedMLP, x: Tensor) -> Tensor:
    return PLAIN(self, x) * 0.5


def in_place(self: GatedMLP, x: Tensor) -> Tensor:
    y = PLAIN(self, x)
    y[:, :9] *= 0.5
    return y


def data_dependent(self: GatedMLP, x: Tensor) -> Tensor:
    y = PLAIN(self, x)
    return y if y.abs().max().item() > 100 else PLAIN(self, y)


def mixed_devices(self: GatedMLP, x: Tensor) -> Tensor:
    return WEIGHTS.to(x.dtype) * PLAIN(self, x)


EXPRESSIONS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a new tensor": (scaled, "`PLAIN(self, x) * 0.5` in scaled"),
    "in place": (in_place, "`y[:, :9] *= 0.5` in in_place"),
    "a look at the data": (data_dependent, "`y.abs().max().item()` in data_dependent"),
    "a tensor from elsewhere": (mixed_devices, "`WEIGHTS.to(x.dtype) * PLAIN(self, x)` in mixed_devices"),
}


class Toy:
    """A Llama by the kernels in float32, and the same by the bodies in float64."""

    def __init__(self) -> None:
        files = open_model(folder_of("llama"))
        self.kit = kit_for("cpu")
        self.model = build_model(files.config, Build(files.source, self.kit, torch.float32, CPU))
        self.oracle = build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float64, CPU))


@lru_cache
def plain_tokens() -> tuple[int, ...]:
    return tuple(naive.generate(Toy().oracle, PROMPT, NEW, CPU)[0])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", EXPRESSIONS)
def test_its_tokens_are_those_of_the_oracle_and_one_line_names_the_expression(
    kind: str, depth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feed, expression = EXPRESSIONS[kind]
    expected_plain = plain_tokens()
    monkeypatch.setattr(GatedMLP, "__call__", feed)
    toy = Toy()
    expected, margins = naive.generate(toy.oracle, PROMPT, NEW, CPU)
    assert min(margins) > 1e-3 and tuple(expected) != expected_plain, "the expression must make a difference"
    with caplog.at_level(logging.WARNING, "bankfull"):
        bench = Bench(toy.model, device_of(depth), depth, SchedConfig(rows=3, step_tokens=16), kit=toy.kit)
        bench.add("a", PROMPT, NEW, n=2)
        bench.run()
    assert bench.tokens["a", 0] == bench.tokens["a", 1] == expected
    [line] = [record.getMessage() for record in caplog.records]
    assert f"For a report: {expression} (test_uncaptured.py:" in line
    for_users = line.partition("For a report:")[0]
    assert for_users.startswith("Steps run without capture: this model computes something")
    assert re.search(COST, for_users) and "`" not in for_users and for_users.rstrip().endswith("Tokens are the same.")


def test_the_api_and_the_benchmark_tell_of_it_and_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bankfull.bench.offline import Bench as OfflineBench
    from bankfull.bench.offline import OfflineLoad
    from bankfull.bench.offline_tables import notes

    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    captured = bankfull.LLM(str(speaking_folder()), device="cpu")
    assert captured.loaded.uncaptured is None
    monkeypatch.setattr(GatedMLP, "__call__", scaled)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bankfull"):
        llm = bankfull.LLM(str(speaking_folder()), device="cpu")
        output = llm.generate([PROMPT], greedy)[0].outputs[0].token_ids
    line = llm.loaded.uncaptured
    assert line is not None and [record.getMessage() for record in caplog.records] == [line]
    assert list(output) == naive.generate(llm.loaded.model, PROMPT, 8, CPU)[0]
    report = OfflineBench(llm, OfflineLoad(prompt_len=4, output_len=3, reps=1), dtype="float32").run("latency")
    assert report.as_json()["uncaptured"] == line and report.as_json()["tape"] is None
    assert f"tape: none. {line}" in notes(report)


def test_a_command_prints_the_line_once() -> None:
    patch = (
        "import sys\nfrom bankfull.layers.mlp import GatedMLP\nplain = GatedMLP.__call__\n"
        "GatedMLP.__call__ = lambda self, x: plain(self, x) * 0.5\n"
        "from bankfull.cli import main\nsys.exit(main())\n"
    )
    command = ["run", "A river", "--model", str(speaking_folder()), "--raw", "--max-tokens", "3", "--no-limit"]
    done = subprocess.run([sys.executable, "-c", patch, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "without capture" in line]
    assert line.startswith("bankfull: Steps run without capture: ") and re.search(COST, line), line
    assert "without capture" not in done.stdout


def test_the_cost_is_the_time_outside_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 seconds for a step whose five kernels take 1 second each, 0.2 of them for the call: 8 instead of 4."""
    clock, kit = [0.0], kit_for("cpu")

    def wait(seconds: float) -> None:
        clock[0] += seconds

    kernel = kit.bind(Operation("kernel", lambda: wait(1.0), cost=lambda: Cost()))

    def step() -> None:
        wait(3.0)
        for _ in range(5):
            kernel()

    monkeypatch.setattr(uncaptured, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(uncaptured, "_one_token", lambda forward: step)
    monkeypatch.setattr(uncaptured, "_smallest", lambda: lambda: wait(0.2))
    assert uncaptured.overhead(None, kit) == pytest.approx(1.0)  # type: ignore[arg-type]
