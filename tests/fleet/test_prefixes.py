"""What the front believes about a replica's prefix cache is what the cache holds, and what it could reuse."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import StateConfig
from bankfull.fleet import prefixes
from bankfull.fleet.prefix_report import REPORT_SECONDS, PrefixReporter
from bankfull.fleet.prefixes import HeldPrefixes, PromptKeys
from bankfull.serve.engine.wire import Facts, PrefixChanges
from bankfull.state.journal import PRIVATE, SLOT, KeyJournal, place_tag, short_key
from bankfull.state.manager import StateManager
from bankfull.state.prefix import Chain
from bankfull.state.sequence_state import Match
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.types import NULL, Request
from tests.quick import examples
from tests.sim.scenario import Scenario, scenario_of
from tests.sim.world import World

PAGE = 4
LAYOUT = layout_of([(Paged((TensorSpec("k", (1, 4), "float32"),)),)], PAGE)


def facts_of(state: StateManager) -> Facts:
    """As the engine process reports them."""
    groups = [(group.page_tokens, group.window or 0) for group in state.layout.paged]
    snapshots = state.snapshots.block if state.snapshots is not None else 0
    return Facts("", 64, 99, 4, state.pages.size, state.layout.block_tokens, 16, "", "", None, groups, snapshots)


def keys_of(state: StateManager) -> set[int]:
    names = [key for key in (*state.pages._by_key, *state.slots._by_key) if not key[1].startswith(PRIVATE)]  # type: ignore[index]
    return {short_key(name) ^ place_tag(group) for group, name in names}  # type: ignore[misc]


def full_state(pages: int) -> StateManager:
    return StateManager(LAYOUT, pages, 0, StateConfig(page_tokens=PAGE))


def run_prompt(state: StateManager, tokens: list[int], salt: str = "") -> None:
    """A request that computes its prompt and ends."""
    chain = Chain(salt.encode(), PAGE)
    sequence = state.open(chain, state.match(chain, tokens, len(tokens) - 1))
    assert state.reserve(sequence, len(tokens)) is not None
    state.publish(sequence, tokens, len(tokens), len(tokens))
    state.release(sequence)


class FollowedWorld(World):
    """A simulated engine, whose front reads the journal at any time."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        # As many changes as there are places: a front that reads late overflows the journal.
        self.most = scenario.frames + scenario.slots
        self.journal = KeyJournal((self.state.pages, self.state.slots), self.most)
        self.held = HeldPrefixes(facts_of(self.state))
        self.reading = Random(scenario.seed + 4)
        self.often = self.reading.choice((0.02, 0.3, 1.0))
        self.resets = self.hits = 0

    def _check(self) -> None:
        super()._check()
        if self.reading.random() < 0.005:
            self.state.forget()
        if self.reading.random() < self.often:
            self.follow()

    def follow(self) -> None:
        changes = PrefixChanges(*self.journal.take())
        self.resets += changes.reset
        self.held.apply(changes)
        assert self.held.keys == keys_of(self.state)
        for request in self.requests.values():
            self.check_request(request)

    def check_request(self, request: Request) -> None:
        salt = request.salt.decode()
        block = self.state.layout.block_tokens
        expected = self.state.match(Chain(request.salt, block), request.prompt, len(request.prompt) - 1)
        found = self.held.cached_tokens(PromptKeys(request.prompt, salt, block))
        assert found == expected.length
        self.hits += found > 0


@given(seed=st.integers(0, 1 << 20))
@examples(100, deadline=None)
def test_the_front_follows_every_cache(seed: int) -> None:
    """Full attention, windows and recurrent state, evictions, aborts, preemptions, cleared caches, late readers."""
    world = FollowedWorld(scenario_of(seed))
    world.run()
    world.follow()


def test_the_followed_worlds_reach_hits_and_overflows() -> None:
    worlds = [FollowedWorld(scenario_of(seed)) for seed in range(40)]
    for world in worlds:
        world.run()
        world.follow()
    assert sum(world.hits > 0 for world in worlds) > 10
    assert sum(world.resets > 1 for world in worlds) > 5, "the first report is always a reset"
    assert {world.state.snapshots is None for world in worlds if world.hits} == {True, False}
    assert any(world.state.windowed for world in worlds if world.hits)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.booleans()), max_size=30))
def test_a_short_journal_never_claims_what_is_not_there(events: list[tuple[list[int], bool]]) -> None:
    """Even where it may list fewer keys than there are: those it lists are a chain's first."""
    state = full_state(12)
    journal, held = KeyJournal((state.pages, state.slots), 3), HeldPrefixes(facts_of(state))
    for tokens, reads in events:
        run_prompt(state, tokens)
        state.settle(state.launched)
        if reads:
            changes = journal.take()
            assert len(changes.added) <= 3 * 8
            held.apply(PrefixChanges(*changes))
            assert held.keys <= keys_of(state)
            found = held.cached_tokens(PromptKeys(tokens, "", PAGE))
            assert found <= state.match(Chain(b"", PAGE), tokens, len(tokens) - 1).length


