"""Memory of sequences in pages and in one piece each: allocators that lose nothing, and the order that theory says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.plan.allocators import Contiguous, PagedMemory
from bankfull.plan.memory import PARTS, MemoryRequest, MemorySimulation, MemoryWorld, compare

WORLD = MemoryWorld(capacity=1024, longest=256, page_tokens=8, rows=64, step_tokens=128)
REQUESTS = st.lists(
    st.builds(MemoryRequest, st.floats(0, 5), st.integers(1, 128), st.integers(1, 128)), min_size=1, max_size=60
)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=80))
def test_free_pieces_and_reservations_always_cover_the_memory_once(actions: list[tuple[bool, int]]) -> None:
    memory = Contiguous("", 256, lambda final: final)
    held: list[int] = []
    for number, (starts, size) in enumerate(actions):
        if starts or not held:
            fits = any(end - begin >= size for begin, end in memory.pieces)
            assert memory.start(number, 1, size, 0) == fits
            held += [number] if fits else []
        else:
            memory.end(held.pop(size % len(held)))
        assert all(before[1] < after[0] for before, after in pairwise(memory.pieces)), "free neighbours are one piece"
        pieces = sorted([*memory.pieces, *memory._held.values()])
        assert pieces[0][0] == 0 and pieces[-1][1] == 256
        assert all(before[1] == after[0] for before, after in pairwise(pieces))


def test_pages_waste_less_than_one_page_of_each_sequence() -> None:
    memory = PagedMemory("", 1024, 16)
    for number, tokens in enumerate((1, 16, 17, 100)):
        assert memory.start(number, tokens, 500, 0)
        assert 0 <= memory.reserved(number) - tokens < 16
    assert memory.free == 1024 - (16 + 16 + 32 + 112)
    for number in range(4):
        memory.end(number)
    assert memory.free == 1024


@given(REQUESTS)
def test_every_request_gets_all_its_tokens_and_all_memory_comes_back(requests: list[MemoryRequest]) -> None:
    for allocator in WORLD.allocators():
        outcome = MemorySimulation(WORLD, allocator, requests).run()
        assert outcome.output_tokens == sum(request.output for request in requests)
        assert allocator.free == allocator.capacity
        assert outcome.computed_tokens >= sum(request.final - 1 for request in requests)
        assert not outcome.waited or sum(outcome.parts) == pytest.approx(1.0)
        if isinstance(allocator, Contiguous):
            assert outcome.preemptions == 0
        else:
            assert outcome.parts[PARTS.index("free, in pieces too small")] == 0


def test_under_load_pages_hold_most_and_maximum_lengths_least() -> None:
    requests = [MemoryRequest(0.0, 20 + number % 100, 10 + number * 7 % 100) for number in range(200)]
    paged, known, longest = compare(WORLD, requests)
    assert paged.parts[0] > 0.85 > known.parts[0] > longest.parts[0]
    assert paged.sequences > known.sequences > longest.sequences == WORLD.capacity // WORLD.longest
    assert paged.tokens_per_second > known.tokens_per_second > longest.tokens_per_second
    assert known.parts[2] == 0 and longest.parts[2] > 0.3


def test_a_known_length_leaves_pieces_that_no_request_fits() -> None:
    sizes = [200, 60, 200, 60, 200, 60, 200]
    requests = [MemoryRequest(0.0, size - 40 + index % 2 * 30, 40) for index, size in enumerate(sizes * 20)]
    known = compare(WORLD, requests)[1]
    assert known.parts[PARTS.index("free, in pieces too small")] > 0.01


def test_nothing_is_shown_of_a_memory_that_nobody_waits_for() -> None:
    for outcome in compare(WORLD, [MemoryRequest(0.0, 10, 5)]):
        assert outcome.waited == 0 and outcome.completion > 0
