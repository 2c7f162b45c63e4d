"""Defects to plant, one line each, all over the engine: the trial must find them. Those of the scheduler and of the
state come from the simulator's list; here they have to show in what a user gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pytest import MonkeyPatch

import bankfull.decode.verify as verifying
import bankfull.frontend as frontend
import bankfull.sample.adjust as adjusting
import bankfull.sample.logits as choosing
from bankfull.engine import Engine
from bankfull.frontend import Frontend
from bankfull.runtime.mover import HostPlaces
from bankfull.runtime.twins import Twins
from bankfull.sample.grammar import DraftTokens, Matcher
from bankfull.sample.table import CHILD, PROMPT_LEN, STOP_FROM, TOP_K, TOP_P, SamplingTable
from bankfull.sched.scheduler import Scheduler
from bankfull.state.manager import StateManager
from bankfull.text.detokenize import Detokenizer
from bankfull.text.stop import StopText
from tests.sim import mutants

Defect = Callable[[MonkeyPatch], None]


def a_draft_after_a_complete_grammar_is_forbidden(patch: MonkeyPatch) -> None:
    """All ones after the completing draft, zeros for the drafts after that one: no token was left to choose from."""

    def masks_along(matcher: Matcher, drafts: DraftTokens) -> Any:
        masks = np.zeros((1 + len(drafts.tokens), (matcher._vocab + 31) // 32), np.int32)
        masks[0] = matcher.mask()
        followers: dict[int, Matcher] = {0: matcher.copy()}
        for draft, (token, parent) in enumerate(zip(drafts.tokens, drafts.parents, strict=True)):
            line = parent + 1
            if line not in followers or not masks[line, token // 32] >> token % 32 & 1:
                continue
            follower = followers[line].copy()
            follower.advance(token)
            if follower.finished:
                masks[draft + 1] = -1
            else:
                masks[draft + 1], followers[draft + 1] = follower.mask(), follower
        return masks

    def settle(sched: Scheduler, plan: Any, result: Any) -> Any:
        """A row without a token has failed, also behind the end of its grammar."""
        tokens = [[] if i in result.errors else found for i, found in enumerate(result.tokens)]
        return original(sched, plan, replace(result, tokens=tokens) if result.errors else result)

    original = Scheduler.settle
    patch.setattr(Scheduler, "settle", settle)
    patch.setattr(Matcher, "masks_along", masks_along)


def samples_share_a_grammar(patch: MonkeyPatch) -> None:
    def add(engine: Engine[Any], request: Any, matchers: Sequence[Matcher] = ()) -> None:
        original(engine, request, [matchers[0]] * len(matchers) if matchers else ())

    original = Engine.add
    patch.setattr(Engine, "add", add)


def one_draft_too_many_is_accepted(patch: MonkeyPatch) -> None:
    """The last draft of a chain counts without being compared."""

    def verify_lines(scores: Any, sampling: Any) -> Any:
        found = original(scores, sampling)
        if sampling.tree is None and len(found.tokens) > len(sampling.widths):
            last = len(found.tokens) - 2
            found.tokens[last] = sampling.tokens[sampling.rows[last], sampling.length[last]]
        return found

    original = verifying.sample_lines
    patch.setattr(verifying, "sample_lines", verify_lines)


def a_tree_accepts_the_wrong_branch(patch: MonkeyPatch) -> None:
    """The accepted lines of a tree are taken to be the first ones."""

    def accepted_path(chosen: Any, *rest: Any) -> Any:
        path, counts = original(chosen, *rest)
        return torch.arange(path.shape[1], device=path.device).expand_as(path), counts

    original = verifying.accepted_path
    patch.setattr(verifying, "accepted_path", accepted_path)


def prompts_count_for_the_frequency_penalty(patch: MonkeyPatch) -> None:
    _after_set(patch, lambda table, row: table.wholes[row].__setitem__(PROMPT_LEN, 0))


def samples_share_their_numbers(patch: MonkeyPatch) -> None:
    _after_set(patch, lambda table, row: table.wholes[row].__setitem__(CHILD, 0))


def top_k_keeps_one_token_less(patch: MonkeyPatch) -> None:
    def change(table: SamplingTable, row: int) -> None:
        kept = table.wholes[row, TOP_K]
        kept -= int(1 < kept < table.vocab)

    _after_set(patch, change)


def min_tokens_ends_one_token_early(patch: MonkeyPatch) -> None:
    _after_set(patch, lambda table, row: table.wholes[row, STOP_FROM].sub_(1))


def _after_set(patch: MonkeyPatch, change: Callable[[SamplingTable, int], Any]) -> None:
    def setting(table: SamplingTable, enters: Sequence[Any]) -> None:
        original(table, enters)
        for enter in enters:
            change(table, enter.row)

    original = SamplingTable.set
    patch.setattr(SamplingTable, "set", setting)


def top_p_stops_a_little_early(patch: MonkeyPatch) -> None:
    def change(table: SamplingTable, row: int) -> None:
        table.reals[row, TOP_P] *= 1.0 if table.reals[row, TOP_P] == 1.0 else 0.9

    _after_set(patch, change)


def biases_are_lost_beside_other_rows(patch: MonkeyPatch) -> None:
    def adjust(scores: Any, rows: Any, table: Any, tokens: Any, length: Any, mask: Any, facts: Any, *more: Any) -> Any:
        if len(facts) > 1:
            facts = [replace(fact, biased=False) for fact in facts]
        return original(scores, rows, table, tokens, length, mask, facts, *more)

    original = adjusting.adjust
    patch.setattr(choosing, "adjust", adjust)


def bad_words_of_several_tokens_are_allowed(patch: MonkeyPatch) -> None:
    def ban(scores: Any, tokens: Any, owners: Any, length: Any, words: Any) -> Any:
        single = (
            (words[:, :, :-1] < 0).all(-1) if words.shape[-1] > 1 else torch.ones(words.shape[:2], dtype=torch.bool)
        )
        return original(scores, tokens, owners, length, words.masked_fill(~single.to(words.device)[..., None], -1))

    original = adjusting._ban_bad_words
    patch.setattr(adjusting, "_ban_bad_words", ban)


def logprobs_are_of_the_line_before(patch: MonkeyPatch) -> None:
    def with_logprobs(picked: Any, logits: Any, *rest: Any) -> Any:
        return original(picked, logits.roll(1, 0) if len(logits) > 1 else logits, *rest)

    original = choosing._with_logprobs
    patch.setattr(choosing, "_with_logprobs", with_logprobs)


def a_stop_string_is_cut_at_a_piece(patch: MonkeyPatch) -> None:
    def push(stop: StopText, text: str) -> str:
        stop._state = 0
        found = original(stop, text)
        return found + stop.finish() if stop.stopped is None else found

    original = StopText.push
    patch.setattr(StopText, "push", push)


def characters_are_cut_at_a_piece(patch: MonkeyPatch) -> None:
    def push(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
        return original(detokenizer, ids) + detokenizer.finish()

    original = Detokenizer.push
    patch.setattr(Detokenizer, "push", push)


def a_resumed_request_counts_its_tokens_twice(patch: MonkeyPatch) -> None:
    def replay(front: Frontend, pending: Any, number: int) -> None:
        original(front, pending, number)
        pending.result.metrics.output_tokens += len(pending.request.generated[number])

    original = Frontend._replay
    patch.setattr(Frontend, "_replay", replay)


def an_aborted_request_keeps_a_page(patch: MonkeyPatch) -> None:
    def abort(sched: Scheduler, request: Any, *rest: Any) -> Any:
        for seq in sched._by_request.get(request, ()):
            if (
                seq.state is not None
                and seq.state.tables
                and seq.state.tables[0]
                and seq.state.tables[0][0] is not None
            ):
                sched.state.pages.share(seq.state.tables[0][0])
        return original(sched, request, *rest)

    original = Scheduler.abort
    patch.setattr(Scheduler, "abort", abort)


def prompt_logprobs_take_cached_pages(patch: MonkeyPatch) -> None:
    original = frontend.Request
    patch.setattr(frontend, "Request", lambda *a, **k: original(*a, **{**k, "reuse": True}))


def a_swap_restores_the_next_page(patch: MonkeyPatch) -> None:
    def page(places: HostPlaces, place: int) -> Any:
        chunk, within = divmod(place - 1, places._per_chunk)
        asked[0] += 1
        return places._pages[chunk][max(0, within - asked[0] % 2)]

    asked = [0]
    patch.setattr(HostPlaces, "page", page)


def state_of_old_weights_is_found(patch: MonkeyPatch) -> None:
    patch.setattr(StateManager, "begin_generation", lambda state, weights: None)


def some_tensors_keep_their_old_numbers(patch: MonkeyPatch) -> None:
    def commit(twins: Twins) -> None:
        original(replace(twins, tensors=twins.tensors[::2] + twins.tensors[3::2]))

    original = Twins.commit
    patch.setattr(Twins, "commit", commit)


DEFECTS: tuple[Defect, ...] = (
    a_draft_after_a_complete_grammar_is_forbidden,
    samples_share_a_grammar,
    one_draft_too_many_is_accepted,
    a_tree_accepts_the_wrong_branch,
    prompts_count_for_the_frequency_penalty,
    samples_share_their_numbers,
    top_k_keeps_one_token_less,
    top_p_stops_a_little_early,
    min_tokens_ends_one_token_early,
    biases_are_lost_beside_other_rows,
    bad_words_of_several_tokens_are_allowed,
    logprobs_are_of_the_line_before,
    a_stop_string_is_cut_at_a_piece,
    characters_are_cut_at_a_piece,
    a_resumed_request_counts_its_tokens_twice,
    an_aborted_request_keeps_a_page,
    prompt_logprobs_take_cached_pages,
    a_swap_restores_the_next_page,
    state_of_old_weights_is_found,
    some_tensors_keep_their_old_numbers,
    mutants.quarantine_is_skipped,
    mutants.window_forgets_one_page_early,
    mutants.fork_shares_the_partial_page,
    mutants.a_parked_sequence_goes_on_one_token_later,
    mutants.preemption_drops_the_last_token,
    mutants.results_of_given_up_work_count,
    mutants.salt_is_not_part_of_the_name,
    mutants.recurrent_state_ignores_accepted_drafts,
)
MOST_CASES = 2000
"""Cases within which a defect has to show."""
LEAST_FOUND = 26
"""Of the defects above."""
GRAMMAR_CASES = 300
"""Cases within which the first one has to show."""


def cases_until_found(defect: Defect, first: int, most: int = MOST_CASES) -> tuple[int, str] | None:
    """How many cases it took, and what was seen."""
    from tests.trial.drawing import draw
    from tests.trial.trial import run_case

    for count, number in enumerate(range(first, first + most), 1):
        case = draw(number)
        with MonkeyPatch.context() as patch:
            defect(patch)
            report = run_case(case)
        if report.problems:
            return count, report.problems[0]
    return None
