"""The exchange between engines: a reader gets what was written under the same name, or nothing; no place is lost."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import StateConfig
from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import (
    HEADER,
    ExchangeReader,
    ExchangeShape,
    ExchangeWriter,
    MemoryCarrier,
    address_of,
    open_exchange,
    shape_of,
)
from bankfull.state.expected import ExpectedState, Grant
from bankfull.state.lower_tier import LowerTier
from bankfull.state.manager import StateManager
from bankfull.state.prefix import Chain
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.state.tiers import Tiers
from bankfull.types import Tier
from tests.quick import examples
from tests.sched.driver import MEMORY

FULL = (Paged((TensorSpec("k", (4,), "float32"),)),)
SHAPE = ExchangeShape(bytes(range(32)), pages=5, slots=3, page_bytes=96, slot_bytes=40)


@pytest.fixture
def file() -> Iterator[int]:
    made = open_exchange()
    yield made
    os.close(made)


def both(file: int, identity: bytes = SHAPE.identity) -> tuple[ExchangeReader, ExchangeWriter]:
    return ExchangeReader(file, SHAPE), ExchangeWriter(MemoryCarrier([file], identity))


def test_nobody_else_can_open_it(file: int) -> None:
    assert stat.S_IMODE(os.fstat(file).st_mode) == 0o600
    assert os.fstat(file).st_nlink == 0 or os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:")


KINDS = st.sampled_from(["pages", "slots"])


@given(st.lists(st.tuples(KINDS, st.integers(1, 3), st.binary(max_size=33), st.integers(0, 255)), max_size=12))
@examples(100)
def test_a_place_holds_what_was_written_last(writes: list[tuple[str, int, bytes, int]]) -> None:
    file = open_exchange()
    try:
        reader, writer = both(file)
        last: dict[tuple[str, int], tuple[bytes, bytes]] = {}
        for kind, place, key, byte in writes:
            content = bytes([byte]) * SHAPE.place_bytes[kind]
            writer.files[kind].write(address_of(0, place), key, memoryview(content))
            last[kind, place] = key, content
        for (kind, place), (key, content) in last.items():
            into = bytearray(len(content))
            reader.files[kind].read(place, key, memoryview(into))
            assert bytes(into) == content
            with pytest.raises(DamagedPlace, match="something else"):
                reader.files[kind].read(place, key + b"!", memoryview(into))
    finally:
        os.close(file)


def test_content_that_changed_is_not_read(file: int) -> None:
    reader, writer = both(file)
    writer.files["pages"].write(address_of(0, 2), b"name", memoryview(bytes(96)))
    os.pwrite(file, b"\1", SHAPE.overhead + 96 + 17)
    with pytest.raises(DamagedPlace, match="has changed"):
        reader.files["pages"].read(2, b"name", memoryview(bytearray(96)))


def test_a_writer_that_stops_half_way_leaves_nothing(file: int) -> None:
    reader, writer = both(file)
    writer.files["pages"].write(address_of(0, 1), b"name", memoryview(bytes(96)))
    os.pwrite(file, bytes(68), HEADER.size)  # the entry is cleared first
    with pytest.raises(DamagedPlace):
        reader.files["pages"].read(1, b"name", memoryview(bytearray(96)))


def test_a_new_owner_begins_with_empty_places(file: int) -> None:
    _, writer = both(file)
    writer.files["pages"].write(address_of(0, 1), b"name", memoryview(bytes(96)))
    again = ExchangeReader(file, SHAPE)
    with pytest.raises(DamagedPlace):
        again.files["pages"].read(1, b"name", memoryview(bytearray(96)))


def test_state_of_another_form_is_not_written(file: int) -> None:
    _, writer = both(file, bytes(32))
    with pytest.raises(DamagedPlace, match="another form"):
        writer.files["pages"].write(address_of(0, 1), b"name", memoryview(bytes(96)))


@pytest.mark.parametrize("place", [0, 6, 1 << 31])
def test_a_place_that_does_not_exist_is_not_written(file: int, place: int) -> None:
    _, writer = both(file)
    with pytest.raises(DamagedPlace, match="not for"):
        writer.files["pages"].write(address_of(0, place), b"name", memoryview(bytes(96)))


def test_an_exchange_without_an_owner_has_no_shape() -> None:
    file = open_exchange()
    assert shape_of(file) is None
    os.ftruncate(file, SHAPE.nbytes)
    assert shape_of(file) is None
    SHAPE.write(file)
    assert shape_of(file) == SHAPE
    os.ftruncate(file, SHAPE.nbytes - 1)
    assert shape_of(file) is None, "someone has cut it"
    os.close(file)


# -- who gets which place


def manager() -> tuple[StateManager, ExpectedState, LowerTier]:
    state = StateManager(layout_of([FULL], 4), 64, 0, StateConfig(page_tokens=4))
    tier = LowerTier(Tier.EXCHANGE, 8, 0)
    state.tiers = Tiers(state.pages, state.slots, [tier], state.moves, page_bytes=16, slot_bytes=0)
    return state, ExpectedState(state, tier), tier


def test_a_prompt_is_expected_up_to_its_last_whole_page() -> None:
    _, expected, _ = manager()
    expected.expect(1, list(range(14)), b"")
    [grant] = expected.grants(1)
    chain = Chain(b"", 4)
    chain.extend(list(range(14)), 14)
    assert [key for key, _ in grant.places] == [(0, name) for name in chain.names[1:4]]
    assert grant.waiting == 0


def test_what_has_arrived_for_one_request_is_not_asked_for_again() -> None:
    _, expected, tier = manager()
    expected.expect(1, list(range(12)), b"")
    [grant] = expected.grants(1)
    expected.arrived(1, [key for key, _ in grant.places[:2]])
    expected.expect(2, list(range(12)), b"")
    assert [len(grant.places) for grant in expected.grants(2)] == [1]
    expected.release(1)
    expected.release(2)
    assert tier.pages.census().held == 0


def test_another_salt_expects_other_content() -> None:
    _, expected, _ = manager()
    expected.expect(1, list(range(8)), b"")
    [grant] = expected.grants(1)
    expected.arrived(1, [key for key, _ in grant.places])
    expected.expect(2, list(range(8)), b"another key")
    assert [len(grant.places) for grant in expected.grants(2)] == [2]


def tokens_from(first: int, pages: int) -> list[int]:
    return list(range(first, first + 4 * pages))


def test_a_tenant_gets_its_share_of_an_exchange_that_another_one_holds() -> None:
    _, expected, tier = manager()
    expected.expect(1, tokens_from(0, 5), b"", "greedy")
    [one] = expected.grants(1)
    expected.arrived(1, [key for key, _ in one.places])
    expected.expect(2, tokens_from(100, 5), b"", "greedy")
    assert [(grant.number, len(grant.places), grant.waiting) for grant in expected.grants(2)] == [(2, 3, 2)]
    expected.expect(3, tokens_from(200, 6), b"", "modest")
    assert [(g.number, len(g.places), len(g.withdrawn), g.waiting) for g in expected.grants(3)] == [
        (1, 0, 0, 1),
        (2, 0, 3, 5),  # the newest one gives way first
        (3, 4, 0, 2),  # half of eight places
    ]
    expected.release(3)
    again = [(grant.number, len(grant.places)) for grant in expected.grants()]
    assert again == [(1, 1), (2, 3)], "what nobody else wants goes to those who wait"
    expected.release(1)
    expected.release(2)
    assert tier.pages.census().held == 0


def test_what_has_arrived_is_taken_back_without_a_word_once_its_request_waits_for_a_row() -> None:
    _, expected, tier = manager()
    expected.expect(1, tokens_from(0, 8), b"", "greedy")
    [one] = expected.grants(1)
    expected.arrived(1, [key for key, _ in one.places[:6]])
    assert expected.ended(1) and tier.pages.available == 2, "what is late is not waited for"
    expected.expect(2, tokens_from(100, 4), b"", "modest")
    assert [(grant.number, len(grant.places)) for grant in expected.grants(2)] == [(2, 4)]
    assert tier.find(one.places[0][0]) is not None, "the start of the prompt is still there"


def test_a_model_that_needs_all_of_a_prompt_gives_it_back_as_a_whole() -> None:
    state = StateManager(layout_of([FULL, (MEMORY,)], 4), 64, 64, StateConfig(page_tokens=4))
    tier = LowerTier(Tier.EXCHANGE, 8, 8)
    state.tiers = Tiers(state.pages, state.slots, [tier], state.moves, page_bytes=16, slot_bytes=16)
    expected = ExpectedState(state, tier)
    expected.expect(1, tokens_from(0, 7), b"", "greedy")
    [one] = expected.grants(1)
    expected.expect(2, tokens_from(100, 6), b"", "modest")
    assert [(grant.number, grant.places) for grant in expected.grants(2)] == [(2, [])], "more than its share"
    expected.expect(3, tokens_from(200, 4), b"", "other")
    expected.release(2)
    [first, third] = expected.grants(3)
    assert (first.number, len(first.withdrawn)) == (1, len(one.places)) and first.waiting == len(one.places)
    assert third.number == 3 and not third.waiting


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.booleans()), min_size=1, max_size=30))
@examples(200)
def test_whoever_wants_its_share_of_the_exchange_has_it(wanted: list[tuple[str, int, bool]]) -> None:
    _, expected, tier = manager()
    given_out: dict[int, dict[object, int]] = {}
    for number, (tenant, pages, arrives) in enumerate(wanted, 1):
        given_out[number] = {}
        expected.expect(number, tokens_from(100 * number, pages), b"", tenant)
        for grant in expected.grants(number):
            for key in grant.withdrawn:
                given_out[grant.number].pop(key)
            given_out[grant.number].update(grant.places)
        if arrives:
            expected.arrived(number, list(given_out[number]))  # type: ignore[arg-type]
        held: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for one in expected._expected.values():
            held[one.tenant] += one.taken.total()
            waiting[one.tenant] += len(one.todo)
        assert held.total() == tier.pages.census().held <= tier.pages.size
        assert not waiting.total() or held.total() == tier.pages.size, "a place is idle while someone waits"
        share = tier.pages.size // len(held)
        assert all(held[tenant] >= share for tenant in waiting if waiting[tenant])
    for number in given_out:
        expected.release(number)
    assert tier.pages.census().held == 0


ACTIONS = st.sampled_from(["expect", "arrive", "release"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 5), st.integers(0, 9)), max_size=40))
@examples(200)
def test_places_are_shared_out_in_order_and_none_is_lost(actions: list[tuple[str, int, int]]) -> None:
    _, expected, tier = manager()
    open_numbers: list[int] = []
    coming: dict[int, dict[object, int]] = {}
    number = 0

    def take(grants: list[Grant]) -> None:
        for own, places, withdrawn, waiting in grants:
            assert not withdrawn, "there is one tenant"
            coming[own].update(places)
            later = open_numbers[open_numbers.index(own) + 1 :]
            assert not waiting or not any(grant.places for grant in grants if grant.number in later)
        given_out = [place for places in coming.values() for place in places.values()]
        assert len(given_out) == len(set(given_out)), "a place for two"

    for action, which, size in actions:
        if action == "expect":
            number += 1
            open_numbers.append(number)
            coming[number] = {}
            expected.expect(number, [which] * 4 * size, b"")
            take(expected.grants(number))
        elif open_numbers:
            own = open_numbers[which % len(open_numbers)]
            if action == "arrive":
                keys = list(coming[own])[:size]
                expected.arrived(own, keys)  # type: ignore[arg-type]
                for key in keys:
                    del coming[own][key]
            else:
                open_numbers.remove(own)
                del coming[own]
                assert expected.release(own) and not expected.release(own)
                take(expected.grants())
        census = tier.pages.census()
        assert census.total == tier.pages.size
    for own in open_numbers:
        expected.release(own)
    assert tier.pages.census().held == 0 and not len(expected)