def test_a_prefix_ends_at_its_first_missing_page() -> None:
    state = full_state(16)
    held = HeldPrefixes(facts_of(state))
    prompt = list(range(33))
    keys = PromptKeys(prompt, "", PAGE)
    held.keys.update(keys.upto(8)[:3] + keys.upto(8)[4:])
    assert held.cached_tokens(keys) == 3 * PAGE


def test_the_last_token_of_a_prompt_is_never_cached() -> None:
    state = full_state(16)
    held = HeldPrefixes(facts_of(state))
    run_prompt(state, list(range(32)))
    held.apply(PrefixChanges(*state.journal().take()))
    assert held.cached_tokens(PromptKeys(list(range(32)), "", PAGE)) == 28
    assert held.cached_tokens(PromptKeys(list(range(33)), "", PAGE)) == 32
    assert held.cached_tokens(PromptKeys(list(range(33)), "", PAGE, reuse=False)) == 0
    assert held.cached_tokens(PromptKeys([], "", PAGE)) == 0


def test_another_salt_finds_nothing() -> None:
    state = full_state(16)
    journal, held = state.journal(), HeldPrefixes(facts_of(state))
    prompt = list(range(33))
    run_prompt(state, prompt, "one key")
    held.apply(PrefixChanges(*journal.take()))
    assert held.cached_tokens(PromptKeys(prompt, "one key", PAGE)) == 32
    for other in ("another", ""):
        assert held.cached_tokens(PromptKeys(prompt, other, PAGE)) == 0


def test_a_prompt_is_hashed_only_as_far_as_a_replica_may_hold_it() -> None:
    state = full_state(2000)
    held = HeldPrefixes(facts_of(state))
    prompt = list(range(4000))
    known, unknown = PromptKeys(prompt, "", PAGE), PromptKeys(prompt[1:], "", PAGE)
    run_prompt(state, prompt)
    held.apply(PrefixChanges(*state.journal().take()))
    assert held.cached_tokens(known) == 3996 and len(known.upto(0)) == 999
    assert held.cached_tokens(unknown) == 0 and len(unknown.upto(0)) == prefixes.FIRST_BLOCKS


def test_a_long_prompt_is_hashed_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_BLOCKS", 100)
    state = full_state(2000)
    held = HeldPrefixes(facts_of(state))
    prompt = list(range(4000))
    run_prompt(state, prompt)
    held.apply(PrefixChanges(*state.journal().take()))
    assert held.cached_tokens(PromptKeys(prompt, "", PAGE)) == 400


def test_a_full_set_keeps_the_starts_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_KEYS", 5)
    state = full_state(30)
    journal, held = state.journal(), HeldPrefixes(facts_of(state))
    prompt = list(range(33))
    run_prompt(state, prompt)
    held.apply(PrefixChanges(*journal.take()))
    assert len(held) == 5 and held.cached_tokens(PromptKeys(prompt, "", PAGE)) == 20
    state.forget()
    run_prompt(state, prompt[:9])
    held.apply(PrefixChanges(*journal.take()))
    assert len(held) == 2 and held.cached_tokens(PromptKeys(prompt, "", PAGE)) == 8


def test_pages_of_another_length_are_no_hit() -> None:
    state = full_state(16)
    held = HeldPrefixes(facts_of(state))
    run_prompt(state, list(range(32)))
    held.apply(PrefixChanges(*state.journal().take()))
    assert held.cached_tokens(PromptKeys(list(range(32)), "", 2)) == 0


def test_without_a_journal_pools_note_nothing() -> None:
    state = full_state(4)
    assert state.pages.journal is None and state.slots.journal is None
    assert place_tag(0) == 0 and place_tag(SLOT) not in range(1 << 32)
    assert state.open(Chain(b"", PAGE), Match(0)).slot == NULL


def test_a_busy_engine_reports_at_intervals_and_an_idle_one_at_once() -> None:
    now = 100.0
    state = full_state(64)
    reporter = PrefixReporter(state, lambda: now)
    first = reporter.report(idle=False)
    assert first is not None and first.reset and not first.added
    run_prompt(state, list(range(9)))
    assert reporter.report(idle=False) is None, "the last report was just now"
    now += 1.01 * REPORT_SECONDS
    second = reporter.report(idle=False)
    assert second is not None and len(second.added) == 16 and not second.reset
    run_prompt(state, list(range(17)))
    third = reporter.report(idle=True)
    assert third is not None and len(third.added) == 16 and not third.dropped
    assert reporter.report(idle=True) is None, "nothing has changed"
    state.forget()
    last = reporter.report(idle=True)
    assert last == PrefixChanges(b"", b"", True)
