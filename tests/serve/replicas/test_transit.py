"""State on its way between two engines: every wait has a bound, and both ends are freed, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.backend import Unavailable
from bankfull.serve.engine.link import OnRoom, OnShipped
from bankfull.serve.engine.wire import RoomGranted, Shipped
from bankfull.serve.replicas import transit as module
from bankfull.serve.replicas.transit import Transit, TransitCounts
from bankfull.submit import Submit

SUBMIT = Submit(list(range(20)), SamplingParams())
ADDRESS = ("10.0.0.7", 4000)
NAMES = [b"\0a", b"\0b", b"\0c"]


@dataclass
class FakeEnd:
    """An engine's end: it keeps what it is told."""

    ready: bool = True
    on_room: OnRoom | None = None
    on_shipped: OnShipped | None = None
    arrived: list[bytes] = field(default_factory=list)
    orders: list[tuple[int, list[tuple[bytes, int]]]] = field(default_factory=list)
    addresses: list[tuple[str, int] | None] = field(default_factory=list)
    forgotten: list[tuple[int, bool]] = field(default_factory=list)

    def expect_state(self, prompt: list[int], salt: str, tenant: str, on_room: OnRoom) -> int:
        if not self.ready:
            raise Unavailable("It has just ended.")
        self.on_room = on_room
        return 7

    def state_arrived(self, number: int, names: list[bytes]) -> None:
        self.arrived += names

    def ship_state(self, on_shipped: OnShipped) -> int:
        self.on_shipped = on_shipped
        return 3

    def ship_more(
        self, number: int, exchange: int, places: list[tuple[bytes, int]], at: tuple[str, int] | None
    ) -> None:
        self.orders.append((exchange, places))
        self.addresses.append(at)

    def forget_state(self, number: int, *, told: bool = True) -> None:
        self.forgotten.append((number, told))


class Way:
    def __init__(self) -> None:
        self.source, self.target, self.counts = FakeEnd(), FakeEnd(), TransitCounts()
        self.transit = Transit(self.source, self.target, 1, SUBMIT, self.counts, ADDRESS)
        self.transit.begin()

    def room(self, *names: bytes, waiting: int = 0) -> None:
        assert self.target.on_room is not None
        self.target.on_room(RoomGranted(7, [(name, i + 1) for i, name in enumerate(names)], waiting))

    def ship(self, *names: bytes, failed: tuple[bytes, ...] = ()) -> None:
        assert self.source.on_shipped is not None
        self.source.on_shipped(Shipped(3, list(names), 100 * len(names), list(failed)))


def run(what: Callable[[Way], Coroutine[Any, Any, None]]) -> Way:
    async def bounded() -> Way:
        way = Way()
        await asyncio.wait_for(what(way), 30)
        return way

    return asyncio.run(bounded())


def test_what_arrives_is_passed_on_and_counted() -> None:
    async def go(way: Way) -> None:
        way.room(*NAMES[:2], waiting=1)
        way.ship(NAMES[0])
        assert not way.transit.complete
        way.room(NAMES[2])
        way.ship(*NAMES[1:])
        assert way.transit.complete
        await way.transit.wait()

    way = run(go)
    assert way.source.orders == [(1, [(NAMES[0], 1), (NAMES[1], 2)]), (1, [(NAMES[2], 1)])]
    assert way.source.addresses == [ADDRESS, ADDRESS]
    assert way.target.arrived == NAMES
    assert (way.counts.pages, way.counts.nbytes, way.counts.late, way.counts.incomplete) == (3, 300, 0, 0)
    assert way.transit.account()["bytes"] == 300
    assert way.source.forgotten == [(3, False)], "the order was carried out to the end"


def test_an_engine_that_holds_all_of_it_asks_for_nothing() -> None:
    async def go(way: Way) -> None:
        way.room()
        await way.transit.wait()

    way = run(go)
    assert not way.source.orders and not way.counts.late


@pytest.mark.parametrize("granted", [True, False])
def test_who_gets_nothing_for_a_while_goes_on_without(granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.01)

    async def go(way: Way) -> None:
        way.room(*(NAMES if granted else ()), waiting=0 if granted else 3)
        await way.transit.wait()

    way = run(go)
    assert (way.counts.late, way.counts.incomplete) == (3, 1)
    assert way.source.forgotten == [(3, True)], "the source stops copying"


