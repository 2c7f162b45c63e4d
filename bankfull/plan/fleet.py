"""A fleet of replicas over a day: a discrete-event simulation with the server's routing, the engine's scheduler and the
cluster's autoscaler.

The events are arrivals, ends of steps, replicas that start, fail, drain or restart, and looks of the autoscaler. A
request whose replica ends continues on another one with its tokens, as in the server: prompt and tokens so far are
computed again there. Everything follows from the seed.
"""

from __future__ import annotations

import gc
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from random import Random

from bankfull.fleet.attainment import SloMeter
from bankfull.fleet.autoscale import LOOK_SECONDS, Autoscaler, Demand
from bankfull.fleet.failures import PATIENCE, PROBE_SECONDS, QUIET_SECONDS
from bankfull.fleet.prefixes import MOST_KEYS
from bankfull.plan.day import Day
from bankfull.plan.day_content import FIRST_OWN, Content, PartChain
from bankfull.plan.decode_times import DecodeTimes, Floats
from bankfull.plan.engine import NO_STEPS
from bankfull.plan.fake_runner import Clock
from bankfull.plan.fleet_front import FleetFront, FleetStep, facts_of
from bankfull.plan.fleet_ledger import FleetLedger
from bankfull.plan.fleet_options import FleetOptions
from bankfull.plan.fleet_replica import FleetReplica
from bankfull.plan.fleet_requests import FleetConversation, FleetMember, FleetRequest
from bankfull.plan.simulate import ReplicaSpec
from bankfull.state.prefix import Chain
from bankfull.types import Request

