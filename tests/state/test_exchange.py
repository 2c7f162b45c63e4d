"""The exchange between engines: a reader gets what was written under the same name, or nothing; no place is lost."""

from __future__ import annotations

import os
import stat
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
from bankfull.state.manager import StateManager
from bankfull.state.prefix import Chain
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.state.tiers import LowerTier, Tiers
from bankfull.types import Tier
from tests.quick import examples

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


ACTIONS = st.sampled_from(["expect", "arrive", "release"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 5), st.integers(0, 9)), max_size=40))
@examples(200)
def test_places_are_shared_out_in_order_and_none_is_lost(actions: list[tuple[str, int, int]]) -> None:
    _, expected, tier = manager()
    open_numbers: list[int] = []
    coming: dict[int, dict[object, int]] = {}
    number = 0

    def take(grants: list[Grant]) -> None:
        for own, places, waiting in grants:
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
