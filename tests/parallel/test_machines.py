"""Ranks on several machines, which are network namespaces here: the tokens of one process, over a slow link too; a
broken link ends in one sentence."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from tests.cluster.kit import until
from tests.cluster.network import Network, network, why_impossible
from tests.parallel.machines import Program, children, front_command, host_command, programs, started_host, variables
from tests.tiny import speaking_folder

SECONDS = 3.0
"""The bound of a collective; a step over all stages has twice as long."""


@pytest.fixture(scope="module")
def possible() -> None:
    if why := why_impossible():
        pytest.skip(why)


@pytest.fixture
def two(possible: None) -> Iterator[Network]:
    with network(2) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM(str(speaking_folder()), dtype="float32", rows=4)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(["The river runs", "The engine"], params)]


def led(there: Network, begun: list[Program], parallel: str, **how: str | float) -> tuple[Program, Program]:
    """Rank 0 on the first machine and the host of the other rank on the second."""
    host, address = started_host(there.on(1, *host_command(there.address(1))))
    begun.append(host)
    command = front_command(str(speaking_folder()), parallel, **how)  # type: ignore[arg-type]
    front = Program(there.on(0, *command), variables(address))
    begun.append(front)
    return front, host


def listening(pid: int) -> set[str]:
    """Addresses on which a process accepts connections."""
    own = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for version in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{version}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["tp=2", "pp=2"])
def test_two_machines_give_the_tokens_of_one_process(two: Network, parallel: str, expected: list[list[int]]) -> None:
    with programs() as begun:
        front, host = led(two, begun, parallel)
        assert front.told()["tokens"] == expected
        [rank] = children(host.process.pid)
        own = [bytes(map(int, two.address(machine).split(".")))[::-1].hex().upper() for machine in two.machines]
        assert listening(front.process.pid) == {own[0]}, "on the address of the first machine only"
        assert listening(rank) == {own[1]}, "on the address of the second machine only"
        front.end()
        until(lambda: not children(host.process.pid), 30.0)  # the rank ends with rank 0


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["tp=2", "pp=2"])
@pytest.mark.parametrize("way", ["cut", "stopped"])
def test_a_link_that_breaks_in_a_step_ends_in_one_sentence(two: Network, parallel: str, way: str) -> None:
    with programs() as begun:
        front, host = led(two, begun, parallel, seconds=SECONDS)
        assert front.told()["tokens"]
        [rank] = children(host.process.pid)
        front.order("run")
        assert front.told() == {"going": "run"}
        if way == "cut":
            two.cut(1)
        else:
            os.kill(rank, signal.SIGSTOP)
        told = front.told()
        assert "did not answer within" in told["lost"] or "has ended" in told["lost"]
        assert "\n" not in told["lost"]
        assert front.process.wait(60) == 0, "nothing waits for the lost rank"


@pytest.mark.full
def test_a_machine_that_is_cut_off_is_noticed_while_nothing_runs(two: Network) -> None:
    with programs() as begun:
        front, host = led(two, begun, "tp=2")
        assert front.told()["tokens"]
        front.order("watch")
        assert front.told() == {"going": "watch"}
        two.cut(1)
        assert front.told()["lost"] == f"rank 1 on {platform.node()} has ended."
        until(lambda: not children(host.process.pid))  # on the other side, too


@pytest.mark.full
@pytest.mark.parametrize("how", ["netem delay 2ms", "tbf rate 10mbit burst 32kbit latency 400ms"])
def test_a_slow_link_changes_no_token(two: Network, how: str, expected: list[list[int]]) -> None:
    try:
        two.shape(1, *how.split())
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else "the program tc is missing"
        pytest.skip(f"{how!r} is not possible here: {why}")
    with programs() as begun:
        front, _ = led(two, begun, "tp=2")
        assert front.told()["tokens"] == expected


@pytest.mark.full
def test_a_machine_without_the_model_is_named(two: Network) -> None:
    with programs() as begun:
        front, host = led(two, begun, "tp=2", elsewhere="/no/such/model")
        refused = front.told()["refused"]
        assert refused.startswith(f"Rank 1 on {platform.node()}: ") and "/no/such/model" in refused
        assert front.process.wait(60) == 0
        until(lambda: not children(host.process.pid), 30.0)
