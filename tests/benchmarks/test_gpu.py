"""The GPU benchmark itself, with a tiny model on this machine's CPU."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from bankfull.errors import ConfigError
from bankfull.limits.machine.ceilings import Ceilings, of_device
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.runtime.device import Device
from bankfull.synthetic.random_weights import random_model
from bankfull.synthetic.shapes import shape_config
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.architectures import ARCHITECTURES
from benchmarks.gpu.cover import Covered
from benchmarks.gpu.diffusion import denoise
from benchmarks.gpu.engine import Session, Setup
from benchmarks.gpu.peer import PeerLoad, TransformersPeer
from benchmarks.gpu.timeline import Ran, timeline_of
from benchmarks.gpu.works import TINY, TINY_WORKS, WORKS, Work, by_context, mixed_prompts

CPU = torch.device("cpu")
TINY_CONFIG = shape_config(TINY.shape)


def bound_by_bytes(device: Device, refresh: bool = False) -> Ceilings | None:
    """This machine's ceilings with infinite arithmetic: limits then depend only on the stored bytes."""
    found = of_device(device, refresh)
    return None if found is None else replace(found, flops=dict.fromkeys(found.flops, 1e18))


def test_every_tiny_work_gives_a_figure_and_the_limit_of_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path))
    monkeypatch.setattr("benchmarks.gpu.__main__.of_device", bound_by_bytes)
    file = tmp_path / "report.json"
    assert main(["--device", "cpu", "--work", ",".join(TINY_WORKS), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert set(report["works"]) == set(TINY_WORKS)
    for name, found in report["works"].items():
        assert found["values"]["median"] > 0, name
        assert name == "tiny-host" or found["limit"] > 0, name
    assert [start["engine"] for start in report["starts"]] == ["qwen3-8b-tiny float32", "qwen3-8b-tiny int4:32,tables"]
    shown = capsys.readouterr().out.splitlines()
    table = [line for line in shown if line.startswith("|")]
    assert len(table) == 2 + len(TINY_WORKS) and table == shown[-len(table) :]
    # 4-bit weights are read in a fraction of the time: the limit accounts for the storage.
    works = report["works"]
    assert works["tiny-int4"]["limit"] > 2 * works["tiny-decode"]["limit"]


def test_transformers_runs_the_same_loads_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path))
    file = tmp_path / "report.json"
    works = "tiny-decode,tiny-prefill,tiny-ttft,tiny-int4"
    assert main(["--device", "cpu", "--work", works, "--peer", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["works"]
    for name, mode in (("tiny-decode", "eager (no static cache)"), ("tiny-prefill", "eager (prompt)")):
        peer = found[name]["peer"]
        assert peer["mode"] == mode and peer["values"]["median"] > 0 and peer["limit"] == found[name]["limit"]
    assert "peer" not in found["tiny-ttft"] and "peer" not in found["tiny-int4"], "no equivalent, and other weights"
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4 + 2 and sum("transformers" in line for line in table) == 2


def test_a_shape_that_transformers_lacks_has_no_figure_of_it() -> None:
    with pytest.raises(ConfigError, match="transformers has no architecture 'llada'"):
        TransformersPeer({"model_type": "llada", "vocab_size": 512}, torch.float32, CPU)


def test_a_peer_that_cannot_be_compiled_in_time_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = TransformersPeer(TINY_CONFIG, torch.float32, CPU)
    calls: list[bool] = []

    def run(load: PeerLoad, new: int, static: bool) -> float:
        calls.append(static)
        if static:
            time.sleep(5)  # until the limit's signal
        return float(new)

    monkeypatch.setattr(peer, "_run", run)
    monkeypatch.setattr(peer, "_device", torch.device("cuda"))
    monkeypatch.setattr("benchmarks.gpu.peer.COMPILE_SECONDS", 0.05)
    found = peer.measure(PeerLoad(2, 8, decodes=True))
    assert found.mode == "eager (compiling took over 0 s)" and found.values.median == 2.0
    assert calls[0] and not any(calls[1:])


def test_the_time_per_token_is_measured_at_every_context() -> None:
    session = Session(Setup("mamba2-2.7b-tiny", dtype="float32", rows=2, step_tokens=64, max_len=256), "cpu")
    ceilings = of_device(session.made.device)
    assert ceilings is not None
    figure = by_context(session, ceilings, contexts=(8, 100), outputs=6, reps=1)
    assert list(figure.more)[:2] == ["ms at 8", "ms at 100"] and figure.values.median == figure.more["ms at 100"]
    assert figure.limit is not None and 0 < figure.limit < figure.values.median
    assert figure.more["% from the fastest to the slowest"] >= 0


def test_denoising_gives_tokens_per_forward_and_what_it_costs_in_tokens() -> None:
    setup = Setup("llada-8b-tiny", dtype="float32", rows=2, step_tokens=256, max_len=256, diffusion="block=8,length=16")
    session = Session(setup, "cpu")
    ceilings = of_device(session.made.device)
    assert ceilings is not None
    load = {"batch": 2, "prompt": 12, "outputs": 16, "reps": 1}
    one, four = (denoise(session, ceilings, per_step=count, **load) for count in (1, 4))
    assert one.more["tokens per forward"] == pytest.approx(1.0, rel=0.1) and one.more["% as with one per step"] == 100
    assert four.more["tokens per forward"] == pytest.approx(4.0, rel=0.3)
    assert 0 <= four.more["% as with one per step"] <= 100
    assert all(figure.limit is not None and figure.values.median < figure.limit for figure in (one, four))
    with pytest.raises(ConfigError, match="qwen3-8b-tiny is not a diffusion model"):
        denoise(Session(TINY, "cpu"), ceilings, per_step=1, **load)


@pytest.mark.parametrize("work", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_the_shapes_of_every_work_are_known_and_long_enough(work: Work) -> None:
    config = work.setup.config
    assert work.setup.max_len <= config.get("max_position_embeddings", work.setup.max_len)
    if work.peer is not None:
        assert work.peer.prompt < work.setup.max_len and work.peer.batch <= work.setup.rows


def test_errors_are_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--work", "nothing-like-it"]) == 2
    assert "The work 'nothing-like-it' is unknown" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["--work", "decode"]) == 2
        assert "torch finds 0 CUDA devices" in capsys.readouterr().err


def test_the_works_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in WORKS | ARCHITECTURES)


def test_a_weight_follows_from_its_name_and_the_seed() -> None:
    def first(seed: int, name: str) -> torch.Tensor:
        return random_model("tiny", TINY_CONFIG, torch.float32, CPU, seed).source.get(name).dequantize()

    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first(0, name), first(0, name))
    assert not torch.equal(first(0, name), first(0, other)) and not torch.equal(first(0, name), first(1, name))
    assert first(0, name).std() == pytest.approx(64**-0.5, rel=0.05)
    assert first(0, "model.norm.weight").mean() == pytest.approx(1.0, rel=0.05)


