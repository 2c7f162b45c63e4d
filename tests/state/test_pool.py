from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bankfull.state.pages import Pool
from tests.quick import examples


class PoolMachine(RuleBasedStateMachine):
    """A pool against a model that keeps one plain record per place."""

    @initialize(size=st.integers(0, 6))
    def begin(self, size: int) -> None:
        self.pool = Pool(size)
        self.holders = dict.fromkeys(range(1, size + 1), 0)
        self.until = dict.fromkeys(range(1, size + 1), -1)
        """The last step that a holder of the place has named."""
        self.keys: dict[int, int | None] = {}
        """Places with content; None: nothing will look for it."""
        self.idle: list[int] = []
        """Places in the cache without holders, oldest first."""
        self.launched = 0
        self.settled = -1

    def held(self) -> list[int]:
        return [place for place, count in self.holders.items() if count]

    def quarantined(self) -> list[int]:
        return [p for p, count in self.holders.items() if not count and self.until[p] > self.settled]

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        quiet = [p for p in self.holders if not self.holders[p] and self.until[p] <= self.settled]
        free = [p for p in quiet if p not in self.keys]
        taken = self.pool.take(count)
        if count > len(quiet):
            assert taken is None
            return
        assert taken is not None and len(set(taken)) == count and set(taken) <= set(quiet)
        for _ in range(count - len(free)):
            evicted = self.idle.pop(0)
            assert evicted in taken, "the oldest content goes first"
            del self.keys[evicted]
        for place in taken:
            assert place not in self.keys, "content was lost while there was a free place"
            self.holders[place] = 1

    @precondition(lambda self: self.keys or self.held())
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted({*self.keys, *self.held()})))
        self.pool.share(place)
        self.holders[place] += 1
        if place in self.idle:
            self.idle.remove(place)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.held()))
        step = data.draw(st.integers(self.settled, self.launched))
        self.pool.drop(place, step)
        self.holders[place] -= 1
        self.until[place] = max(step, self.until[place])
        if not self.holders[place] and self.until[place] <= self.settled and place in self.keys:
            self.idle.append(place)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), key=st.integers(0, 5))
    def publish(self, data: st.DataObject, key: int) -> None:
        place = data.draw(st.sampled_from(self.held()))
        known = key in self.keys.values() or place in self.keys
        assert self.pool.publish(place, key) is not known
        if not known:
            self.keys[place] = key

    @rule(key=st.integers(0, 5))
    def retire_key(self, key: int) -> None:
        """The place stays in the cache, and is evicted in its turn."""
        self.pool.retire_keys([key])
        self.keys = {place: None if of == key else of for place, of in self.keys.items()}
        assert self.pool.find(key) is None

    @rule()
    def launch(self) -> None:
        self.launched += 1

    @precondition(lambda self: self.settled < self.launched)
    @rule()
    def settle_everything(self) -> None:
        """All at once, so that the order in which places leave is that of their steps and drops."""
        waiting = self.quarantined()
        order = [place for _, place in self.pool._release if place in waiting]
        self.settled = self.launched
        freed = self.pool.settle(self.launched)
        assert set(freed) == {place for place in waiting if place not in self.keys}
        for place in dict.fromkeys(order):
            if place in self.keys:
                self.idle.append(place)
        self.launched += 1

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.keys.clear()
        self.idle.clear()

    @invariant()
    def every_place_is_in_exactly_one_condition(self) -> None:
        if not hasattr(self, "pool"):
            return
        census = self.pool.census()
        assert census.total == self.pool.size
        assert census.held == len(self.held())
        assert census.quarantined == self.pool.coming == len(self.quarantined())
        assert census.cached == len(self.idle)
        assert self.pool.available == census.free + census.cached
        assert all(self.pool.find(key) == place for place, key in self.keys.items() if key is not None)
        assert self.pool.idle(self.keys) == len(self.idle)
        assert all(self.pool.is_cached(place) for place in self.idle)


TestPool = PoolMachine.TestCase
TestPool.settings = examples(40, stateful_step_count=30, deadline=None)


def test_the_null_place_is_never_handed_out_and_never_counted() -> None:
    pool = Pool(3)
    assert 0 not in (pool.take(3) or ())
    pool.share(0)
    pool.drop(0, 5)
    assert not pool.publish(0, "key") and pool.census().total == 3


def test_a_place_stays_in_quarantine_for_the_latest_step_of_all_its_holders() -> None:
    pool = Pool(1)
    [place] = pool.take(1) or []
    pool.share(place)
    pool.settle(4)
    pool.drop(place, 5)
    pool.drop(place, 4)
    assert pool.coming == 1 and pool.settle(4) == [] and pool.settle(5) == [place]


def test_what_comes_back_from_quarantine_is_not_freed_by_its_first_stamp() -> None:
    pool = Pool(1)
    [place] = pool.take(1) or []
    pool.publish(place, "key")
    pool.drop(place, 3)
    pool.share(place)
    assert pool.settle(3) == [] and pool.census().held == 1


def test_dropping_more_often_than_taking_is_caught() -> None:
    pool = Pool(1)
    [place] = pool.take(1) or []
    pool.drop(place, -1)
    with pytest.raises(AssertionError, match="dropped without a reference"):
        pool.drop(place, -1)
