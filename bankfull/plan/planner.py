"""From a model, traffic and objectives to the Pareto front of configurations and a recommendation.

Every storage of the model on every device is first simulated with the engine's default settings, with the number of
replicas that the roofline suggests and a few more. The Pareto front of these is tried with other rows and step token
budgets; the front of all is simulated again over a longer trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from bankfull.bench.load.sweep import Search
from bankfull.config import SchedConfig
from bankfull.errors import ConfigError
from bankfull.limits.machine.ceilings import better
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.recipe import Recipe, recipe_of
from bankfull.models.registry import Config
from bankfull.plan.calibrate import Calibration, calibration, step_times
from bankfull.plan.configurations import (
    SERVED,
    Configuration,
    PreparedModel,
    Stored,
    grid,
    joined,
    meshes,
    prepare,
    recipe_for,
    separated,
    ways_to_store,
)
from bankfull.plan.efficiency import assumed
from bankfull.plan.losses import Losses, StoredLoss
from bankfull.plan.outcome import PILING, Objectives, SimulatedOutcome, bottlenecks_of, outcome_of
from bankfull.plan.pareto import ORDER, front, recommend
from bankfull.plan.separate import RATIOS, PlannedPools
from bankfull.plan.sites import Site, caveats
from bankfull.plan.traffic import TraceRequest, TrafficSpec
from bankfull.ranks.mesh import ALONE, MeshSpec
from bankfull.weights.source import ModelFiles

SCREENED = 60
"""Requests of a first simulation, plus a third of that per further replica."""
TIMES_AN_ANSWER = 5
"""Minimum length of a trace in request latencies, so that a growing queue shows."""
MOST_TOKENS = (50_000, 200_000)
"""Output tokens of a trace, in first and final simulations; bounds the time of a simulation."""
TRIED, FINAL = 4, 10
"""Outcomes tried with other settings, and outcomes simulated again at the end."""
AUTO = "auto"
HIGHEST, PRECISION = 64, 0.1
"""Upper end of the rate search as a multiple of the given rate, and its relative precision."""
WORTH = 0.5
"""Fraction of the best attainment below which an outcome is not shown."""
Advance = Callable[[int, str], None]
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The user's request: model, traffic, objectives and goal."""

    model: str
    traffic: TrafficSpec
    objectives: Objectives
    goal: str = "goodput"
    most: int = 8
    """Maximum number of replicas."""
    requests: int = 200
    """Requests of the final, longest simulations."""
    seed: int = 0
    lossless: bool = False
    calibrate: bool = True
    refresh: bool = False
    max_kl: float | None = None
    """Largest loss: KL divergence from the unrounded model, in nats per token."""
    scheduling: SchedConfig = SERVED
    parallel: str | None = None
    """Layouts of a replica: one mesh, AUTO for several, or None: one device, and more only where one is too small."""
    per_replica: int = 8
    """Most devices of one replica."""
    separate: str | None = None
    """Prefill and decode on engines of their own: `prefill=1,decode=2`, AUTO for several ratios, or None."""

    def __post_init__(self) -> None:
        if self.parallel not in (None, AUTO):
            MeshSpec.parse(self.parallel)
        if self.separate not in (None, AUTO):
            PlannedPools.parse(self.separate)
        if not 1 <= self.per_replica <= MeshSpec.MOST:
            raise ConfigError(f"--per-replica {self.per_replica} devices is out of range; give 1 to {MeshSpec.MOST}.")
        if self.max_kl is not None and not 0 <= self.max_kl < math.inf:
            raise ConfigError(f"--max-kl {self.max_kl} is no bound on a divergence; give 0 or more, for example 0.02.")
        if self.goal not in ORDER:
            raise ConfigError(f"The goal {self.goal[:40]!r} is unknown; use {', '.join(ORDER)}.")
        if not 1 <= self.most <= 1024:
            raise ConfigError(f"--most {self.most} replicas is out of range; give 1 to 1024.")
        if not 10 <= self.requests <= 100_000:
            raise ConfigError(f"--requests {self.requests} is out of range; give 10 to 100000.")


