"""Layouts on the GPUs of one machine, with NCCL: collectives, the tokens of one GPU, and a rank that is killed.

A layout with more ranks than GPUs is skipped with that reason; with one GPU a mesh of one rank runs. With
BANKFULL_TEST_DEVICE=cpu the same tests run with gloo: that is how they are developed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull import LLM, SamplingParams, assembly
from bankfull.errors import RankLost
from bankfull.layers.build import Build
from bankfull.parallel import leading
from bankfull.parallel.groups import Bounds, ProcessRanks, join
from bankfull.parallel.meeting import KEY, Meeting
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.place import RankPlace
from bankfull.ranks.shard import Shard
from bankfull.scratch import ScratchFolder
from tests.gpu.place import CUDA, DEVICE, require_device
from tests.tiny import speaking_folder

require_device()

GPUS = torch.cuda.device_count() if CUDA else 4
PROMPTS = ["The river runs", "The engine", "its channel, and"]
LAYOUTS = ["tp=2", "pp=2", "tp=2,sp=on", "tp=4", "tp=2,pp=2"]


def needs(mesh: str) -> None:
    if (ranks := MeshSpec.parse(mesh).ranks) > GPUS:
        pytest.skip(f"the layout {mesh} needs {ranks} GPUs, one for each rank, and {GPUS} is here")


def tokens(parallel: str = "") -> list[list[int]]:
    llm = LLM(str(speaking_folder()), device=DEVICE.type, dtype="float32", rows=4, parallel=parallel)
    found = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in found]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens()


@contextmanager
def one_rank() -> Iterator[ProcessRanks]:
    with ScratchFolder("ranks") as folder:
        meeting = Meeting(60.0, b"k" * KEY, file=str(folder / "store"))
        yield join(RankPlace(MeshSpec(), 0), meeting, "127.0.0.1", DEVICE.type).world


def test_collectives_of_one_rank_return_what_it_gave() -> None:
    x = torch.arange(24.0, device=DEVICE).reshape(6, 4)
    with one_rank() as rank:
        assert torch.equal(rank.all_reduce(x), x)
        assert torch.equal(rank.all_gather(x), x[None])
        assert torch.equal(rank.reduce_scatter(x), x)
        assert torch.equal(rank.all_to_all(x), x)
        assert torch.equal(rank.exchange([x], [6])[0], x)
        assert rank.least([3, 5]) == [3, 5]
        assert rank.sent == 0


def test_an_engine_with_one_tensor_rank_writes_the_same_tokens(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = assembly.plan_build
    with one_rank() as rank:

        def split(*args: Any, **more: Any) -> Build:
            return replace(plain(*args, **more), shard=Shard(rank))

        monkeypatch.setattr(assembly, "plan_build", split)
        assert tokens() == expected


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_several_devices_write_the_tokens_of_one(parallel: str, expected: list[list[int]]) -> None:
    needs(parallel)
    assert tokens(parallel) == expected


@pytest.mark.parametrize("parallel", ["tp=2", "pp=2"])
def test_a_prefix_comes_back_from_the_tiers_of_several_devices(parallel: str, tmp_path: Path) -> None:
    needs(parallel)
    tiers = {"kv_disk": f"64MiB:{tmp_path}", **({"kv_host": "64MiB"} if CUDA else {})}
    prompt, how = list(range(3, 60)), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = []
    for _ in range(2):
        llm = LLM(
            str(speaking_folder()),
            device=DEVICE.type,
            dtype="float32",
            rows=4,
            page_tokens=4,
            memory="8MiB",
            parallel=parallel,
            **tiers,  # type: ignore[arg-type]
        )
        engine = llm.loaded.engine
        engine.scheduler.pace.forecast = None  # a model as small as this is computed faster than read
        [output] = llm.generate([prompt], how)
        found.append((list(output.outputs[0].token_ids), output.metrics.cached_tokens if output.metrics else 0))
        while engine.busy:
            engine.step()
        assert engine.runner.mover is not None and isinstance(engine.runner.followers, leading.Followers)
        engine.runner.mover.close()
        engine.runner.followers.close()
    (first, cold), (again, cached) = found
    assert first == again and cold == 0 and cached == 56


@pytest.mark.parametrize("parallel", ["tp=2", "pp=2"])
def test_a_killed_rank_ends_the_replica(parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(parallel)
    monkeypatch.setattr(leading, "BOUNDS", Bounds(collective=10.0, step=20.0))
    llm = LLM(str(speaking_folder()), device=DEVICE.type, dtype="float32", rows=4, parallel=parallel)
    followers = llm.loaded.engine.runner.followers
    assert isinstance(followers, leading.Followers)
    os.kill(followers._processes[0].pid, signal.SIGKILL)
    followers._processes[0].wait()
    with pytest.raises(RankLost):
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