def test_the_engine_reads_every_weight_that_the_meter_counts() -> None:
    files = random_model("tiny", TINY_CONFIG, torch.float32, CPU)
    numbers = sum(prod(files.source.shape(name)) for name in files.source.names())
    assert numbers == MeteredModel(TINY_CONFIG).parameters


def test_a_run_gives_every_token_that_was_asked_for_and_leaves_nothing_behind() -> None:
    session = Session(TINY, "cpu")
    trace = session.run(mixed_prompts(session, 9, 5, 60), 7)
    assert len(trace.tokens) == 9 * 7
    assert sum(last for _, _, last in trace.tokens) == 9
    assert len(trace.shapes) == len(trace.launched)
    assert sum(shape.logits for shape in trace.shapes) == 9 * 7
    pages, _ = session.engine.scheduler.state.census()
    assert pages.held == 0 and not session.engine.started and not session.engine.on_launch


def test_mixed_prompts_reach_from_the_shortest_to_the_longest() -> None:
    session = Session(TINY, "cpu")
    lengths = sorted(len(prompt) for prompt in mixed_prompts(session, 12, 5, 60))
    assert lengths[0] == 5 and lengths[-1] == 60 and lengths == sorted(set(lengths))


def test_decode_steps_are_those_in_which_every_sequence_gets_one_token() -> None:
    session = Session(TINY, "cpu")
    trace = session.run(session.prompts(2, 10), 5)
    assert trace.decode_shapes() == [StepShape.decode(2, 11 + i) for i in range(4)]


def test_a_time_line_counts_overlap_once_and_idle_time_between_kernels() -> None:
    ran = [Ran("a", 0, 10), Ran("b", 5, 20), Ran("a", 30, 40), Ran("inside", 31, 33)]
    found = timeline_of(ran, 2)
    assert found.microseconds == 20
    assert found.idle == pytest.approx(10 / 40)
    shown = [(k.name, k.calls, k.microseconds) for k in found.kernels]
    assert shown == [("a", 1, 10), ("b", 0.5, 7.5), ("inside", 0.5, 1)]
    assert found.kernels[0].share == pytest.approx(0.5)
    assert len(found.lines()) == 3 + 3


class Instant:
    """A mark at a given time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def until(self, later: Instant) -> float:
        return later.at - self.at


def test_the_idle_share_is_the_time_between_launches() -> None:
    covered = Covered(Session(TINY, "cpu").made.device)
    covered.spans = [(Instant(0), Instant(4)), (Instant(5), Instant(8)), (Instant(8), Instant(10))]
    assert covered.idle_share() == pytest.approx(0.1)