@dataclass(slots=True)
class DeploymentPlan:
    request: PlanRequest
    pareto: list[SimulatedOutcome]
    recommended: SimulatedOutcome | None
    lossless: SimulatedOutcome | None
    """The best lossless outcome, if the recommended one is lossy."""
    later: list[SimulatedOutcome]
    """Outcomes that this version cannot run."""
    skipped: list[str]
    """Configurations that do not fit, with the reasons."""
    notes: list[str]
    """Assumptions and caveats of the figures."""
    simulated: int
    highest_rate: float | None = None
    """Requests per second up to which the recommendation meets the objectives; None if at no rate."""

    @property
    def bottlenecks(self) -> list[str]:
        return [] if self.recommended is None else bottlenecks_of(self.recommended, self.request.objectives)

    def as_json(self) -> dict[str, Any]:
        model, asked = self.request.model, self.request
        return {
            "model": model,
            "traffic": str(asked.traffic),
            "objectives": str(asked.objectives),
            "goal": asked.goal,
            "recommended": None if self.recommended is None else self.recommended.as_json(model),
            "limits": self.bottlenecks,
            "best_lossless": None if self.lossless is None else self.lossless.as_json(model),
            "pareto": [outcome.as_json(model) for outcome in self.pareto],
            "not_yet": [outcome.as_json(model) for outcome in self.later],
            "highest_rate": self.highest_rate,
            "skipped": self.skipped,
            "notes": self.notes,
            "simulated": self.simulated,
        }