def test_room_that_comes_too_late_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.01)

    async def go(way: Way) -> None:
        way.room(waiting=3)
        await way.transit.wait()
        way.room(*NAMES)
        way.transit.taken()

    way = run(go)
    assert not way.source.orders, "nobody would end that order"
    assert way.source.forgotten == [(3, True)] and way.target.forgotten == [(7, False)]


def test_an_engine_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.01)
    run(lambda way: way.transit.wait())


def test_pieces_that_come_slowly_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_SECONDS", 0.1)

    async def go(way: Way) -> None:
        way.room(*(bytes([0, i]) for i in range(200)))

        async def drip() -> None:
            for i in range(100):
                way.ship(bytes([0, i]))
                await asyncio.sleep(0.01)

        dripping = asyncio.ensure_future(drip())
        await way.transit.wait()
        assert not way.transit.complete
        dripping.cancel()

    assert run(go).counts.late >= 100


def test_what_arrived_before_its_source_died_stays_of_use() -> None:
    async def go(way: Way) -> None:
        way.room(*NAMES)
        way.ship(NAMES[0])
        assert way.source.on_shipped is not None
        way.source.on_shipped(None)
        await way.transit.wait()
        assert not way.transit.lost

    way = run(go)
    assert way.target.arrived == NAMES[:1]
    assert (way.counts.late, way.counts.incomplete) == (2, 1)


def test_a_target_that_died_ends_the_order() -> None:
    async def go(way: Way) -> None:
        way.room(*NAMES)
        assert way.target.on_room is not None
        way.target.on_room(None)
        assert way.transit.lost and way.transit.complete
        await way.transit.wait()

    assert (3, True) in run(go).source.forgotten


def test_a_failed_copy_is_not_waited_for() -> None:
    async def go(way: Way) -> None:
        way.room(*NAMES)
        way.ship(*NAMES[:2], failed=(NAMES[2],))
        assert way.transit.complete
        await way.transit.wait()

    assert run(go).counts.late == 1


def test_closing_frees_both_ends_once() -> None:
    async def go(way: Way) -> None:
        way.room(*NAMES)
        way.transit.close()
        way.transit.close()
        await way.transit.wait()

    way = run(go)
    assert way.target.forgotten == [(7, True)] and way.source.forgotten == [(3, True)]


def test_a_target_without_an_engine_gets_nothing() -> None:
    async def go() -> None:
        source, counts = FakeEnd(), TransitCounts()
        transit = Transit(source, FakeEnd(ready=False), 0, SUBMIT, counts)
        transit.begin()
        assert transit.lost and transit.complete
        assert source.on_shipped is None and not counts.transits

    asyncio.run(go())


def test_places_are_asked_for_when_the_prompt_is_begun() -> None:
    async def go() -> None:
        source, target, counts = FakeEnd(), FakeEnd(), TransitCounts()
        transit = Transit(source, target, 0, SUBMIT, counts)
        assert target.on_room is None and transit.complete, "a prompt that waits asks for nothing"
        transit.begin()
        transit.begin()
        assert target.on_room is not None and not transit.complete and counts.transits == 1
        early = Transit(source, FakeEnd(), 0, SUBMIT, counts)
        early.close()
        early.begin()
        assert counts.transits == 1, "its client has left"

    asyncio.run(go())


def test_places_that_were_given_to_others_are_not_filled() -> None:
    async def go(way: Way) -> None:
        way.room(*NAMES)
        way.ship(NAMES[0])
        assert way.target.on_room is not None
        way.target.on_room(RoomGranted(7, [], 1, [NAMES[2]]))
        assert not way.transit.complete
        way.ship(NAMES[1])
        way.room(NAMES[2])
        way.ship(NAMES[2])
        assert way.transit.complete
        await way.transit.wait()

    way = run(go)
    assert way.source.forgotten[0] == (3, True), "the order ends, and begins anew without it"
    assert way.source.orders[1:] == [(1, [(NAMES[1], 2)]), (1, [(NAMES[2], 1)])]
    assert way.counts.late == 0
