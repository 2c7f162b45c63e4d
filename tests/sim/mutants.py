"""Bugs to plant: the simulator must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pytest import MonkeyPatch

from bankfull.sched import scheduler
from bankfull.sched.admission import AdmissionRoom
from bankfull.sched.pace import Pace, Room
from bankfull.sched.preemption import Preemption
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Sequence
from bankfull.sched.step_builder import StepBuilder
from bankfull.state.manager import StateManager
from bankfull.state.moves import Moves
from bankfull.state.pages import Pool
from bankfull.state.policy import Window
from bankfull.state.prefix import Chain
from bankfull.state.sequence_state import Match, Parked, SequenceState
from bankfull.state.tiers import Key, Tiers
from bankfull.types import Tier, TierAddress, Work

Mutant = Callable[[MonkeyPatch], None]


def quarantine_is_skipped(patch: MonkeyPatch) -> None:
    def drop_all(pool: Pool, places: Iterable[int], step: int) -> None:
        original(pool, places, -1)

    original = Pool.drop_all
    patch.setattr(Pool, "drop_all", drop_all)


def quarantine_asks_only_the_last_holder(patch: MonkeyPatch) -> None:
    def drop_all(pool: Pool, places: Iterable[int], step: int) -> None:
        for place in (dropped := list(places)):
            pool._last[place] = -1
        original(pool, dropped, step)

    original = Pool.drop_all
    patch.setattr(Pool, "drop_all", drop_all)


def pages_are_published_before_they_settle(patch: MonkeyPatch) -> None:
    def serve(sched: Scheduler, seq: Sequence, step: StepBuilder, drafts: int) -> bool:
        served = original(sched, seq, step, drafts)
        if seq.state is not None:
            sched.state.publish(seq.state, seq.tokens, min(seq.start, len(seq.tokens)), seq.prompt_len)
        return served

    original = Scheduler._serve
    patch.setattr(Scheduler, "_serve", serve)


def window_forgets_one_page_early(patch: MonkeyPatch) -> None:
    def first_live(window: Window, position: int) -> int:
        return original(window, position) + 1

    original = Window.first_live
    patch.setattr(Window, "first_live", first_live)


def fork_shares_the_partial_page(patch: MonkeyPatch) -> None:
    def fork(manager: StateManager, state: SequenceState, length: int) -> SequenceState | None:
        child = original(manager, state, length)
        if child is None:
            return None
        for table, theirs in zip(child.tables, state.tables, strict=True):
            for i, page in enumerate(theirs[: len(table)]):
                if table[i] != page:
                    manager.pages.drop(table[i], manager.launched)
                    manager.pages.share(page)
                    table[i] = page
        manager.moves.settle([transfer.id for transfer in manager.moves.take_planned()])
        return child

    original = StateManager.fork
    patch.setattr(StateManager, "fork", fork)


def sharing_takes_no_reference(patch: MonkeyPatch) -> None:
    def share_all(pool: Pool, places: Iterable[int]) -> None:
        original(pool, [place for place in places if not pool._refs[place]])

    original = Pool.share_all
    patch.setattr(Pool, "share_all", share_all)


def transfers_pin_nothing(patch: MonkeyPatch) -> None:
    def copy(manager: StateManager, src: int, dst: int) -> None:
        manager.moves.start(TierAddress(Tier.DEVICE, src), TierAddress(Tier.DEVICE, dst), lambda succeeded: None)

    patch.setattr(StateManager, "_copy_page", copy)


def a_failed_transfer_is_published(patch: MonkeyPatch) -> None:
    def settle(moves: Moves, completed: Iterable[int], failed: Iterable[int] = ()) -> None:
        original(moves, [*completed, *failed])

    original = Moves.settle
    patch.setattr(Moves, "settle", settle)


def a_fetched_prefix_is_used_before_it_arrives(patch: MonkeyPatch) -> None:
    def copy_up(tiers: Tiers, key: Key) -> None:
        original(tiers, key)
        move = list(tiers._moves.under_way.values())[-1]
        tiers.device_pool(key).publish(move.transfer.dst.place, key)

    original = Tiers._copy_up
    patch.setattr(Tiers, "_copy_up", copy_up)


def a_parked_page_keeps_its_key(patch: MonkeyPatch) -> None:
    patch.setattr(StateManager, "withdraw", lambda manager, keys: None)


def a_parked_sequence_goes_on_one_token_later(patch: MonkeyPatch) -> None:
    def park(manager: StateManager, state: SequenceState, computed: int, copy: bool) -> Parked | None:
        parked = original(manager, state, computed, copy)
        return None if parked is None else parked._replace(computed=computed + 1)

    original = StateManager.park
    patch.setattr(StateManager, "park", park)


def preemption_drops_the_last_token(patch: MonkeyPatch) -> None:
    def preempt(sched: Scheduler, seq: Sequence, for_memory: bool = False) -> None:
        original(sched, seq, for_memory)
        if len(seq.tokens) > seq.prompt_len:
            seq.tokens.pop()

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def results_of_given_up_work_count(patch: MonkeyPatch) -> None:
    def give_up(seq: Sequence) -> None:
        flying = list(seq.flying)
        original(seq)
        seq.flying.extend(flying)

    original = Sequence.give_up
    patch.setattr(Sequence, "give_up", give_up)


def a_step_follows_the_last_token(patch: MonkeyPatch) -> None:
    def share_of(seq: Sequence, missing: int, budget: int, state: StateManager) -> int:
        size = original(seq, missing, budget, state)
        return min(missing, budget) if size == 0 and seq.start + missing >= seq.request.limit else size

    original = scheduler.share_of
    patch.setattr(scheduler, "share_of", share_of)


def salt_is_not_part_of_the_name(patch: MonkeyPatch) -> None:
    def init(chain: Chain, salt: bytes, block_tokens: int) -> None:
        original(chain, b"", block_tokens)

    original = Chain.__init__
    patch.setattr(Chain, "__init__", init)


def recurrent_state_ignores_accepted_drafts(patch: MonkeyPatch) -> None:
    def commit(manager: StateManager, state: SequenceState, step: int, accepted: int) -> None:
        original(manager, state, step, 0)

    original = StateManager.commit
    patch.setattr(StateManager, "commit", commit)


def drafts_in_flight_get_no_pages(patch: MonkeyPatch) -> None:
    def launch(seq: Sequence, work: Work) -> None:
        original(seq, work)
        seq.drafted = 0

    original = Sequence.launch
    patch.setattr(Sequence, "launch", launch)


def release_keeps_a_page(patch: MonkeyPatch) -> None:
    def release(manager: StateManager, state: SequenceState) -> None:
        if state.tables and state.tables[0]:
            state.tables[0].pop()
        original(manager, state)

    original = StateManager.release
    patch.setattr(StateManager, "release", release)


def waiting_for_memory_never_ends(patch: MonkeyPatch) -> None:
    patch.setattr(Preemption, "coming", lambda *_: True)


def the_last_prompt_token_is_reused(patch: MonkeyPatch) -> None:
    def match(room: AdmissionRoom, seq: Sequence) -> Match:
        return room._state.match(seq.chain, seq.tokens, len(seq.tokens))

    patch.setattr(AdmissionRoom, "match", match)


def drafts_take_the_budget_of_decodes(patch: MonkeyPatch) -> None:
    def serve(sched: Scheduler, seq: Sequence, step: StepBuilder, drafts: int) -> bool:
        step.spare = step.budget - 1
        return original(sched, seq, step, drafts)

    original = Scheduler._serve
    patch.setattr(Scheduler, "_serve", serve)


def a_page_is_named_by_its_own_tokens_only(patch: MonkeyPatch) -> None:
    def extend(chain: Chain, tokens: Any, length: int) -> None:
        root, *_ = chain.names
        chain.names[1:] = []
        while len(chain.names) <= length // chain._block:
            i = len(chain.names) - 1
            alone = Chain(b"", chain._block)
            original(alone, tokens[i * chain._block : (i + 1) * chain._block], chain._block)
            chain.names.append(root + alone.names[1])

    original = Chain.extend
    patch.setattr(Chain, "extend", extend)


def a_parent_starts_behind_the_fork(patch: MonkeyPatch) -> None:
    def match(room: AdmissionRoom, seq: Sequence) -> Match:
        return room._state.match(seq.chain, seq.tokens, len(seq.tokens) - 1 if seq.request.reuse else 0)

    patch.setattr(AdmissionRoom, "match", match)


def batch_work_gives_no_way(patch: MonkeyPatch) -> None:
    def serve(sched: Scheduler, seq: Sequence, step: StepBuilder, drafts: int) -> bool:
        served = original(sched, seq, step, drafts)
        step.prompts = False
        return served

    original = Scheduler._serve
    patch.setattr(Scheduler, "_serve", serve)


def a_prompt_takes_no_time(patch: MonkeyPatch) -> None:
    patch.setattr(Room, "take", lambda room, tokens, scored: None)


def time_is_left_beside_slow_decodes(patch: MonkeyPatch) -> None:
    patch.setattr(Pace, "room", lambda pace, decoding, awaited, shared: Room(pace, pace.bound) if pace.bound else None)


MUTANTS: list[Mutant] = [
    quarantine_is_skipped,
    quarantine_asks_only_the_last_holder,
    pages_are_published_before_they_settle,
    window_forgets_one_page_early,
    fork_shares_the_partial_page,
    sharing_takes_no_reference,
    transfers_pin_nothing,
    a_failed_transfer_is_published,
    a_fetched_prefix_is_used_before_it_arrives,
    a_parked_page_keeps_its_key,
    a_parked_sequence_goes_on_one_token_later,
    preemption_drops_the_last_token,
    results_of_given_up_work_count,
    a_step_follows_the_last_token,
    salt_is_not_part_of_the_name,
    recurrent_state_ignores_accepted_drafts,
    drafts_in_flight_get_no_pages,
    release_keeps_a_page,
    waiting_for_memory_never_ends,
    the_last_prompt_token_is_reused,
    drafts_take_the_budget_of_decodes,
    a_page_is_named_by_its_own_tokens_only,
    a_parent_starts_behind_the_fork,
    batch_work_gives_no_way,
    a_prompt_takes_no_time,
    time_is_left_beside_slow_decodes,
]
