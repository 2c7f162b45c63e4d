"""Pools of `--separate` on two machines: pages cross the network. Tokens are those of one engine, also when they
cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from tests.cluster.network import Network, network, why_impossible
from tests.cluster.test_network import GATEWAY, started, stopped
from tests.tiny import speaking_folder

pytestmark = [pytest.mark.full, pytest.mark.cluster]

TOKENS = 12

FRONT = """
import asyncio, json, sys
from bankfull import SamplingParams
from bankfull.fleet.routing import routing_policy
from bankfull.outputs import Delta
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.remote import RemoteEngine
from bankfull.serve.engine.wire import ExchangeEnds
from bankfull.serve.replicas.separate_set import SeparateSet
from bankfull.submit import Submit

OPTIONS = {"dtype": "float32", "memory": "1MiB", "page_tokens": 4}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

def link(host, own):
    ends = ExchangeEnds([], 1 << 20, own, 1, b"s" * 32)
    return Link(sys.argv[1], OPTIONS, threads=1, tells_prefixes=True, exchange=ends,
        open_engine=lambda receive: RemoteEngine(receive, (host, 7000), b"t" * 32))

async def main():
    prefill, decode = link(sys.argv[2], None), link(sys.argv[3], 0)
    pools = SeparateSet({"prefill-0": prefill}, {"decode-0": decode}, routing_policy("prefix"))
    await pools.start()
    await pools.wait_all_ready()
    print(json.dumps({"at": decode.facts.exchange_at}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        before = pools.counts.pages, pools.counts.late
        tokens = []
        async for items in pools.generate(Submit(json.loads(line), PARAMS)):
            tokens += [token for item in items if isinstance(item, Delta) for token in item.token_ids]
        pages, late = pools.counts.pages - before[0], pools.counts.late - before[1]
        print(json.dumps({"tokens": tokens, "pages": pages, "late": late}), flush=True)
    await pools.close()

asyncio.run(main())
"""
"""A front with a prefill engine on the first host and a decode engine on the second. It answers the prompts that it
reads, one in each line."""


class Front:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        assert text, "it has ended"
        found: dict[str, object] = json.loads(text)
        return found

    def ask(self, prompt: list[int]) -> dict[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        return self.read()


def drop_answers(there: Network, machine: int, to: int, *, how: str) -> None:
    """`how`: "add" or "del". What the machine sends to the other one is lost."""
    command = there.on(machine, "ip", "route", how, "blackhole", there.address(to))
    subprocess.run(command, check=True, capture_output=True)


def test_pages_cross_the_network_and_are_computed_again_where_they_cannot(tmp_path: Path) -> None:
    if why := why_impossible():
        pytest.skip(why)
    whole = LLM(str(speaking_folder()), dtype="float32", memory="1MiB", page_tokens=4)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def prompt_of(number: int) -> list[int]:
        return [3 + (7 * i + number * i * i) % 290 for i in range(130)]

    def expected(number: int) -> list[int]:
        [one] = whole.generate([prompt_of(number)], params)
        return list(one.outputs[0].token_ids)

    with network(3) as there, stopped() as begun:
        hosts = [there.address(machine) for machine in (1, 2)]
        for machine, host in enumerate(hosts, 1):
            begun.append(started(there.on(machine, sys.executable, "-c", GATEWAY, host)))
            assert begun[-1].stdout is not None and begun[-1].stdout.readline()
        begun.append(started(there.on(0, sys.executable, "-c", FRONT, str(speaking_folder()), *hosts)))
        front = Front(begun[-1])
        at = front.read()["at"]
        assert isinstance(at, list) and at[0] == hosts[1], "it listens where the front has reached it"
        assert front.ask(prompt_of(1)) == {"tokens": expected(1), "pages": 32, "late": 0}
        drop_answers(there, 2, 1, how="add")  # the front reaches both
        assert front.ask(prompt_of(2)) == {"tokens": expected(2), "pages": 0, "late": 32}
        drop_answers(there, 2, 1, how="del")
        for number in range(3, 30):
            told = front.ask(prompt_of(number))
            assert told["tokens"] == expected(number)
            if told["pages"] == 32:
                break  # before, the engine may have rested
        else:
            pytest.fail("pages do not cross the network any more")
