"""The runner that computes: one path for every device, model and strategy. It never names a concrete one of them.

`forward` enqueues the model; `finish` enqueues the choice of tokens, with the grammar masks that depend on the previous
result. Neither waits for the device: `Step.wait` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.strategy import DraftTree, LogitsHead, Sampling, Scores, Strategy, Verdict
from bankfull.errors import ConfigError
from bankfull.layers.batch import Batch
from bankfull.ops import OPERATIONS, move_tokens
from bankfull.ops.registry import BODY, Kit
from bankfull.progress import PROGRESS
from bankfull.runtime.batch import build_batch
from bankfull.runtime.device import Device, Future, commits, spread
from bankfull.runtime.forward import Forward, Model, Replaying, eager_of
from bankfull.runtime.marks import TimeMark
from bankfull.runtime.mover import Mover
from bankfull.runtime.observer import ObservedHead, RunObserver, drafting, observed
from bankfull.runtime.owned import OwnedSteps, RunStep
from bankfull.runtime.proposing import propose
from bankfull.runtime.results import NOTHING_LEFT, Extra, TokenLogprobs, read_tokens
from bankfull.runtime.rows import Rows
from bankfull.runtime.runner import StepFollowers
from bankfull.runtime.shown_drafts import ShownDrafts, read_drafts, shown_drafts
from bankfull.runtime.spread_storage import SpreadStorage, storage_for
from bankfull.sample.logits import NO_TOKEN, Sampled
from bankfull.sample.logprobs import logprobs_of
from bankfull.state.spec import Layout
from bankfull.types import NULL, StepPlan, StepResult, Work

SCORE_BLOCK = 64
"""Prompt positions whose logits are in memory at once while a prompt is scored."""

IDLE_SECONDS = 1e-3
"""The longest time that a step without work waits for transfers: new requests wait as long."""


@dataclass(slots=True)
class Step:
    """A launched step: a future of its result."""

    plan: StepPlan
    runner: DeviceRunner
    hidden: Tensor | None = None
    """Hidden states of the step, from `forward` until `finish` has read them."""
    batch: Batch | None = None
    followed: list[tuple[TimeMark, TimeMark]] = field(default_factory=list)
    """Spans of time in which the strategy's own model ran in `forward`."""
    landed: Future[Landed] | None = None
    """Set by `finish`, or by `forward` where one launch also chooses the tokens."""

    def wait(self) -> StepResult:
        """Block until the step is done; its values on the host, and the transfers that have ended."""
        result, mover = self.values(), self.runner.mover
        if mover is not None:
            if not self.plan.work:
                mover.wait(IDLE_SECONDS)  # the step is there to learn of a transfer's end
            completed, result.failed = mover.ended()
            result.completed += completed
        return result

    def values(self) -> StepResult:
        """The same without transfers between tiers."""
        followers = self.runner.followers
        if followers is not None and not self.runner.chooses and self.plan.work:
            result = followers.outcome()
            self.runner.commit(self, result.tokens)
            followers.settle(result.tokens)
            return result
        assert self.landed is not None, "a step is waited for after `finish`"
        if followers is not None:
            followers.settle([])
        return self.runner.result(self.plan, self.landed.wait())


@dataclass(slots=True)
class Landed:
    """A finished step's results, before they are turned into host values."""

    verdict: Verdict | None = None
    chosen: list[int] | Tensor | None = None
    """Instead of a verdict: one token for each sequence of the step, on the host."""
    scored: dict[int, tuple[int, Tensor, Tensor, Tensor]] = field(default_factory=dict)
    pooled: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    drafts: tuple[list[int], Tensor, Tensor | None] | None = None
    """Rows under a grammar, with tokens and parents of their next drafts."""
    shown: ShownDrafts | None = None
    drafting: list[tuple[TimeMark, TimeMark]] = field(default_factory=list)
    """Spans of time in which the strategy drafted."""


