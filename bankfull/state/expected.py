"""State that other engines compute for this one: what is expected, the places that it gets, and what has arrived.

An expectation belongs to one prompt. Keys that this engine holds already are not asked for. The others get places of
the exchange, first come, first served: while there is no room, later ones wait. A place is held until the sequence that
needs it has been admitted, or nobody waits any longer; then it may be given away, and until then content stays there
for other sequences with the same prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bankfull.state.manager import StateManager
from bankfull.state.pages import Pool
from bankfull.state.prefix import Chain
from bankfull.state.tiers import Key, LowerTier


class Grant(NamedTuple):
    """Places for an expectation, as (key, place), and how many of its keys still wait for one."""

    number: int
    places: list[tuple[Key, int]]
    waiting: int


@dataclass(slots=True)
class _Expected:
    todo: deque[Key] = field(default_factory=deque)
    coming: dict[Key, tuple[Pool, int]] = field(default_factory=dict)
    held: list[tuple[Pool, int]] = field(default_factory=list)


class ExpectedState:
    """`tier`: the exchange, as a tier of this engine."""

    def __init__(self, state: StateManager, tier: LowerTier) -> None:
        assert state.tiers is not None
        self._state, self._tiers, self._tier = state, state.tiers, tier
        self._expected: dict[int, _Expected] = {}
        """In the order of arrival."""

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, number: int, prompt: Sequence[int], salt: bytes) -> None:
        """Expect the state of a prompt; `grants` tells the places."""
        one = self._expected[number] = _Expected()
        chain = Chain(salt, self._state.layout.block_tokens)
        length = shipped_length(self._state, len(prompt))
        chain.extend(prompt, length)
        for key in self._state.keys_for(chain, length) if length else ():
            pool = self._tier.pool(key)
            if self._tiers.device_pool(key).find(key) is not None:
                continue
            if (place := pool.find(key)) is not None:
                pool.share(place)
                one.held.append((pool, place))
            elif self._tiers.find(key) is None:
                one.todo.append(key)
        self._cut(one)

    def _cut(self, one: _Expected) -> None:
        """Ask for no more than the exchange can hold at all. A part is of use only to a model with one kind of pages:
        the others need the end of the prompt."""
        pages = sum(1 for key in one.todo if self._tier.pool(key) is self._tier.pages)
        if pages <= self._tier.pages.size and len(one.todo) - pages <= self._tier.slots.size:
            return
        if len(self._state.layout.paged) == 1 and self._state.snapshots is None and not self._state.windowed:
            one.todo = deque(list(one.todo)[: self._tier.pages.size])
        else:
            one.todo.clear()

    def grants(self, number: int | None = None) -> list[Grant]:
        """Places for those that wait, in their order; also an empty grant for `number`, which must get an answer."""
        found = []
        for own, one in self._expected.items():
            places = self._take(one)
            if places or own == number:
                found.append(Grant(own, places, len(one.todo)))
            if own == number:
                number = None
            if one.todo:  # later ones get nothing before it has all
                break
        if number is not None:
            found.append(Grant(number, [], len(self._expected[number].todo)))
        return found

    def _take(self, one: _Expected) -> list[tuple[Key, int]]:
        places = []
        while one.todo:
            pool = self._tier.pool(one.todo[0])
            if (taken := pool.take(1)) is None:
                break
            key = one.todo.popleft()
            one.coming[key] = (pool, taken[0])
            places.append((key, taken[0]))
        return places

    def arrived(self, number: int, keys: Iterable[Key]) -> None:
        """The content of these is in its places. Unknown numbers were released before."""
        if (one := self._expected.get(number)) is None:
            return
        for key in keys:
            if (found := one.coming.pop(key, None)) is not None:
                pool, place = found
                pool.publish(place, key)  # unless another one with the same content came first
                one.held.append((pool, place))

    def release(self, number: int) -> bool:
        """Its sequence runs, or is not wanted any longer. False if the number is unknown."""
        one = self._expected.pop(number, None)
        if one is None:
            return False
        for pool, place in (*one.coming.values(), *one.held):
            pool.drop(place, -1)
        return True


def shipped_length(state: StateManager, prompt_len: int) -> int:
    """Tokens of a prompt whose state another engine can hand over: up to the last border of whole pages."""
    if state.snapshots is not None:
        return state.snapshots.last_border(prompt_len)
    return prompt_len // state.border_tokens * state.border_tokens
