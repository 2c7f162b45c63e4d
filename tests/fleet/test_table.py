"""Many replicas as columns: the same choices as looking at every replica, and one lookup of a prompt for all."""

from __future__ import annotations

from array import array
from dataclasses import replace
from operator import attrgetter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from bankfull.fleet.meter import ReplicaMeter
from bankfull.fleet.prefixes import CachedTokens, HeldPrefixes, PrefixIndex, PromptKeys
from bankfull.fleet.reports import Facts, Load, PrefixChanges
from bankfull.fleet.routing import FEW, NAMES, POLICIES, Candidate, routing_policy
from bankfull.fleet.table import ReplicaTable
from tests.fleet.test_routing import CANDIDATES
from tests.quick import examples

PAGE = 4
FACTS = Facts("", 1 << 20, 99, 4, 100, PAGE, 256, "", "")
WINDOWED = Facts("", 1 << 20, 99, 4, 100, PAGE, 256, "", "", groups=[(PAGE, 0), (PAGE, 3 * PAGE)])


figures_of = attrgetter(*NAMES)


class KnownReplica(ReplicaMeter):
    """A meter with a fixed view."""

    def __init__(self, view: Candidate) -> None:
        super().__init__()
        self.view = view

    def candidate(self, cached_tokens: int = 0) -> Candidate:
        return replace(self.view, cached_tokens=cached_tokens)

    def figures(self) -> tuple[float, ...]:
        return figures_of(self.view)


def test_a_meter_gives_the_figures_of_its_candidate() -> None:
    meter = ReplicaMeter(lambda: 4.0)
    load = Load(3, 2, 900, 40, 100, 0, 0, 0, 7, 1.0, 0.0, 0.0, prefill_ms_per_token=0.4, step_ms=9.0, pages_cached=30)
    seen = [meter.figures()]
    for change in (
        lambda: meter.started(FACTS),
        lambda: meter.sent("one", 200, 50),
        lambda: meter.report(load),
        lambda: meter.answered("one"),
        lambda: meter.sent("two", 10, batch=True),
        lambda: meter.ended("one"),
        lambda: meter.lost(),
    ):
        change()
        assert meter.figures() == figures_of(meter.candidate())
        seen.append(meter.figures())
    assert len(set(seen)) > 6, "each change is seen"


def cached_by(slots: list[int], candidates: list[Candidate]) -> CachedTokens:
    return CachedTokens([(c.cached_tokens, 1 << slot) for slot, c in zip(slots, candidates, strict=True)])


@examples(60)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(CANDIDATES, min_size=1, max_size=12),
    st.integers(FEW + 1, 60),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_columns_choose_as_a_look_at_every_replica_does(
    name: str, kinds: list[Candidate], count: int, seed: int, batch: bool
) -> None:
    """Also where some replicas are left out, change between two choices, or are equal."""
    random = Random(seed)
    table = ReplicaTable()
    meters = [KnownReplica(random.choice(kinds)) for _ in range(count)]
    slots = [table.add(meter) for meter in meters]
    by_column, one_by_one = routing_policy(name, 7), routing_policy(name, 7)
    for _ in range(6):
        ready = [slot for slot in slots if random.random() < 0.9] if random.random() < 0.5 else slots
        if not ready:
            continue
        seen = [meters[slot].view for slot in ready]
        prompt = random.choice([1, 17, 900, 5000])
        view = table.view(ready, cached_by(ready, seen))
        assert by_column.choose(prompt, batch, view) == one_by_one.choose(prompt, batch, seen)
        changed = random.choice(meters)
        changed.view = random.choice(kinds)
        changed.report(None)


def test_a_slot_is_used_again() -> None:
    table = ReplicaTable()
    slots = [table.add(KnownReplica(Candidate(inflight=number))) for number in range(FEW + 2)]
    table.remove(3)
    assert table.add(KnownReplica(Candidate(inflight=0))) == 3
    policy = routing_policy("least-loaded")
    assert [policy.choose(1, False, table.view(slots)) for _ in range(3)] == [0, 3, 0]


def keys_of(names: list[int]) -> bytes:
    return array("Q", names).tobytes()


@examples(60)
@given(st.integers(0, 2**32), st.sampled_from([FACTS, WINDOWED]))
def test_one_lookup_finds_what_each_replica_holds(seed: int, facts: Facts) -> None:
    random = Random(seed)
    index = PrefixIndex()
    alone: dict[int, HeldPrefixes] = {}
    together: dict[int, HeldPrefixes] = {}
    prompts = [[shared] * 9 + [random.randrange(3) for _ in range(30)] for shared in (0, 0, 0, 1)]
    keys = [key for prompt in prompts for key in PromptKeys(prompt, "", PAGE).upto(10)]
    keys += [key ^ 1 for key in keys]  # of the second group
    for _ in range(30):
        slot = random.randrange(5)
        action = random.random()
        if slot not in alone:
            alone[slot], together[slot] = HeldPrefixes(facts), index.enter(slot, facts)
        elif action < 0.1:
            index.leave(slot)
            del alone[slot], together[slot]
            continue
        some = random.sample(keys, random.randrange(len(keys)))
        change = PrefixChanges(keys_of(some), keys_of(random.sample(keys, 3)), action > 0.9)
        alone[slot].apply(change)
        together[slot].apply(change)
        prompt = random.choice(prompts)
        found = index.cached_tokens(PromptKeys(prompt, "", PAGE))
        for number in range(5):
            expected = alone[number].cached_tokens(PromptKeys(prompt, "", PAGE)) if number in alone else 0
            assert found.at(number) == expected
