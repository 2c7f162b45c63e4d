"""Simulated pins: prefixes that requests want to keep, among preemption, aborts, late tiers and little memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from tests.sim.promises import SimulationError, demand
from tests.sim.scenario import Scenario, scenario_of, tiered_of
from tests.sim.world import World


def pinned_of(seed: int) -> Scenario:
    """The scenario of `seed`, or one with tiers, in which many requests keep prefixes of their prompts."""
    random = Random(seed + 10)
    base = tiered_of(seed) if random.random() < 0.4 else scenario_of(seed, mixed=random.random() < 0.3)
    for arrival in base.arrivals:
        request = arrival.request
        if random.random() < 0.6:
            ends = sorted(random.randint(1, len(request.prompt)) for _ in range(random.randint(1, 4)))
            request.keeps = tuple((end, random.choice((1.0, 10.0, 100.0))) for end in ends)
    share = random.choice((0.0, 0.2, 0.5, 0.5, 1.0))
    return replace(base, state=replace(base.state, pin_share=share))


class PinnedWorld(World):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.seen: Counter[str] = Counter()

    def _check(self) -> None:
        super()._check()
        pins = self.state.pins
        fails = self.scenario.tiers is not None and self.scenario.tiers.fails > 0
        needed: Counter[object] = Counter()
        for pin in pins.all.values():
            needed.update(pin.keys)
        demand({key: held.pins for key, held in pins._held.items()} == needed, "pins and what they hold differ")
        for key, held in pins._held.items():
            demand(fails or held.pool.find(key) == held.place, f"pinned content was lost: {key}")
            self.seen["below"] += held.pool not in (self.state.pages, self.state.slots)
        limits = pins._limits()
        for number, limit in enumerate(limits):
            total = sum(holding.use()[number] for holding in pins._holdings.values())
            demand(total <= limit, f"pins hold {total} of at most {limit}")
        self.seen["pinned"] += len(pins.all)

    def _check_end(self) -> None:
        pins = self.state.pins
        for request in self.requests.values():
            demand(sum(request.kept) <= len(request.prompt), f"{request.kept} are more than the prompt")
        self.clock = max((pin.ends for pin in pins.all.values()), default=self.clock)
        self.seen["expired"] += len(pins.all)
        pins.advance()
        demand(not pins.all and not pins._held and not pins._holdings and not pins._named, "a pin never ends")
        self.seen["given_up"] += pins.counts.given_up
        self.seen["over_quota"] += pins.counts.over_quota
        super()._check_end()


def simulate_pins(seed: int) -> Counter[str]:
    world = PinnedWorld(pinned_of(seed))
    try:
        world.run()
    except Exception as problem:
        raise SimulationError(f"seed {seed}: {problem!r}; replay it with simulate_pins({seed})") from problem
    return world.seen
