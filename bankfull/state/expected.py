"""State that other engines compute for this one: what is expected, the places that it gets, and what has arrived.

An expectation belongs to one prompt, and begins when another engine begins to compute it. Keys that this engine holds
already are not asked for. The others get places of the exchange. While there is too little room, each tenant is
entitled to an equal share: what others hold beyond theirs is taken back for it, and what a tenant does not use goes to
the others. Within a tenant, earlier expectations come first. A place is held until the sequence that needs it has been
admitted, or nobody waits any longer; then it may be given away, and until then content stays there for other sequences
with the same prefix.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bankfull.state.lower_tier import Key, LowerTier
from bankfull.state.manager import StateManager
from bankfull.state.pages import Pool


class Grant(NamedTuple):
    """Places for an expectation, as (key, place), those of its keys whose places were taken back, and how many still
    wait for one."""

    number: int
    places: list[tuple[Key, int]]
    withdrawn: list[Key]
    waiting: int


@dataclass(slots=True, eq=False)
class _Expected:
    tenant: str
    keys: list[Key] = field(default_factory=list)
    """All keys that it asks for, in the order of the tokens."""
    todo: deque[Key] = field(default_factory=deque)
    """Keys that wait for a place."""
    coming: dict[Key, tuple[Pool, int]] = field(default_factory=dict)
    held: dict[Key, tuple[Pool, int]] = field(default_factory=dict)
    """What has arrived, or was there."""
    taken: Counter[Pool] = field(default_factory=Counter)
    """Places that it holds."""
    ends: bool = False
    """Nothing more arrives for it: its request waits for a row."""

    def give_back(self, key: Key) -> bool:
        """Drop the place of a key. Returns whether its content had not arrived."""
        came = self.coming.pop(key, None)
        pool, place = came or self.held.pop(key)
        self.taken[pool] -= 1
        pool.drop(place, -1)
        return came is not None


class ExpectedState:
    """`tier`: the exchange, as a tier of this engine."""

    def __init__(self, state: StateManager, tier: LowerTier) -> None:
        assert state.tiers is not None
        self._state, self._tiers, self._tier = state, state.tiers, tier
        self._parts_help = len(state.layout.paged) == 1 and state.snapshots is None and not state.windowed
        """Whether a part of a prompt's state is of use. Other models than those with one kind of pages need its end."""
        self._expected: dict[int, _Expected] = {}
        """Expectations by their numbers, in the order of arrival."""

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, number: int, prompt: Sequence[int], salt: bytes, tenant: str = "") -> None:
        """Expect the state of a prompt; `grants` tells the places."""
        one = self._expected[number] = _Expected(tenant)
        chain = self._state.chain(salt)
        length = shipped_length(self._state, len(prompt))
        chain.extend(prompt, length)
        for key in self._state.keys_for(chain, length) if length else ():
            pool = self._tier.pool(key)
            if self._tiers.device_pool(key).find(key) is not None:
                continue
            if (place := pool.find(key)) is not None:
                pool.share(place)
                one.held[key] = (pool, place)
                one.taken[pool] += 1
            elif self._tiers.find(key) is not None:
                continue
            else:
                one.todo.append(key)
            one.keys.append(key)
        self._cut(one)

    def _cut(self, one: _Expected) -> None:
        """Ask for no more than the exchange can hold at all."""
        wanted = self._wanted(one)
        if all(count <= pool.size for pool, count in wanted.items()):
            return
        one.todo = deque(list(one.todo)[: self._tier.pages.size]) if self._parts_help else deque()

    def _wanted(self, one: _Expected) -> Counter[Pool]:
        return Counter(self._tier.pool(key) for key in one.todo)

    def grants(self, number: int | None = None) -> list[Grant]:
        """What is given and taken back now; also an empty grant for `number`, which must get an answer."""
        grants: dict[int, Grant] = {}
        if number is not None:
            self._told(number, grants)
        lines: dict[str, list[tuple[int, _Expected]]] = {}
        for each, one in self._expected.items():
            if one.todo:
                lines.setdefault(one.tenant, []).append((each, one))
        if lines:
            held = self._held_by_tenant()
            tenants = len(held.keys() | lines.keys())
            shares = {pool: pool.size // tenants for pool in (self._tier.pages, self._tier.slots)}
            order = sorted(lines, key=lambda tenant: held[tenant].total() if tenant in held else 0)
            for limit in (shares, None):  # what each is entitled to, then what is left
                for tenant in order:
                    self._serve(lines[tenant], limit, grants)
        return [grants[each]._replace(waiting=len(one.todo)) for each, one in self._expected.items() if each in grants]

    def _serve(
        self,
        line: list[tuple[int, _Expected]],
        shares: dict[Pool, int] | None,
        found: dict[int, Grant],
    ) -> None:
        """Places for the expectations of one tenant, of its share or of all that is left. A later one gets nothing
        before those before it have all."""
        held = self._held_by_tenant().get(line[0][1].tenant, Counter())
        for number, one in line:
            if not one.todo:
                continue
            wanted = self._wanted(one)
            most = {pool: count if shares is None else shares[pool] - held[pool] for pool, count in wanted.items()}
            if not self._parts_help and any(most[pool] < count for pool, count in wanted.items()):
                return
            if shares is not None:
                for pool, count in wanted.items():
                    self._make_room(pool, min(count, most[pool]), shares[pool], one.tenant, found)
            if not self._parts_help and any(pool.available < count for pool, count in wanted.items()):
                return
            while one.todo and most[pool := self._tier.pool(one.todo[0])] > 0 and (taken := pool.take(1)) is not None:
                key = one.todo.popleft()
                one.coming[key] = (pool, taken[0])
                most[pool] -= 1
                one.taken[pool] += 1
                held[pool] += 1
                self._told(number, found).places.append((key, taken[0]))
            if one.todo:
                return

    def _make_room(self, pool: Pool, count: int, share: int, tenant: str, found: dict[int, Grant]) -> None:
        """Take back places from tenants beyond their shares until `count` are available, the newest first."""
        while pool.available < count:
            held = self._held_by_tenant()
            beyond = {other: counts[pool] for other, counts in held.items() if counts[pool] > share and other != tenant}
            if not beyond:
                return
            most = max(beyond, key=lambda other: beyond[other])
            number, one = next(
                (number, one) for number, one in self._newest() if one.tenant == most and one.taken[pool]
            )
            self._withdraw(number, one, pool, min(count - pool.available, beyond[most] - share), found)

    def _withdraw(self, own: int, one: _Expected, pool: Pool, count: int, found: dict[int, Grant]) -> None:
        """Take back `count` places, those of the prompt's end first, or all where a part is of no use."""
        keys = [key for key in reversed(one.keys) if key in one.coming or key in one.held]
        if self._parts_help:
            keys = keys[:count]
        told = [key for key in keys if one.give_back(key)]
        if told:
            self._told(own, found).withdrawn.extend(told)
        if not one.ends:
            missing = {*keys, *one.todo}
            one.todo = deque(key for key in one.keys if key in missing)
            self._told(own, found)

    def _newest(self) -> Iterator[tuple[int, _Expected]]:
        return reversed(self._expected.items())

    def _held_by_tenant(self) -> dict[str, Counter[Pool]]:
        held: dict[str, Counter[Pool]] = {}
        for one in self._expected.values():
            if one.coming or one.held:
                held.setdefault(one.tenant, Counter()).update(one.taken)
        return held

    @staticmethod
    def _told(number: int, found: dict[int, Grant]) -> Grant:
        return found.setdefault(number, Grant(number, [], [], 0))

    def arrived(self, number: int, keys: Iterable[Key]) -> None:
        """The content of these keys is in its places. Unknown numbers were released before."""
        if (one := self._expected.get(number)) is None:
            return
        for key in keys:
            if (spot := one.coming.pop(key, None)) is not None:
                pool, place = spot
                pool.publish(place, key)  # unless another one with the same content came first
                one.held[key] = spot

    def ended(self, number: int) -> bool:
        """The expectation's request waits for a row: what has not arrived will not come. Returns whether places have
        become free."""
        one = self._expected.get(number)
        if one is None:
            return False
        one.ends = True
        one.todo.clear()
        late = list(one.coming)
        for key in late:
            one.give_back(key)
        return bool(late)

    def release(self, number: int) -> bool:
        """The expectation's sequence runs, or is not wanted any longer. False if the number is unknown."""
        one = self._expected.pop(number, None)
        if one is None:
            return False
        for pool, place in (*one.coming.values(), *one.held.values()):
            pool.drop(place, -1)
        return True


def shipped_length(state: StateManager, prompt_len: int) -> int:
    """Tokens of a prompt whose state another engine can hand over: up to the last border of whole pages."""
    if state.snapshots is not None:
        return state.snapshots.last_border(prompt_len)
    return prompt_len // state.border_tokens * state.border_tokens
