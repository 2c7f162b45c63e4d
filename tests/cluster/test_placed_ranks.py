"""Ranks of an `LLM` and of a benchmark on a Ray cluster: the tokens of one process, what is left, what is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from bankfull import LLM, SamplingParams
from bankfull.choices import RAY
from bankfull.cli.app import run_command
from bankfull.config import RunConfig
from bankfull.declared import Trait
from bankfull.errors import ConfigError, RankLost
from tests.cluster.kit import processes, until
from tests.cluster.ray_nodes import RayNodes, running_nodes
from tests.tiny import speaking_folder

pytest.importorskip("ray", reason="these ranks need the package ray")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The river runs", "The engine"]
MODEL = {"dtype": "float32", "device": "cpu", "rows": 4}


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def close(llm: LLM) -> None:
    followers = llm.loaded.engine.runner.followers
    assert followers is not None
    followers.close()


def ranks(nodes: RayNodes) -> list[int]:
    return [pid for pid, command in processes(nodes.mark).items() if "-m bankfull.parallel.rank " in command]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with running_nodes() as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", found.token)
        yield found


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.parametrize("parallel", ["tp=2", "pp=2"])
def test_ranks_on_ray_give_the_tokens_of_one_process_and_end_with_it(nodes: RayNodes, parallel: str) -> None:
    expected = tokens(LLM(str(speaking_folder()), **MODEL))
    llm = LLM(str(speaking_folder()), **MODEL, parallel=parallel, ray=nodes.address)
    try:
        assert len(ranks(nodes)) == 1, "the other one is this process"
        assert tokens(llm) == expected
        assert "RAY_AUTH_TOKEN" not in _variables(ranks(nodes)[0])
    finally:
        close(llm)
    until(lambda: not ranks(nodes), 30.0)
    assert not [name for name in processes(nodes.mark).values() if name.startswith("ray::HostedRank")]


def _variables(pid: int) -> set[str]:
    with open(f"/proc/{pid}/environ") as file:
        return {entry.partition("=")[0] for entry in file.read().split("\0")}


@pytest.mark.full
@pytest.mark.cluster
def test_a_rank_that_ray_has_lost_ends_the_model_with_one_sentence(nodes: RayNodes) -> None:
    llm = LLM(str(speaking_folder()), **MODEL, parallel="tp=2", ray=nodes.address)
    try:
        [host] = [pid for pid, name in processes(nodes.mark).items() if name.startswith("ray::HostedRank")]
        os.kill(host, signal.SIGKILL)
        until(lambda: not ranks(nodes), 30.0)
        with pytest.raises(RankLost, match="rank"):
            tokens(llm)
    finally:
        close(llm)


@pytest.mark.full
@pytest.mark.cluster
def test_a_layout_without_room_is_refused(nodes: RayNodes) -> None:
    """Three nodes have one CPU each, and four ranks would have 0.75 each."""
    with pytest.raises(ConfigError, match=r"tp=2,pp=2 has 4 ranks with 0.75 CPUs each, .* has room for 3 \(3 CPUs"):
        LLM(str(speaking_folder()), **MODEL, parallel="tp=2,pp=2", ray=nodes.address)


@pytest.mark.full
@pytest.mark.cluster
def test_a_benchmark_places_its_ranks_there(nodes: RayNodes, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "latency", "--model", str(speaking_folder()), "--dtype", "float32", "--device", "cpu"]
    command += ["--prompt-len", "4", "--output-len", "3", "--reps", "1", "--json"]
    assert run_command([*command, "--parallel", "tp=2", "--ray", nodes.address]) == 0
    assert json.loads(capsys.readouterr().out)
    until(lambda: not ranks(nodes), 30.0)


def test_a_cluster_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^No Ray cluster answers at 127\.0\.0\.1:1 \("):
        LLM(str(speaking_folder()), **MODEL, parallel="tp=2", ray="127.0.0.1:1")


@pytest.mark.parametrize("options", [{"ray": "head:6379"}, {"ray": 6379, "parallel": "tp=2"}])
def test_an_address_without_a_layout_or_of_another_kind_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^ray=.* give both, as in parallel='tp=2' and ray='HOST:6379'"):
        LLM("nowhere", **options)


def test_ranks_on_gpus_are_refused() -> None:
    run = RunConfig(device="cuda", parallel="tp=2", ray="head:6379")
    with pytest.raises(ConfigError, match=r"^ray='head:6379' places ranks on CPUs only: .*--replicas 1 and --ray"):
        RAY.refuse(f"ray={run.ray!r}", {Trait.GPU: True})
