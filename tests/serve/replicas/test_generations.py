"""Replicas with two sets of weights side by side: which of them a request may use."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.backend import EngineDied
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.submit import Submit
from tests.serve.engine_kit import until
from tests.serve.replicas.fake_links import FACTS, FakeLink, read, replica_set

PARAMS = SamplingParams(max_tokens=4, seed=3)


def link(weights: str, **changes: Any) -> FakeLink:
    return FakeLink(facts=msgspec.structs.replace(FACTS, weights=weights, **changes))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_new_requests_go_to_the_newest_weights_and_to_others_only_if_those_refuse() -> None:
    async def check() -> None:
        old, new = link("a"), link("b", name="other")
        replicas = replica_set(old)
        replicas.generate(Submit([1], PARAMS))
        await replicas.add("n", new, 1)
        kept = [replicas.generate(Submit([1], PARAMS)) for _ in range(3)]
        assert (len(old.sent), len(new.sent)) == (1, 3)
        assert replicas.facts is not None and replicas.facts.weights == "b" and replicas.facts.rows == 16
        new.most = 3
        replicas.generate(Submit([1], PARAMS))
        assert (len(old.sent), len(new.sent)) == (2, 3) and kept
        await replicas.remove("n")
        replicas.generate(Submit([1], PARAMS))
        assert len(old.sent) == 3 and replicas.facts.weights == "a"

    run(check())


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_request_with_tokens_stays_with_its_weights(tokens: int) -> None:
    async def check() -> None:
        first, second, new = link("a"), link("a"), link("b")
        replicas = replica_set(first, second)
        stream = replicas.generate(Submit([1], PARAMS))
        runs, other = (first, second) if first.sent else (second, first)
        await replicas.add("n", new, 1)
        for _ in range(tokens):
            runs.step()
            await anext(stream)
        runs.kill()
        rest = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (len(other.sent), len(new.sent)) == ((1, 0) if tokens else (0, 1))
        rest.cancel()

    run(check())


def test_the_last_replica_with_its_weights_ends_the_request_with_a_reason() -> None:
    async def check() -> None:
        old, new = link("a"), link("b")
        replicas = replica_set(old)
        stream = replicas.generate(Submit([1], PARAMS))
        await replicas.add("n", new, 1)
        old.step()
        await anext(stream)
        ended = asyncio.ensure_future(replicas.remove("r0", 0.0))
        with pytest.raises(EngineDied, match="no replica has the weights of before"):
            await anext(stream)
        await ended
        assert new.sent == []

    run(check())


def test_a_request_waits_for_weights_that_come_back() -> None:
    async def check() -> None:
        old, new = link("a"), link("b")
        replicas = replica_set(old)
        stream = replicas.generate(Submit([1], PARAMS))
        await replicas.add("n", new, 1)
        old.step()
        await anext(stream)
        old.kill()
        rest = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.02)
        assert not rest.done(), "its weights are loaded again"
        old.revive()
        await until(lambda: bool(old.streams))
        old.step()
        assert await rest and new.sent == []

    run(check())


def test_other_weights_in_one_generation_are_refused_until_all_have_them() -> None:
    async def check() -> None:
        one, two = link("a"), link("a")
        replicas = replica_set(one, two)
        reload(one, "b")
        views = {view.name: view for view in replicas.views()}
        assert views["r0"].state == "refused" and "bankfull cluster update" in views["r0"].problem
        assert views["r1"].state == "ready"
        reload(two, "b")
        assert {view.state for view in replicas.views()} == {"ready"}

    def reload(changed: FakeLink, weights: str) -> None:
        changed.kill()
        changed.facts = msgspec.structs.replace(FACTS, weights=weights)
        changed.revive()

    run(check())


@pytest.mark.parametrize("changes", [{"vocab": 7}, {"max_len": 7}])
def test_a_generation_must_have_the_same_vocabulary_and_context(changes: dict[str, int]) -> None:
    async def check() -> None:
        replicas: ReplicaSet = replica_set(link("a"))
        await replicas.add("n", new := link("b", **changes), 1)
        assert replicas.views()[1].state == "refused" and "the others" in replicas.views()[1].problem
        stream = replicas.generate(Submit([1], SamplingParams(max_tokens=1, seed=1)))
        assert new.sent == [] and replicas.facts is not None and replicas.facts.weights == "a"
        await stream.aclose()  # type: ignore[attr-defined]

    run(check())


def test_a_whole_answer_has_one_set_of_weights() -> None:
    async def check() -> None:
        old, new = link("a"), link("b")
        replicas = replica_set(old)
        stream = replicas.generate(Submit([5], PARAMS))
        await replicas.add("n", new, 1)
        received = asyncio.ensure_future(read(stream))
        for _ in range(4):
            await asyncio.sleep(0)
            old.step()
        (await received).assert_whole([5], PARAMS)

    run(check())