ADVANCE_EVERY = 256
"""Requests between two calls of `advance`."""
COLLECT_EVERY = 200_000
"""New objects between two searches for reference cycles."""
RETIRE_SECONDS = 10.0
"""Time from the end of a conversation until its keys are released."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Millions of objects live for the whole day: searching them for cycles after a few hundred new ones is in vain."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class FleetSimulation:
    def __init__(
        self,
        spec: ReplicaSpec,
        day: Day,
        options: FleetOptions,
        advance: Callable[[int, str], None] = lambda done, note: None,
    ) -> None:
        self.options, self.day, self._spec, self._advance = options, day, spec, advance
        self._times = DecodeTimes(spec.times)
        self._frames = spec.sizes.frames
        queue = spec.sizes.rows if spec.queue is None else spec.queue
        facts = facts_of(spec.layout, spec.sizes.rows, self._frames, spec.sched.step_tokens)
        self._clock = Clock()
        self.front = FleetFront(facts, options.replicas.most, options.routing, queue, self._clock, options.seed)
        self.ledger = FleetLedger(day.requests, day.seconds)
        self.members = [FleetMember(number) for number in range(options.replicas.most)]
        self.active: dict[int, FleetRequest] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._numbers, self._own_parts = count(1), count(FIRST_OWN)
        self._retires = not options.stepped and self._frames <= MOST_KEYS
        """Whether the keys of conversations that have ended are released. The router then knows fewer keys, which has
        an effect only where it knows as many as it can."""
        self._homeless: deque[int] = deque()
        self._coming = day.conversations()
        self._arriving = 0
        """Turns that are scheduled and have not arrived."""
        self._exhausted = False
        self._random = Random(options.seed)
        self._autoscaler = Autoscaler()
        follows = options.replicas.scales and options.slo.stated
        self._slo = SloMeter(options.slo, self._clock) if follows else None
        self._update: deque[int] = deque()
        self.computed_tokens = self.most_rows = self.preemptions = 0
        """Figures of replicas that have ended; `_settle_all` adds the others."""

    # -- the run

    def run(self) -> FleetLedger:
        with rare_collections():
            self._run()
        return self.ledger

    def _run(self) -> None:
        for member in self.members[: self.options.replicas.least]:
            self._begin(member, 0.0, 0.0)
        self._next_conversation()
        self._next_failure(0.0)
        if self.options.replicas.scales:
            self._at(LOOK_SECONDS, self._look)
        if self.options.update_at is not None:
            self._at(self.options.update_at * self.day.seconds, self._begin_update)
        while self._events and (self.active or self._arriving or not self._exhausted):
            now, _, event = heapq.heappop(self._events)
            self._clock.now = now
            event(now)
        for number in list(self._homeless):
            self._lose(self.active.pop(number))
        self._advance(next(self._numbers) - 1, f"{self.front.ready} replicas ready")
        self._settle_all()

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _settle_all(self) -> None:
        for member in self.members:
            if member.replica is not None:
                member.replica.check()
                self._count(member.replica)
        self.ledger.close(self._clock.now)

    def _count(self, replica: FleetReplica) -> None:
        self.computed_tokens += replica.computed_tokens
        self.most_rows = max(self.most_rows, replica.most_rows)
        self.preemptions += replica.scheduler.preemptions

    # -- requests

    def _next_conversation(self) -> None:
        conversation = next(self._coming, None)
        if conversation is None:
            self._exhausted = True
            return
        self._arriving += 1

        def arrive(now: float) -> None:
            self._next_conversation()
            content = Content(conversation.opening, next(self._own_parts))
            self._arrive(FleetConversation(conversation, content, self._chain(content), length=content.shared), now)

        self._at(conversation.begins, arrive)

    def _chain(self, content: Content) -> Chain:
        block = self._spec.layout.block_tokens
        return Chain(b"", block) if self.options.stepped else PartChain(content, block)

    def _arrive(self, talk: FleetConversation, now: float) -> None:
        self._arriving -= 1
        part = talk.planned.turns[talk.turn]
        prompt = talk.length + part.new
        if prompt + part.output > self.day.context:  # a conversation that has become too long starts again
            self._retire_later(talk, now)
            whole = Content(talk.planned.opening, 0)
            prompt = min(whole.shared + part.new, self.day.context - part.output)
            talk.content = whole.cut(prompt, next(self._own_parts))
            talk.chain = self._chain(talk.content)
        number = next(self._numbers)
        request = FleetRequest(number, talk, prompt, part.output, now)
        if self._slo is not None:
            request.goals = self._slo.begin(now)
        if not self._send(request, now):
            self.ledger.refuse(now)
            self._leave(request, now)
        if number % ADVANCE_EVERY == 0:
            self._advance(number, f"{self.front.ready} replicas ready, {len(self.active)} requests under way")

    def _send(self, request: FleetRequest, now: float) -> bool:
        resumed = request.homeless is not None
        talk = request.conversation
        # Only hashes read tokens, and names of parts replace them.
        known = request.prompt + request.generated
        tokens = tuple(talk.content.tokens(known)) if self.options.stepped else (0,) * known
        prompt = tokens[: request.prompt]
        routed = self.front.route(request.number, prompt, request.generated, resumed, talk.chain)
        if routed is None:
            return False
        request.replica, held = routed
        self.active[request.number] = request
        member = self.members[request.replica]
        member.requests.add(request.number)
        talk.visited.add(request.replica)
        generated: tuple[tuple[int, ...], ...] = ()
        if resumed:
            self.ledger.resume(known - held)
            request.homeless = None
            if request.generated:
                generated = (tokens[request.prompt :],)
        sent = Request(request.number, prompt, request.prompt + request.output, generated=generated)
        member.inbox.append((sent, talk))
        if member.replica is None:
            return True  # its machine is gone, and the front does not know yet
        ends = member.ends
        if member.step is None and not len(ends):
            self._next_step(member, now)
        elif len(ends) and (at := int(ends.searchsorted(now))) < len(ends) - 1:
            member.ends = ends[: at + 1]
            self._wake_at(member, float(ends[at]))
        return True

    def _end(self, request: FleetRequest, now: float) -> None:
        del self.active[request.number]
        self.members[request.replica].requests.discard(request.number)
        self.ledger.end(request, now)
        if request.goals is not None:
            request.goals.tokens_until(request.newest, request.gap)
            request.goals.end(now, request.output, 1)
        self._continue(request, now)

    def _leave(self, request: FleetRequest, now: float) -> None:
        """The request has ended without its answer, so that no objective judges it."""
        if request.goals is not None:
            request.goals.leave()
        self._continue(request, now)

    def _continue(self, request: FleetRequest, now: float) -> None:
        """The next turn of the conversation."""
        talk = request.conversation
        talk.length = request.prompt + request.output
        talk.turn += 1
        if talk.turn == len(talk.planned.turns):
            self._retire_later(talk, now)
            return
        self._arriving += 1
        self._at(now + talk.planned.turns[talk.turn].pause, lambda later: self._arrive(talk, later))

    def _retire_later(self, talk: FleetConversation, now: float) -> None:
        """No request will look for the conversation's own blocks again: their keys need no memory. Replicas have
        reported them by then."""
        if not self._retires:
            return
        chain, visited = talk.chain, talk.visited
        talk.visited = set()

        def retire(later: float) -> None:
            assert isinstance(chain, PartChain)
            names = chain.own_names()
            for number in visited:
                replica = self.members[number].replica
                if replica is not None and names:
                    self.front.retire(number, replica.retire(names))

        self._at(now + RETIRE_SECONDS, retire)

    # -- steps

    def _wake_at(self, member: FleetMember, time: float) -> None:
        member.life += 1
        life = member.life

        def wake(now: float) -> None:
            if member.life == life:
                self._wake(member, now)

        self._at(time, wake)

    def _wake(self, member: FleetMember, now: float) -> None:
        assert member.replica is not None
        step, member.step = member.step, None
        if len(member.ends):
            step = self._take_stride(member, member.ends)
            member.ends = NO_STEPS
        if step is not None:
            self.front.receive(member.number, step)
            for output in step.outputs:
                request = self.active[output.request]  # type: ignore[index]
                if output.tokens:
                    request.receive(now, output.cached)
                if output.finish is not None:
                    self._end(request, now)
        if member.replica is None or (member.draining and not member.requests):
            self._drained(member, now)
            return
        self._next_step(member, now)

    def _take_stride(self, member: FleetMember, ends: Floats) -> FleetStep | None:
        """Take the plain steps that end at these times: each running request receives a token with each of them."""
        assert member.replica is not None
        first, last = float(ends[0]), float(ends[-1])
        longest = float((ends[1:] - ends[:-1]).max()) if len(ends) > 1 else 0.0
        for number in member.replica.running():
            request = self.active[number]  # type: ignore[index]
            request.gap = max(request.gap, first - request.newest, longest)
            request.newest = last
        return member.replica.take_steps(ends)

    def _next_step(self, member: FleetMember, now: float) -> None:
        replica = member.replica
        assert replica is not None
        replica.clock.now = now
        while member.inbox:
            sent, talk = member.inbox.popleft()
            replica.add(sent, talk.content, talk.chain)
        if not replica.busy:
            return
        member.ends = replica.next_ends()
        if len(member.ends):
            self._wake_at(member, float(member.ends[-1]))
        else:
            member.step = replica.step(now)
            self._wake_at(member, replica.clock.now)

    # -- replicas

    def _begin(self, member: FleetMember, now: float, seconds: float) -> None:
        """Start a replica, which is ready after these seconds."""
        member.life += 1
        life = member.life
        if not member.wanted:
            member.wanted = True
            self.ledger.paid(now, 1)

        def ready(later: float) -> None:
            if member.life != life:
                return
            member.replica = FleetReplica(self._spec, self._times, self._frames, self.options.stepped)
            self.front.starts(member.number)
            self.ledger.ready(later, self.front.ready)
            for number in [*self._homeless]:
                self._homeless.remove(number)
                self._go_on(self.active[number], later)

        if seconds:
            self._at(now + seconds, ready)
        else:
            ready(now)

    def _stop(self, member: FleetMember, now: float) -> list[FleetRequest]:
        """End a replica at once. Its requests, with the tokens that the front has received."""
        replica = member.replica
        assert replica is not None
        ended = int(member.ends.searchsorted(now, side="right"))
        if ended and (steps := min(ended, replica.steps_before_end())):
            self._take_stride(member, member.ends[:steps])
        progress = replica.progress()
        if member.step is not None:
            replica.computed_tokens -= replica.step_tokens  # the step does not finish
        for output in member.step.outputs if member.step is not None else ():
            number = output.request
            request = self.active[number]  # type: ignore[index]
            progress[number] = (progress[number] if output.finish is None else request.output) - len(output.tokens)
        left = [self.active[number] for number in sorted(member.requests)]
        for request in left:
            request.generated = progress.get(request.number, request.generated)
        self._count(replica)
        member.replica, member.step, member.ends = None, None, NO_STEPS
        member.life += 1
        return left

    def _move(self, member: FleetMember, left: list[FleetRequest], now: float) -> None:
        """The front notices the end of a replica: its requests go on elsewhere."""
        self.front.lose(member.number)
        self.ledger.ready(now, self.front.ready)
        member.inbox.clear()
        for number in sorted(member.requests):
            self.front.left(member.number, number)
        member.requests.clear()
        for request in left:
            request.homeless = now
            self._go_on(request, now)

    def _go_on(self, request: FleetRequest, now: float) -> None:
        assert request.homeless is not None
        if now - request.homeless > PATIENCE:
            del self.active[request.number]
            self._lose(request)
        elif not self._send(request, now):
            self._homeless.append(request.number)

    def _lose(self, request: FleetRequest) -> None:
        self.ledger.lost += 1
        self._leave(request, self._clock.now)

    # -- failures

    def _next_failure(self, now: float) -> None:
        mean = self.options.mtbf_hours
        if mean is None:
            return
        # Hours of the day: a compressed day has as many failures as a whole one.
        each = mean / 24 * self.day.seconds
        later = now + self._random.expovariate(len(self.members) / each)
        if later < self.day.seconds:
            self._at(later, self._fail)

    def _fail(self, now: float) -> None:
        self._next_failure(now)
        victim = self._random.randrange(len(self.members))
        size = self.options.node_size
        whole = self._random.random() < self.options.node_failures
        numbers = range(victim // size * size, victim // size * size + size) if whole else (victim,)
        hit = [self.members[n] for n in numbers if n < len(self.members) and self.members[n].replica is not None]
        if not hit:
            return
        self.ledger.failures.append(now)
        for member in hit:
            self.ledger.failed += 1
            self._stop(member, now)
            if whole:  # the end of a process is noticed at once
                self._at(now + QUIET_SECONDS + PROBE_SECONDS, lambda later, member=member: self._notice(member, later))  # type: ignore[misc]
            else:
                self._notice(member, now)

    def _notice(self, member: FleetMember, now: float) -> None:
        self._move(member, [self.active[number] for number in sorted(member.requests)], now)
        self._go_without(member, now)

    def _go_without(self, member: FleetMember, now: float) -> None:
        """A replica has ended: its place starts again, or is not paid for any more."""
        restarts = member.restarts or not member.draining
        member.draining = member.restarts = False
        if restarts:
            self._begin(member, now, self.options.start_seconds)
        else:
            member.wanted = False
            self.ledger.paid(now, -1)

    # -- drains, updates and scaling

    def _drain(self, member: FleetMember, now: float, restarts: bool) -> None:
        member.draining, member.restarts = True, restarts
        self.front.admit(member.number, False)
        self.ledger.ready(now, self.front.ready)
        if not member.requests:
            self._drained(member, now)
            return
        replica = member.replica

        def end_of_grace(later: float) -> None:
            if member.draining and member.replica is replica is not None:
                self._drained(member, later)

        self._at(now + self.options.grace, end_of_grace)

    def _drained(self, member: FleetMember, now: float) -> None:
        if member.replica is not None:
            self._move(member, self._stop(member, now), now)
            self._go_without(member, now)

    def _begin_update(self, now: float) -> None:
        self.ledger.updates.append(now)
        self._update.extend(member.number for member in self.members if member.wanted)
        self._continue_update(now)

    def _continue_update(self, now: float) -> None:
        """Restart a few replicas at a time: another one begins as soon as one is ready again."""
        at_once = max(1, int(self.options.update_share * self.options.replicas.most))
        under_way = sum(member.draining or (member.wanted and member.replica is None) for member in self.members)
        while self._update and under_way < at_once:
            member = self.members[self._update.popleft()]
            if member.wanted and not member.draining and member.replica is not None:
                self.ledger.updated += 1
                self._drain(member, now, True)
                under_way += 1
        if self._update:
            self._at(now + LOOK_SECONDS, self._continue_update)
        else:
            self.ledger.updates.append(now)

    def _look(self, now: float) -> None:
        self._at(now + LOOK_SECONDS, self._look)
        paid = [member for member in self.members if member.wanted]
        settled = all(member.replica is not None and not member.draining for member in paid)
        rows = self._spec.sizes.rows * self.front.ready
        judged, missed = (0, 0) if self._slo is None else self._slo.take()
        demand = Demand(self.front.running, self.front.waiting, rows, settled, judged, missed)
        wanted = self._autoscaler.decide(self.options.replicas, len(paid), demand)
        if wanted > len(paid):
            for member in [m for m in self.members if not m.wanted][: wanted - len(paid)]:
                self._begin(member, now, self.options.start_seconds)
        elif wanted < len(paid):
            able = [member for member in paid if member.replica is not None and not member.draining]
            for member in sorted(able, key=lambda one: len(one.requests))[: len(paid) - wanted]:
                self._drain(member, now, False)