class DeviceRunner:
    def __init__(
        self,
        model: Model,
        layout: Layout,
        device: Device,
        strategy: Strategy,
        *,
        rows: int,
        max_len: int,
        frames: int,
        slots: int,
        kit: Kit | None = None,
        step_tokens: int = 0,
        guesses: int = 0,
        widths: Sequence[int] = (),
    ) -> None:
        """`layout`: of the model's layers and then those of the strategy's own model. `kit`: the kit of the model's
        build; without it, steps are not captured. `step_tokens`: the most tokens of a step; prompts are captured up to
        it. `guesses`: the most drafts of a row that the host finds. `widths`: numbers of drafts whose steps are
        captured."""
        self.model, self.layout, self.device, self.strategy = model, layout, device, strategy
        if strategy.trees and layout.recurrent is not None:
            raise ConfigError(
                "A model with recurrent state verifies chains of draft tokens only: its state after a token depends on "
                "the one token before it. Choose a strategy without trees."
            )
        self.storage = storage_for(model, layout, frames, slots, device.torch)
        self.mover: Mover | None = None
        """Set where there are tiers below the device."""
        spread(self.storage.frames)
        self._commit_frames = commits(self.storage.frames)
        eager = eager_of(model, layout, self.storage.layers, strategy)
        self.run_model: Forward = eager if kit is None else device.capture(eager, kit)
        drafts = max(strategy.width(0), guesses) if strategy.trees else 0
        self.rows = Rows(rows, max_len, layout, model.vocab, device.torch, device.ship, drafts, strategy.mask)
        move = move_tokens.body if kit is None else kit.bind(move_tokens)
        storage = self.storage
        self._move = storage.move if isinstance(storage, SpreadStorage) else partial(move, storage.frames)
        self.rows.sampling.chooser = None if kit is None else device.chooser(kit)
        self.replaying = self.run_model if isinstance(self.run_model, Replaying) else None
        """`run_model` if it replays recorded steps. Checked once, since a protocol check is too slow for every step."""
        if (replaying := self.replaying) is not None:
            captured, chooser = captured_widths(strategy, widths), self.rows.sampling.chooser
            device.launch(lambda: replaying.capture(self.rows, captured, chooser, step_tokens)).wait()
        self._choosing = device.choosing(self.run_model, self.rows)
        kits = [kit, *([] if strategy.own is None else [strategy.own.kit])]
        trusting = any(each is None or _trusts_host(each) for each in kits)
        self._exact = self.rows.host is not None or device.kind == "cpu" or trusting
        """Whether the host must know the number of accepted drafts before the next step, and waits for it."""
        verifies = strategy.exact and layout.recurrent is None and not self._exact
        self._verifying = device.verifying(self.run_model, self.rows, self.storage, move) if verifies else None
        if strategy.own is not None:
            layers, on_tape = len(model.mixers), kit is not None and device.kind == "cpu"
            strategy.attach(OwnedSteps(strategy.own, layout, self.storage, layers, self.rows, device, on_tape))
        self.followers: StepFollowers | None = None
        """The other ranks of the model, if it has any: they run the same steps."""
        self.chooses = True
        """Whether this rank chooses tokens; else it is a stage before the last one, and learns them later."""
        self.entered = [-1] * rows
        """The step in which a row got its sequence."""
        self._demanding: set[int] = set()
        """Rows whose job is not simple (`Rows.is_simple`). Known at launch, while `Rows` changes when the step runs."""
        self.observers: list[RunObserver] = []
        """Called around launched work and the head, for timing; empty unless something is measured."""

    def forward(self, plan: StepPlan) -> Step:
        if self.followers is not None:
            self.followers.forward(plan)
        step = Step(plan, self)
        for enter in plan.enter:
            self.entered[enter.row] = plan.step
            (self._demanding.discard if self.rows.is_simple(enter.payload) else self._demanding.add)(enter.row)
        strategy = self.strategy
        skips = plan.drafted is not None and not any(w.drafts or w.row in plan.drafted for w in plan.work)
        simple = plan.work and (skips or strategy.idle) and self._only_simple(plan.work)
        choosing = self._choosing if simple else None
        if self.mover is not None and plan.transfers:
            self.mover.start([transfer for transfer in plan.transfers if not transfer.in_step])

        def run() -> Landed:
            landed = Landed()
            if plan.transfers:
                self.storage.transfer([transfer for transfer in plan.transfers if transfer.in_step])
            if plan.pages and self._commit_frames is not None:
                self._commit_frames(self.storage.frame(max(max(edit.pages) for edit in plan.pages)))
            self.rows.apply(plan)
            if plan.enter:
                strategy.begin([enter.row for enter in plan.enter])
            if plan.guesses:
                strategy.replace([guess.row for guess in plan.guesses])
            if skips and not strategy.idle:
                strategy.miss(plan.work)
            if choosing is not None:
                slots = () if self.layout.recurrent is None else ([w.slots[0] for w in plan.work],)
                landed.chosen = choosing([w.row for w in plan.work], *slots)
            elif plan.work:
                step.batch, step.hidden = self._run(plan.work)
                if not self.chooses:  # the next chunk of a prompt does not wait for tokens
                    self._advance(step.batch, plan.work, [i for i, w in enumerate(plan.work) if not w.sample], None)
                if strategy.follows and not skips:
                    outputs = step.batch, step.hidden, self.run_model.tapped
                    with self._timed(landed):
                        strategy.follow(RunStep(plan.work, self.rows, self.layout, *outputs))
            step.followed = landed.drafting
            return landed

        future = self._launch(run)
        if choosing is not None or not plan.work:
            step.landed = future
        return step

    def _run(self, work: list[Work]) -> tuple[Batch, Tensor]:
        replayed = None if self.replaying is None else self.replaying.replay(work)
        if replayed is not None:
            return replayed
        batch = build_batch(work, self.rows, self.layout)
        return batch, self.run_model(batch)

    def _only_simple(self, work: list[Work]) -> bool:
        """Whether each sequence of the step wants only its next token, from a simple job."""
        demanding = self._demanding
        return all(w.count == 1 and w.sample and not w.drafts and w.row not in demanding for w in work)

    def finish(self, step: Step, masks: Mapping[int, np.ndarray]) -> None:
        if self.followers is not None:
            self.followers.finish(masks)
        if step.landed is not None or not self.chooses:
            return

        def run() -> Landed:
            landed = Landed(drafting=step.followed)
            assert step.batch is not None and step.hidden is not None
            work = step.plan.work
            if self.rows.with_extras:
                self._prompt_extras(step.batch, step.hidden, work, landed)
            if self.rows.showing:
                landed.shown = shown_drafts(step.batch, work, self.rows)
            landed.verdict = self._verified(work, masks)
            if landed.verdict is None:
                chosen = [i for i, w in enumerate(work) if w.sample]
                if chosen:
                    landed.verdict = self._choose(step.batch, step.hidden, [work[i] for i in chosen], masks)
                self._commit(step.batch, work, chosen, landed.verdict)
            if landed.verdict is not None and not self.strategy.idle:
                with self._timed(landed):
                    propose(self.strategy, self.rows, step.batch, step.hidden, step.plan, landed.verdict)
            landed.drafts = self._constrained_drafts(step.plan)
            self._bring(landed)
            step.batch = step.hidden = None  # the step stays in flight: its activations need not
            return landed

        step.landed = self._launch(run)

    @contextmanager
    def _timed(self, landed: Landed) -> Iterator[None]:
        """Around the work of the strategy, whose share of the step is measured."""
        with drafting(self.observers):
            begun = self.device.mark()
            yield
            landed.drafting.append((begun, self.device.mark()))

    def _launch(self, run: Callable[[], Landed]) -> Future[Landed]:
        return self.device.launch(observed(run, tuple(self.observers)) if self.observers else run)

    @property
    def _head(self) -> LogitsHead:
        return ObservedHead(self.model.head, tuple(self.observers)) if self.observers else self.model.head

    def _there(self, array: np.ndarray) -> Tensor:
        ship = self.device.ship
        return torch.from_numpy(array) if ship is None else ship(array)

    def _choose(self, batch: Batch, hidden: Tensor, work: list[Work], masks: Mapping[int, np.ndarray]) -> Verdict:
        index = batch.logit_index
        widths = [w.lines for w in work]
        lines = [w.row for w in work for _ in range(w.lines)]
        mask = None
        if masks:
            packed = np.full((len(lines), self.rows.sampling.words), -1, np.int32)
            first = 0
            for w, width in zip(work, widths, strict=True):
                if w.row in masks:
                    mask_of = masks[w.row]
                    packed[first : first + width] = mask_of[:width] if np.ndim(mask_of) == 2 else mask_of
                first += width
            mask = self._there(packed)
        rows, tree = self.rows, None
        if rows.trees is not None and max(widths) > 1:
            line, within = rows.index(lines), DraftTree.within(widths, rows.index)
            tree = DraftTree(rows.trees.parents[line, within], batch.tokens[self._there(index)])
        sampling = Sampling(lines, widths, batch.positions, index, rows.tokens, rows.sampling, rows.index, mask, tree)
        # Where every token's logits are wanted, the hidden states are in order already.
        wanted = hidden if len(index) == len(hidden) else hidden[self._there(index)]
        return self.strategy.verify(Scores(wanted, self._head), sampling)

    def _commit(self, batch: Batch, work: list[Work], chosen: list[int], verdict: Verdict | None) -> None:
        """Advance the rows: tokens, lengths, and which recurrent slot holds the state."""
        rows = self.rows
        counts = np.array([w.count - w.redone for w in work], np.int64)
        accepted = None
        if verdict is not None and verdict.counts is not None and not verdict.denoised:
            accepted = verdict.counts - 1
            if len(chosen) < len(work):
                accepted = accepted.new_zeros(len(work)).index_copy_(0, rows.index(chosen), accepted)
        lines = [w.row for w in work]
        if verdict is not None and verdict.path is not None:
            self._move_accepted([work[i] for i in chosen], verdict)
        if accepted is None:
            rows.computed[lines] += counts
        elif self._exact:
            rows.computed[lines] += counts + accepted.cpu().numpy()
        else:
            rows.computed[lines] += counts + np.array([w.drafts for w in work], np.int64)
        rows.advance(lines, counts, accepted)
        if self.layout.recurrent is not None:
            assert batch.write is not None
            kept = batch.write[:, 0] if accepted is None else batch.write.gather(1, accepted[:, None])[:, 0]
            rows.slot.index_copy_(0, rows.index(lines), kept)
        if verdict is not None:
            rows.commit([work[i].row for i in chosen], verdict.tokens, verdict.counts)

    def commit(self, step: Step, tokens: list[list[int]]) -> None:
        """Advance the rows of a step by tokens that another rank has chosen."""
        work, batch = step.plan.work, step.batch
        assert batch is not None, "a step is committed once"
        # A row that another sequence has entered since has nothing to do with these tokens.
        if chosen := [i for i, w in enumerate(work) if w.sample and self.entered[w.row] <= step.plan.step]:
            lines = [tokens[i] for i in chosen]
            widest = max(map(len, lines))
            padded = torch.tensor([[*line, *[NO_TOKEN] * (widest - len(line))] for line in lines])
            counts = torch.tensor([len(line) for line in lines]) if any(w.drafts for w in work) else None
            with torch.inference_mode():
                self._advance(batch, work, chosen, Verdict(padded, counts, Sampled(padded[:, 0])))
        step.batch = step.hidden = None

    def _advance(self, batch: Batch, work: list[Work], which: list[int], verdict: Verdict | None) -> None:
        """`_commit` for some of a step's work."""
        if not which:
            return
        if batch.write is not None and len(which) < len(work):
            batch = replace(batch, write=batch.write[self.rows.index(which)])
        part = [work[i] for i in which]
        self._commit(batch, part, list(range(len(part))) if verdict is not None else [], verdict)

    def _verified(self, work: list[Work], masks: Mapping[int, np.ndarray]) -> Verdict | None:
        """The verdict of a captured verification, which also commits, if the step has one: for rows that all sample,
        from simple jobs."""
        if self._verifying is None or masks or self.observers:
            return None
        if not all(w.sample and w.row not in self._demanding for w in work):
            return None
        verdict = self._verifying(work)
        if verdict is not None:
            self.rows.computed[[w.row for w in work]] += np.array([1 + w.drafts for w in work], np.int64)
        return verdict

    def _constrained_drafts(self, plan: StepPlan) -> tuple[list[int], Tensor, Tensor | None] | None:
        """Rows under a grammar, and what they verify next: also behind a prompt's last token, if only that is left. A
        sample that enters beside its sibling may have no work yet; it verifies what its row's last sequence left."""
        width, rows = self.strategy.width(0), self.rows
        there = {*(work.row for work in plan.work), *(enter.row for enter in plan.enter)}
        if not width or not (constrained := sorted(row for row in there if rows.sampling.facts[row].masked)):
            return None
        index = rows.index(constrained)[:, None]
        places = rows.known[index] + torch.arange(width, device=rows.device)
        tokens = rows.tokens[index, places.clamp_max(rows.tokens.shape[1] - 1)]
        return constrained, tokens, None if rows.trees is None else rows.trees.parents[index[:, 0], 1 : 1 + width] - 1

    def _move_accepted(self, work: list[Work], verdict: Verdict) -> None:
        """Move the state of accepted drafts from their places in the tree to those after the known tokens. Their keys
        were rotated for these positions already."""
        rows, path, counts = self.rows, verdict.path, verdict.counts
        assert path is not None and counts is not None
        place = torch.arange(path.shape[1], device=path.device)
        accepted = place < counts[:, None]
        if rows.host is not None and bool((path == place)[accepted].all()):
            return
        lines = [w.row for w in work]
        # A row with drafts has one known token in the step: line 0 of its tree.
        start = torch.from_numpy(rows.computed[lines]) if rows.host is not None else rows.reached[rows.index(lines)]
        index = rows.index(lines)[:, None]
        for table, size, segments in zip(rows.tables, rows.page_tokens, self.storage.segments, strict=True):
            last = table.shape[1] * size - 1
            source, target = (
                (table[index, at // size] * size + at % size).where(accepted, NULL)[:, 1:]
                for at in ((start[:, None] + node).clamp_max(last) for node in (path, place))
            )
            self._move(segments, size, source, target)

    def _bring(self, landed: Landed) -> None:
        """Start the copies of everything that the host will read."""
        fetch = self.device.fetch
        if landed.verdict is not None:
            verdict, sampled = landed.verdict, landed.verdict.sampled
            landed.verdict = Verdict(
                fetch(verdict.tokens),
                None if verdict.counts is None else fetch(verdict.counts),
                Sampled(
                    sampled.tokens,
                    *(
                        None if part is None else fetch(part)
                        for part in (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
                    ),
                ),
                None
                if verdict.path is None or (sampled.logprobs is None and landed.shown is None)
                else fetch(verdict.path),
                verdict.denoised,
            )
        for i, (at, *columns) in landed.scored.items():
            logprobs, ids, values = (fetch(column) for column in columns)
            landed.scored[i] = (at, logprobs, ids, values)
        for i, (at, vector) in landed.pooled.items():
            landed.pooled[i] = (at, fetch(vector))
        if landed.shown is not None:
            landed.shown = landed.shown.on_host(fetch)
        if landed.drafts is not None:
            lines, tokens, parents = landed.drafts
            landed.drafts = (lines, fetch(tokens), None if parents is None else fetch(parents))

    def _prompt_extras(self, batch: Batch, hidden: Tensor, work: list[Work], landed: Landed) -> None:
        """Prompt logprobs and pooled hidden states, for the rows that want them."""
        for i, w in enumerate(work):
            job = self.rows.job(w.row)
            start, prompt_len = int(self.rows.computed[w.row]), int(self.rows.prompt_len[w.row])
            first = int(batch.q_start[i])
            last = first + min(w.count, prompt_len - start)
            if job.pool == "mean" and last > first:
                landed.pooled[i] = (start, hidden[first:last].to(torch.float64).sum(0))
            elif job.pool == "last" and start + w.count >= prompt_len:
                landed.pooled[i] = (prompt_len - 1, hidden[last - 1].clone())
            elif job.params.prompt_logprobs is not None:
                last = min(last, first + prompt_len - 1 - start)
                if last > first:
                    targets = self.rows.tokens[w.row, start + 1 : start + 1 + last - first]
                    parts, head = [], self._head
                    blocks = hidden[first:last].split(SCORE_BLOCK), targets.split(SCORE_BLOCK)
                    for states, tokens in zip(*blocks, strict=True):
                        parts.append(logprobs_of(head(states), tokens, job.params.prompt_logprobs))
                        PROGRESS.tick()
                    logprobs, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
                    landed.scored[i] = (start + 1, logprobs, ids, values)

    def _forget_rejected(self, plan: StepPlan, counts: list[int]) -> None:
        """Subtract rejected drafts, which the host has counted as computed. A row with a newer sequence was reset when
        that entered."""
        held = dict(zip((i for i, w in enumerate(plan.work) if w.sample), counts, strict=True))
        for i, w in enumerate(plan.work):
            if self.entered[w.row] <= plan.step:
                self.rows.computed[w.row] -= w.drafts + 1 - held.get(i, 1)

    def result(self, plan: StepPlan, landed: Landed) -> StepResult:
        """The host's values of a step that is done."""
        count = len(plan.work)
        result = StepResult(plan.step, [[] for _ in range(count)], [None] * count)
        result.completed = self.device.completed([t.id for t in plan.transfers if t.in_step])
        result.drafting = sum(begun.until(ended) for begun, ended in landed.drafting)
        if landed.chosen is not None:
            chosen = landed.chosen if isinstance(landed.chosen, list) else landed.chosen.tolist()
            result.tokens = [[token] for token in chosen]
            if NO_TOKEN in chosen:
                result.errors = {i: NOTHING_LEFT for i, token in enumerate(chosen) if token == NO_TOKEN}
            return result
        if landed.verdict is not None:
            read_tokens(plan.work, landed.verdict, result)
            if landed.verdict.counts is not None and not landed.verdict.denoised and not self._exact:
                self._forget_rejected(plan, landed.verdict.counts.tolist())
            if landed.shown is not None and landed.verdict.counts is not None:
                path = None if landed.verdict.path is None else landed.verdict.path.tolist()
                for i, one in read_drafts(landed.shown, plan.work, landed.verdict.counts.tolist(), path).items():
                    extra = result.extras[i] = result.extras[i] or Extra()
                    extra.drafts = one
        for i, (first, logprobs, ids, values) in landed.scored.items():
            extra = result.extras[i] = result.extras[i] or Extra()
            lines = zip(logprobs.tolist(), ids.tolist(), values.tolist(), strict=True)
            extra.prompt = {first + j: TokenLogprobs(o, tuple(t), tuple(v)) for j, (o, t, v) in enumerate(lines)}
        for i, (at, vector) in landed.pooled.items():
            result.extras[i] = Extra(pooled=(at, vector))
        if landed.drafts is not None:
            constrained, drafted, above = landed.drafts
            chain = list(range(-1, drafted.shape[1] - 1))
            parents = [chain] * len(constrained) if above is None else above.tolist()
            result.drafts = dict(zip(constrained, zip(drafted.tolist(), parents, strict=True), strict=True))
        return result


def captured_widths(strategy: Strategy, widths: Sequence[int] = ()) -> list[int]:
    """Tokens per sequence of the captured steps: one, one with the strategy's drafts, and with the `widths`."""
    return sorted({1, *(1 + width for width in (strategy.width(0), *widths))})


def _trusts_host(kit: Kit) -> bool:
    """Whether any operation that reads lengths, which are in its `meta`, takes the host's. All torch bodies do."""
    bodies = (one.body for one in OPERATIONS.values() if one.label in kit.chosen and kit.chosen[one.label][BODY])
    return any("meta" in signature(body).parameters for body in bodies)
