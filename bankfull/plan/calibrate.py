"""Calibration: one efficiency factor per kind of operation, from a minute of real steps on this machine; cached.

The machine's ceilings are measured before and after, and the better of the two is stored with the factors, which are
relative to them.
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

from bankfull.assembly import Assembled, assemble
from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.limits.machine import cache_file, ceilings
from bankfull.limits.machine.ceilings import Ceilings, better
from bankfull.limits.meter.closed_form import ClosedForm, forms_by_operation
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.recipe import Recipe
from bankfull.plan.efficiency import Timed, assumed, fit
from bankfull.plan.step_timer import ShapeTooLarge, StepTimer
from bankfull.plan.step_times import Efficiency, StepTimes
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
"""(sequences, context length)."""
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
"""(sequences, new tokens of each, cached tokens of each)."""
LEAST_SHAPES = 8
ROUNDS, TURNS = 3, 3
"""All shapes run once per round, so that a busy moment of the machine disturbs a little of each, not all of one."""
Advance = Callable[[int, str], None]


def shapes() -> int:
    """Number of parts reported to `advance`."""
    return ROUNDS * (len(DECODES) + len(PREFILLS))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Timed steps and the ceilings at that time; the factors depend on both."""

    timed: tuple[Timed, ...]
    ceilings: Ceilings
    when: str

    def fitted(self, recipe: Recipe, kind: str, ceilings: Ceilings) -> Efficiency:
        """Factors for a kind of device, relative to its best known ceilings."""
        times = step_times(recipe, kind, assumed(kind), ceilings)
        source = f"{len(self.timed)} shapes of steps timed here at {self.when}"
        return fit(times, self.timed, assumed(kind), source)


def calibration(
    recipe: Recipe, device_name: str, *, refresh: bool = False, advance: Advance = lambda done, note: None
) -> Calibration:
    """The calibration of a recipe on this machine: from the cache file, or measured now."""
    device = open_device(device_name)
    identity = _identity(recipe, device)
    path = cache_file.path_of(identity, "calibration")
    kept = None if refresh else _load(cache_file.read(path, identity))
    if kept is None:
        kept = _calibrate(recipe, device, advance)
        timed = [[list(t.step.counts), list(t.step.lengths), t.step.logits, t.seconds] for t in kept.timed]
        cache_file.write(path, identity, timed=timed, ceilings=asdict(kept.ceilings), when=kept.when)
    return kept


def _calibrate(recipe: Recipe, device: Device, advance: Advance) -> Calibration:
    before = _measured_ceilings(device)
    assembled = engine_for(recipe, device)
    steps = timed_steps(assembled, advance)
    if len(steps.timed) < LEAST_SHAPES:
        reasons = " ".join(sorted(set(steps.missing.values())))
        raise ConfigError(
            f"{recipe.files.path.name} cannot be calibrated here: only {len(steps.timed)} step shapes could be timed "
            f"({reasons.rstrip('.')}); use --no-calibrate."
        )
    best = better(before, _measured_ceilings(device))
    return Calibration(tuple(steps.timed.values()), best, datetime.now(UTC).isoformat(timespec="seconds"))


def engine_for(recipe: Recipe, device: Device, rows: int = ROWS, most_tokens: int = ROWS * 512) -> Assembled:
    """The model with state for `most_tokens`, or for as many tokens as fit in memory."""
    state = StateConfig(memory=_state_bytes(recipe, device, most_tokens))
    return assemble(recipe.files, recipe.run, SchedConfig(rows=rows, step_tokens=512), state, device=device)


def _state_bytes(recipe: Recipe, device: Device, tokens: int) -> int:
    layout = recipe.metered().layout
    slot = 0 if layout.recurrent is None else layout.recurrent.slot_bytes * (4 * ROWS + 64)
    wanted = tokens * 11 // 10 * layout.token_bytes + 64 * layout.frame_bytes + slot
    return max(1, min(wanted, int(0.4 * device.free_memory())))


@dataclass(frozen=True, slots=True)
class Steps:
    """Times of the requested shapes, and the reasons for missing ones. A shape is (sequences, context) of a decode
    step, or (sequences, tokens, past) of a prefill step."""

    timed: dict[tuple[int, ...], Timed]
    """Median time of each shape."""
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
    missing = {s: f"The model supports {made.sizes.max_len} tokens." for s in asked if sum(s[1:]) > longest}
    wanted = [shape for shape in asked if shape not in missing]
    by_shape: dict[tuple[int, ...], list[Timed]] = {}
    for turn in range(ROUNDS):
        for number, shape in enumerate(wanted):
            advance(turn * len(wanted) + number, shown(shape))
            try:
                timed = Timed(*_timed(timer, shape))
            except ShapeTooLarge as error:
                missing[shape] = str(error)
            else:
                by_shape.setdefault(shape, []).append(timed)
    return Steps(
        {shape: Timed(turns[0].step, median(t.seconds for t in turns)) for shape, turns in by_shape.items()},
        {shape: missing[shape] for shape in asked if shape not in by_shape},
    )


def _timed(timer: StepTimer, shape: tuple[int, ...]) -> tuple[StepShape, float]:
    if len(shape) == 2:
        return timer.decode(shape[0], shape[1], TURNS)
    return timer.prefill(shape[0], shape[1], shape[2], 1)


def shown(shape: tuple[int, ...]) -> str:
    if len(shape) == 2:
        return f"{shape[0]} x 1 token at {shape[1]}"
    return f"{shape[0]} x {shape[1]} tokens after {shape[2]}"


def _measured_ceilings(device: Device) -> Ceilings:
    measured = ceilings.of_device(device, refresh=True)
    if measured is None:
        raise ConfigError(f"{device.torch} has too little free memory to be measured; stop other programs that use it.")
    return measured


def _identity(recipe: Recipe, device: Device) -> dict[str, Any]:
    """What the factors depend on: the machine, the model, and its storage and arithmetic."""
    config = hashlib.sha256(json.dumps(recipe.config, sort_keys=True, default=str).encode()).hexdigest()
    schemes = hashlib.sha256(str(sorted((n, s.name) for n, s in recipe.schemes.items())).encode()).hexdigest()
    return {
        **ceilings.identity_of(device),
        "calibration": FORMAT,
        "model": config,
        "schemes": schemes,
        "dtype": recipe.dtype_name,
        "kv dtype": str(recipe.kv_dtype),
        "activations": recipe.activations.name,
        "providers": recipe.run.providers,
    }


def _load(stored: Mapping[str, Any] | None) -> Calibration | None:
    """None if missing or damaged."""
    if stored is None:
        return None
    try:
        timed = tuple(
            Timed(StepShape(tuple(counts), tuple(lengths), logits), float(seconds))
            for counts, lengths, logits, seconds in stored["timed"]
        )
        known = Ceilings(**stored["ceilings"])
        rates = [known.read_bytes_per_s, known.cached_read_bytes_per_s, *known.flops.values()]
        sound = all(0 < number < math.inf for number in [*rates, *(t.seconds for t in timed)])
        return Calibration(timed, known, str(stored["when"])) if sound and len(timed) >= LEAST_SHAPES else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def step_times(
    recipe: Recipe, kind: str, efficiency: Efficiency, ceilings: Ceilings, forms: Mapping[str, ClosedForm] | None = None
) -> StepTimes:
    return StepTimes(
        forms or forms_by_operation(recipe.metered()),
        ceilings,
        ceilings.rates(recipe.dtype_name),
        efficiency,
        overlaps=kind == "cuda",
    )
