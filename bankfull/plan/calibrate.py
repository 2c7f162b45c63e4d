"""One efficiency factor for each kind of operation, from a minute of real steps on this machine; kept for next time.

The machine's ceilings are measured before and after, and the better of the two looks is kept with the factors: they are
worth nothing without each other.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.limits.machine import ceilings
from bankfull.limits.machine.ceilings import Ceilings, better
from bankfull.limits.meter.closed_form import ClosedForm, forms_by_operation
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.recipe import Recipe
from bankfull.loading import Assembled, assemble
from bankfull.plan.assumed import usual
from bankfull.plan.fit import Timed, fit
from bankfull.plan.step_times import Efficiency, StepTimes
from bankfull.plan.timing import NoRoom, StepTimer
from bankfull.runtime.device import Device, open_device

FORMAT = 2
ROWS = 64
DECODES = (
    (1, 64),
    (1, 1024),
    (1, 4096),
    (2, 256),
    (4, 64),
    (4, 2048),
    (8, 512),
    (16, 64),
    (16, 1024),
    (32, 256),
    (64, 64),
    (64, 512),
)
"""Sequences, and the tokens that each sees."""
PREFILLS = (
    (1, 16, 0),
    (1, 64, 0),
    (1, 128, 512),
    (1, 512, 0),
    (1, 512, 1536),
    (1, 256, 3584),
    (4, 128, 0),
    (16, 32, 256),
)
"""Sequences, tokens of each, and tokens before them."""
LEAST_SHAPES = 8
ROUNDS, TURNS = 3, 3
"""Every shape has its turn before the first has its second: a busy moment spoils a little of each, not all of one."""
Advance = Callable[[int, str], None]


def shapes() -> int:
    """How many parts `advance` will be told of."""
    return ROUNDS * (len(DECODES) + len(PREFILLS))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Steps that were timed, and the ceilings of the hour: what the factors are depends on both."""

    timed: tuple[Timed, ...]
    ceilings: Ceilings
    when: str

    def fitted(self, recipe: Recipe, kind: str, limits: Ceilings) -> Efficiency:
        """The factors of a kind of device, relative to the best that is known of its ceilings."""
        times = step_times(recipe, kind, usual(kind), limits)
        source = f"{len(self.timed)} shapes of steps timed here at {self.when}"
        return fit(times, self.timed, usual(kind), source)


def calibration(
    recipe: Recipe, device_name: str, *, refresh: bool = False, advance: Advance = lambda done, note: None
) -> Calibration:
    """Of a model as it would run on this machine: from the cache, or measured now."""
    device = open_device(device_name)
    identity = _identity(recipe, device)
    path = ceilings.path_of(identity, "calibration")
    kept = None if refresh else _load(ceilings.read_kept(path, identity))
    if kept is None:
        kept = _calibrate(recipe, device, advance)
        timed = [[list(t.step.counts), list(t.step.lengths), t.step.logits, t.seconds] for t in kept.timed]
        ceilings.keep(path, identity, timed=timed, ceilings=asdict(kept.ceilings), when=kept.when)
    return kept


def _calibrate(recipe: Recipe, device: Device, advance: Advance) -> Calibration:
    before = _limits(device)
    made = engine_for(recipe, device)
    found = timed_steps(made, advance)
    if len(found.timed) < LEAST_SHAPES:
        reasons = " ".join(sorted(set(found.missing.values())))
        raise ConfigError(
            f"{recipe.files.path.name} cannot be calibrated here: only {len(found.timed)} of the steps' shapes could "
            f"be timed ({reasons.rstrip('.')}); use --no-calibrate."
        )
    limits = better(before, _limits(device))
    return Calibration(tuple(found.timed.values()), limits, datetime.now(UTC).isoformat(timespec="seconds"))


def engine_for(recipe: Recipe, device: Device, rows: int = ROWS, most_tokens: int = ROWS * 512) -> Assembled:
    """The model with state for so many tokens, or for as many as there is memory."""
    state = StateConfig(memory=_state_bytes(recipe, device, most_tokens))
    return assemble(recipe.files, recipe.run, SchedConfig(rows=rows, step_tokens=512), state, device=device)