@dataclass(slots=True)
class Planner:
    subject: ModelFiles | Config
    sites: Sequence[Site]
    request: PlanRequest
    advance: Advance = lambda done, note: None
    _skipped: list[str] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _seen: dict[Key, SimulatedOutcome] = field(default_factory=dict)
    _traces: dict[Key, Sequence[TraceRequest]] = field(default_factory=dict)
    """Traces by traffic, number of requests and vocabulary: many configurations run the same one."""
    _done: int = 0
    _losses: Losses = field(init=False)

    def __post_init__(self) -> None:
        measures = self.request.max_kl is not None and self.request.calibrate
        self._losses = Losses(
            self.subject, measures, lambda note: self.advance(self._done, f"measuring the loss of {note}")
        )

    def plan(self) -> DeploymentPlan:
        asked = self.request
        made_for = recipe_of(self.subject, "cpu").metered().model.max_positions
        if asked.traffic.longest > made_for:
            raise ConfigError(
                f"Requests of up to {asked.traffic.prompt.high} + {asked.traffic.output.high} tokens exceed the "
                f"model's context of {made_for}; shorten in= or out=."
            )
        if recipe_of(self.subject, "cpu").metered().model.diffusion is not None:
            self._note(
                "A diffusion model: each denoising step fixes one token of a sequence here, as in the exact sampler. A "
                "threshold fixes more; `bankfull bench diffusion` measures how many, and time per token falls by "
                "that factor."
            )
        if not isinstance(self.subject, ModelFiles):
            self._note(f"{asked.model} has no weights: put the model itself in its place in the commands.")
        first = [outcome for prepared in self._prepared() for outcome in self._first_look(prepared)]
        tried = [*first, *self._others(first)]
        possible = [outcome for outcome in tried if outcome.configuration.not_yet is None]
        finals = self._again(possible)
        # If a configuration serves the traffic, those that fail most of it are not of interest, however cheap.
        most = max((outcome.attainment for outcome in finals), default=0.0)
        kept = front([outcome for outcome in finals if outcome.attainment >= WORTH * most])
        best = recommend(finals, asked.goal)
        if best is not None and not any(outcome is best for outcome in kept):
            kept.append(best)  # as good as one on the front, but simpler
        exact = recommend([outcome for outcome in finals if not outcome.lossy], asked.goal) if best else None
        later = [outcome for outcome in tried if outcome.configuration.not_yet is not None]
        highest = None if best is None else self._highest_rate(best.configuration)
        return DeploymentPlan(
            asked,
            sorted(kept, key=ORDER[asked.goal]),
            best,
            exact if best is not None and best.lossy else None,
            later,
            self._skipped,
            self._notes + caveats(self.sites),
            self._done,
            highest,
        )

    # -- the model on the devices

    def _prepared(self) -> Iterator[PreparedModel]:
        for site in self.sites:
            candidates = [
                (stored, recipe, loss, self._calibration(site, recipe)) for stored, recipe, loss in self._recipes(site)
            ]
            # Other load lowers measured ceilings, nothing raises them: all variants use the best measurement.
            best = reduce(better, (one.ceilings for *_, one in candidates if one is not None), site.ceilings)
            for stored, recipe, loss, one in candidates:
                efficiency = assumed(site.kind) if one is None else one.fitted(recipe, site.kind, best)
                try:
                    yield prepare(site, stored, recipe, step_times(recipe, site.kind, efficiency, best), loss)
                except ConfigError as error:
                    self._skip(site, stored, error)

    def _recipes(self, site: Site) -> Iterator[tuple[Stored, Recipe, StoredLoss]]:
        exact = self.request.lossless or not site.supported
        for stored in ways_to_store(self.subject, site.kind, exact):
            try:
                loss = self._losses.of(stored, site.kind)
                self._refuse_loss(loss)
                yield stored, recipe_for(self.subject, site.kind, stored), loss
            except ConfigError as error:
                self._skip(site, stored, error)
        for note in self._losses.notes:
            self._note(note)

    def _refuse_loss(self, loss: StoredLoss) -> None:
        most = self.request.max_kl
        if most is None:
            return
        if loss.kl is None:
            self._note(f"--max-kl {most:g} keeps configurations whose loss is unknown; `bankfull quality` measures it.")
        elif loss.kl > most:
            raise ConfigError(f"its KL of {loss.kl:.2g}, measured on this model, is above --max-kl {most:g}")

    def _calibration(self, site: Site, recipe: Recipe) -> Calibration | None:
        denoises = recipe.metered().model.diffusion is not None  # steps that the calibration does not time
        if site.here and self.request.calibrate and isinstance(self.subject, ModelFiles) and not denoises:
            return calibration(
                recipe,
                site.name,
                refresh=self.request.refresh,
                advance=lambda done, note: self.advance(self._done, f"calibrating {site.name}: {note}"),
            )
        self._note(f"{site.name}: efficiency factors are assumed, not calibrated: limits hold, times are estimates.")
        return None

    def _skip(self, site: Site, stored: Stored, error: object) -> None:
        self._skipped.append(f"{site.name}, {' '.join(stored.options) or 'as saved'}: {str(error).rstrip('.')}")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    # -- simulations

    def _first_look(self, prepared: PreparedModel) -> Iterator[SimulatedOutcome]:
        """The engine's default settings, with each layout and each likely number of replicas."""
        for number, wanted in enumerate(self._meshes(prepared)):
            bases = [self._base(prepared, mesh) for mesh in wanted]
            if number == 0 and isinstance(problem := bases[0], str):
                self._skipped.append(f"{prepared.site.name}, {prepared.name}: {problem}")
            usable = [base for base in bases if isinstance(base, Configuration)]
            for base in self._promising(usable):
                yield from self._replicated(base)
                yield from self._separated(base)
            if usable and self.request.parallel is None:
                return

    def _promising(self, bases: Sequence[Configuration]) -> list[Configuration]:
        """The configurations with the highest capacity and with the lowest latency of layouts over equally many
        devices."""
        if len(bases) < 3:
            return list(bases)
        best = max(bases, key=self._capacity), min(bases, key=self._answer_seconds)
        return [base for base in bases if any(base is one for one in best)]

    def _meshes(self, prepared: PreparedModel) -> Iterator[list[MeshSpec]]:
        """Layouts by number of devices, the fewest first."""
        asked = self.request
        if asked.parallel not in (None, AUTO):
            yield [MeshSpec.parse(asked.parallel)]
            return
        yield [ALONE]
        ranks = 2
        while ranks <= asked.per_replica and prepared.site.links is not None:
            yield meshes(prepared.dims, ranks)
            ranks *= 2

    def _base(self, prepared: PreparedModel, mesh: MeshSpec) -> Configuration | str:
        """The default settings on a layout, or why they do not fit. A model that fills the memory may still fit with a
        smaller step."""
        choices = list(grid(prepared, self.request.scheduling))
        try:
            if mesh.ranks > 1:
                choices = [joined(base, mesh) for base in choices]
        except ConfigError as error:
            return str(error).rstrip(".")
        smallest = min(choices, key=lambda c: (c.step_tokens, c.rows))
        if self._problem(choices[0]) is None:
            return choices[0]
        return self._problem(smallest) or smallest

    def _replicated(self, base: Configuration) -> Iterator[SimulatedOutcome]:
        if self.request.separate not in (None, AUTO):
            return
        for replicas in self._replicas(base):
            outcome = self._run(replace(base, replicas=replicas))
            yield outcome
            if outcome.attainment == 1.0 and self.request.goal != "latency":
                return  # further replicas would only cost more

    def _separated(self, base: Configuration) -> Iterator[SimulatedOutcome]:
        asked = self.request.separate
        if asked is None:
            return
        for engines in self._ratios(base) if asked == AUTO else [PlannedPools.parse(asked)]:
            try:
                yield self._run(separated(base, engines))
            except ConfigError as error:
                self._skip(base.site, base.prepared.stored, error)

    def _ratios(self, base: Configuration) -> list[PlannedPools]:
        """The two numbers of engines that come nearest to the times of prefill and decode."""
        fill, decode = self._per_request(base)
        fitting = [PlannedPools(*ratio) for ratio in RATIOS if sum(ratio) <= self.request.most]
        return sorted(fitting, key=lambda one: abs(math.log(one.prefill / one.decode * decode / fill)))[:2]

    def _problem(self, configuration: Configuration) -> str | None:
        try:
            configuration.sizes(self.request.traffic.longest)
            return None
        except ConfigError as error:
            return str(error).rstrip(".")

    def _replicas(self, base: Configuration) -> list[int]:
        if base.site.here:
            return [1]
        needed = math.ceil(self.request.traffic.rate / max(self._capacity(base), 1e-9))
        wanted = {needed} if base.not_yet else {needed - 1, needed, needed + 1, 2 * needed}
        return sorted({min(max(count, 1), self.request.most) for count in wanted})

    def _capacity(self, base: Configuration) -> float:
        """Requests per second of one saturated replica, from the likely times of its steps."""
        return 1 / sum(self._per_request(base))

    def _per_request(self, base: Configuration) -> tuple[float, float]:
        """Seconds of prefill and of decode that a request takes of a saturated replica."""
        traffic, times = self.request.traffic, base.times
        prompt, output = round(traffic.prompt.mean), round(traffic.output.mean)
        fresh = max(prompt - traffic.shared, 1)
        fill = times.likely(StepShape.prefill(fresh, past=prompt - fresh))
        most = self._most_at_once(base)
        pace = self.request.objectives.slo.tpot
        best = math.inf
        for batch in {1, *(1 << power for power in range(most.bit_length())), most}:
            shape = StepShape.decode(batch, prompt + (output + 1) // 2)
            if base.prepared.canvas is not None:
                shape = base.prepared.denoising(batch, prompt, output)
            step = times.likely(shape)
            if batch == 1 or pace is None or step <= pace:
                best = min(best, output * step / batch)
        return fill, best

    def _most_at_once(self, configuration: Configuration) -> int:
        """Sequences of average length that run concurrently in one replica."""
        traffic, layout = self.request.traffic, configuration.prepared.layout
        sizes = configuration.sizes(traffic.longest)
        if not layout.paged:
            return sizes.rows
        length = round(traffic.prompt.mean + traffic.output.mean)
        return max(1, min(sizes.rows, sizes.frames // layout.frames_for(length, configuration.step_tokens)))

    def _others(self, outcomes: Sequence[SimulatedOutcome]) -> list[SimulatedOutcome]:
        """The best outcomes with other rows and step token budgets."""
        possible = [outcome for outcome in outcomes if outcome.configuration.not_yet is None]
        chosen = sorted(front(possible), key=ORDER[self.request.goal])[:TRIED]
        tried = []
        for outcome in chosen:
            base = outcome.configuration
            for other in grid(base.prepared, self.request.scheduling):
                wanted = replace(other, replicas=base.replicas, layout=base.layout, separation=base.separation)
                known = outcome.same_with(other.rows, other.step_tokens)
                if not known and self._problem(wanted) is None:
                    tried.append(self._run(wanted))
        return tried

    def _again(self, outcomes: Sequence[SimulatedOutcome]) -> list[SimulatedOutcome]:
        """Simulate the remaining outcomes over a longer trace."""
        order = ORDER[self.request.goal]
        kept = sorted(front(outcomes), key=order)[:FINAL]
        for extra in (recommend(outcomes, self.request.goal), *_exact(outcomes, order)):
            if extra is not None and not any(extra is one for one in kept):
                kept.append(extra)
        return [self._run(outcome.configuration, last=True) for outcome in kept]

    def _highest_rate(self, configuration: Configuration) -> float | None:
        """Highest rate at which the configuration keeps up and meets the objectives."""
        rate = self.request.traffic.rate

        def trial(rate: float, number: int) -> float:
            outcome = self._run(configuration, traffic=self.request.traffic.at(rate))
            return outcome.attainment if outcome.piling_up <= PILING else 0.0

        search = Search(rate, HIGHEST * rate, self.request.objectives.attainment, PRECISION, confirmations=0)
        return search.run(trial).rate

    def _requests(self, configuration: Configuration, traffic: TrafficSpec, last: bool) -> int:
        """Requests in a trace that is long enough to show whether the configuration keeps up."""
        least = self.request.requests if last else min(self.request.requests, SCREENED)
        least = least * (2 + configuration.replicas) // 3
        enough = math.ceil(TIMES_AN_ANSWER * traffic.rate * self._answer_seconds(configuration))
        return max(least, min(enough, math.ceil(MOST_TOKENS[last] / traffic.output.mean)))

    def _answer_seconds(self, configuration: Configuration) -> float:
        """Latency of a request at full concurrency."""
        traffic, times = self.request.traffic, configuration.times
        prompt, output = round(traffic.prompt.mean), round(traffic.output.mean)
        batch = self._most_at_once(configuration)
        step = times.likely(StepShape.decode(batch, prompt + (output + 1) // 2))
        return times.likely(StepShape.prefill(prompt)) + output * step

    def _run(
        self, configuration: Configuration, last: bool = False, traffic: TrafficSpec | None = None
    ) -> SimulatedOutcome:
        asked, traffic = self.request, traffic or self.request.traffic
        count = self._requests(configuration, traffic, last)
        key = (*_key(configuration), traffic, count)
        if key not in self._seen:
            self.advance(self._done, _shown(configuration))
            vocab = configuration.prepared.metered.model.vocab
            if (drawn := (traffic, count, vocab)) not in self._traces:
                self._traces[drawn] = traffic.trace(count, vocab, asked.seed)
            run = configuration.run(self._traces[drawn], traffic.longest)
            self._seen[key] = outcome_of(configuration, run, traffic, asked.objectives)
            self._done += 1
        return self._seen[key]


def _exact(
    outcomes: Sequence[SimulatedOutcome], order: Callable[[SimulatedOutcome], tuple[object, ...]]
) -> list[SimulatedOutcome]:
    return sorted((outcome for outcome in outcomes if not outcome.lossy), key=order)[:1]


def _key(configuration: Configuration) -> Key:
    return (
        id(configuration.prepared),
        configuration.rows,
        configuration.step_tokens,
        configuration.replicas,
        configuration.route,
        None if configuration.layout is None else configuration.layout.mesh,
        configuration.separation,
    )


def _shown(configuration: Configuration) -> str:
    times = f"{configuration.devices} x " if configuration.devices > 1 else ""
    return (
        f"{times}{configuration.site.name}, {configuration.prepared.name}, {configuration.rows} rows, "
        f"{configuration.step_tokens} tokens"
    )