def _state_bytes(recipe: Recipe, device: Device, tokens: int) -> int:
    layout = recipe.metered().layout
    slot = 0 if layout.recurrent is None else layout.recurrent.slot_bytes * (4 * ROWS + 64)
    wanted = tokens * 11 // 10 * layout.token_bytes + 64 * layout.frame_bytes + slot
    return max(1, min(wanted, int(0.4 * device.free_memory())))


@dataclass(frozen=True, slots=True)
class Steps:
    """What was timed of the shapes that were asked for, and why the rest was not. A shape is (sequences, context) of a
    step that decodes, or (sequences, tokens, past) of one that fills caches."""

    timed: dict[tuple[int, ...], Timed]
    """The middle one of each shape's times."""
    missing: dict[tuple[int, ...], str]


def timed_steps(
    made: Assembled,
    advance: Advance,
    decodes: tuple[tuple[int, int], ...] = DECODES,
    prefills: tuple[tuple[int, int, int], ...] = PREFILLS,
) -> Steps:
    timer = StepTimer(made.engine, made.model.vocab)
    longest = made.sizes.max_len - TURNS - 4
    asked: tuple[tuple[int, ...], ...] = (*decodes, *prefills)
    missing = {s: f"The model sees {made.sizes.max_len} tokens at most." for s in asked if sum(s[1:]) > longest}
    wanted = [shape for shape in asked if shape not in missing]
    found: dict[tuple[int, ...], list[Timed]] = {}
    for turn in range(ROUNDS):
        for number, shape in enumerate(wanted):
            advance(turn * len(wanted) + number, shown(shape))
            try:
                timed = Timed(*_timed(timer, shape))
            except NoRoom as error:
                missing[shape] = str(error)
            else:
                found.setdefault(shape, []).append(timed)
    return Steps(
        {shape: Timed(turns[0].step, median(t.seconds for t in turns)) for shape, turns in found.items()},
        {shape: missing[shape] for shape in asked if shape not in found},
    )


def _timed(timer: StepTimer, shape: tuple[int, ...]) -> tuple[StepShape, float]:
    if len(shape) == 2:
        return timer.decode(shape[0], shape[1], TURNS)
    return timer.prefill(shape[0], shape[1], shape[2], 1)


def shown(shape: tuple[int, ...]) -> str:
    if len(shape) == 2:
        return f"{shape[0]} x 1 token at {shape[1]}"
    return f"{shape[0]} x {shape[1]} tokens behind {shape[2]}"


def _limits(device: Device) -> Ceilings:
    found = ceilings.of_device(device, refresh=True)
    if found is None:
        raise ConfigError(f"{device.torch} has too little free memory to be measured; end what else runs there.")
    return found


def _identity(recipe: Recipe, device: Device) -> dict[str, Any]:
    """What the factors depend on: machine, model, and how its numbers are stored and multiplied."""
    config = hashlib.sha256(json.dumps(recipe.config, sort_keys=True, default=str).encode()).hexdigest()
    schemes = hashlib.sha256(str(sorted((n, s.name) for n, s in recipe.schemes.items())).encode()).hexdigest()
    return {
        **ceilings.identity_of(device),
        "calibration": FORMAT,
        "model": config,
        "schemes": schemes,
        "dtype": recipe.dtype_name,
        "kv dtype": str(recipe.kv_dtype),
        "activations": recipe.activations,
        "providers": recipe.run.providers,
    }


def _load(stored: Mapping[str, Any] | None) -> Calibration | None:
    """None for what is not there, or not as it was written."""
    if stored is None:
        return None
    try:
        timed = tuple(
            Timed(StepShape(tuple(counts), tuple(lengths), logits), float(seconds))
            for counts, lengths, logits, seconds in stored["timed"]
        )
        limits = Ceilings(**stored["ceilings"])
        rates = [limits.read_bytes_per_s, limits.cached_read_bytes_per_s, *limits.flops.values()]
        sound = all(0 < number < math.inf for number in [*rates, *(t.seconds for t in timed)])
        return Calibration(timed, limits, str(stored["when"])) if sound and len(timed) >= LEAST_SHAPES else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def step_times(
    recipe: Recipe, kind: str, efficiency: Efficiency, limits: Ceilings, forms: Mapping[str, ClosedForm] | None = None
) -> StepTimes:
    return StepTimes(
        forms or forms_by_operation(recipe.metered()),
        limits,
        limits.peak_of(recipe.dtype_name, recipe.activations),
        efficiency,
        overlaps=kind == "cuda",
    )
