"""What could be run: devices and their number, how weights and keys are stored, rows, tokens of a step.

A configuration is data. Whatever this version cannot run carries the reason with it, is shown with that, and is never
recommended.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.limits.meter.closed_form import ClosedForm, forms_by_operation
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.memory import memory_of
from bankfull.limits.model.recipe import Recipe, recipe_of
from bankfull.models.registry import Config
from bankfull.plan.simulate import ROUTES, ReplicaSpec
from bankfull.plan.sites import Site
from bankfull.plan.step_times import ALONE, Layout, StepTimes
from bankfull.runtime.memory import Sizes, plan_memory
from bankfull.weights.requantized import block_types
from bankfull.weights.source import ModelFiles

LATER = {
    "tensor parallel": "one model over several devices",
    "prefill and decode apart": "prompts computed on other devices than answers",
    "speculation": "several tokens guessed and checked in one step",
}
"""What this version cannot do, and a later one will."""
QUANTIZE = {"cpu": ("int8", "int4"), "cuda": ("int8", "int4", "fp8")}
ROWS = {"cpu": (8, 32, 64), "cuda": (32, 128, 256)}
STEP_TOKENS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192)}
"""Prompts are cut into chunks of at most so many tokens: the budget of a step is the size of a chunk."""
MEMORY_STEP = 512
"""A step's own memory is metered for so many tokens, and grows with them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a model's numbers are stored."""

    quantize: str | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"

    @property
    def lossy(self) -> bool:
        return self.quantize is not None or self.kv_dtype == "int8"

    @property
    def options(self) -> list[str]:
        found = [] if self.quantize is None else ["--quantize", self.quantize]
        found += [] if self.dtype == "auto" else ["--dtype", self.dtype]
        return found if self.kv_dtype == "auto" else [*found, "--kv-dtype", self.kv_dtype]


@dataclass(slots=True, eq=False)
class Prepared:
    """A model, stored in one way, on one device: metered, and with the times of its steps."""

    site: Site
    stored: Stored
    recipe: Recipe
    metered: MeteredModel
    forms: dict[str, ClosedForm]
    times: StepTimes
    weights: int
    """Bytes, as they lie in memory."""
    step_bytes: float
    """Of each token of a step, while it runs."""

    @property
    def name(self) -> str:
        weights = self.stored.quantize or (self.stored.dtype if self.stored.dtype != "auto" else self.as_saved)
        return f"{weights}, kv {str(self.recipe.kv_dtype).removeprefix('torch.')}"

    @property
    def as_saved(self) -> str:
        return "/".join(self.recipe.blocks) or str(self.recipe.matrices).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Configuration:
    prepared: Prepared
    rows: int
    step_tokens: int
    replicas: int = 1
    route: str = ROUTES[0]
    layout: Layout = ALONE
    not_yet: str | None = None
    """Why this version cannot run it."""

    @property
    def site(self) -> Site:
        return self.prepared.site

    @property
    def lossy(self) -> bool:
        return self.prepared.stored.lossy

    @property
    def usual(self) -> bool:
        """As the engine would configure itself."""
        return (self.rows, self.step_tokens) == self.site.suits

    @property
    def devices(self) -> int:
        return self.replicas * self.layout.ways

    @property
    def dollars_per_hour(self) -> float | None:
        price = self.site.dollars_per_hour
        return None if price is None else price * self.devices

    def commands(self, model: str) -> list[str]:
        """One for each replica; empty for what cannot be run."""
        if self.not_yet is not None:
            return []
        found = []
        for number in range(self.replicas):
            device = self.site.name if self.site.here else self.site.kind
            words = ["bankfull", "serve", model, "--device", device, *self.prepared.stored.options]
            words += ["--rows", str(self.rows), "--step-tokens", str(self.step_tokens)]
            if self.replicas > 1:
                words += ["--port", str(8000 + number)]
            found.append(shlex.join(words))
        return found

    def sizes(self, longest: int) -> Sizes:
        """What the engine would allocate; ConfigError where that is too little for the longest request."""
        prepared, site, ways = self.prepared, self.site, self.layout.ways
        aside = (prepared.weights + prepared.step_bytes * self.step_tokens) / ways
        free = int(site.memory - aside)
        if free <= 0:
            raise ConfigError(f"the weights need {aside / 1e9:.1f} GB, but there are {site.memory / 1e9:.1f}")
        found = plan_memory(
            prepared.metered.layout,
            SchedConfig(rows=self.rows, step_tokens=self.step_tokens),
            StateConfig(),
            free=free * ways,
            depth=site.depth,
            made_for=prepared.metered.model.max_positions,
            max_len=None,
            share=site.share,
        )
        if found.max_len < longest:
            raise ConfigError(f"the memory left holds {found.max_len} tokens of context, but {longest} are asked for")
        return found

    @property
    def times(self) -> StepTimes:
        alone = self.prepared.times
        if self.layout.ways == 1:
            return alone
        return StepTimes(self.prepared.forms, alone.ceilings, alone.peak, alone.efficiency, alone.overlaps, self.layout)

    def replica(self, longest: int) -> ReplicaSpec:
        sizes = self.sizes(longest)
        # As `bankfull serve` configures it.
        sched = SchedConfig(rows=sizes.rows, step_tokens=self.step_tokens, policy="priority")
        return ReplicaSpec(self.prepared.metered.layout, sizes, sched, StateConfig(), self.site.depth, self.times)

    def as_json(self, model: str) -> dict[str, Any]:
        stored = self.prepared.stored
        return {
            "device": self.site.name,
            "here": self.site.here,
            "replicas": self.replicas,
            "ways": self.layout.ways,
            "devices": self.devices,
            "route": self.route if self.replicas > 1 else None,
            "quantize": stored.quantize,
            "dtype": stored.dtype,
            "kv_dtype": stored.kv_dtype,
            "weights": self.prepared.name,
            "lossy": self.lossy,
            "rows": self.rows,
            "step_tokens": self.step_tokens,
            "not_yet": self.not_yet,
            "commands": self.commands(model),
        }


def ways_to_store(model: ModelFiles | Config, kind: str, lossless: bool) -> Iterator[Stored]:
    """Those that the loader has for a kind of device; what was rounded once is not rounded again."""
    base = recipe_of(model, kind)
    weights = [Stored()]
    if not block_types(base.files.source):
        if base.dtype_name == "float32" and base.matrices.itemsize == 4:
            weights.append(Stored(dtype="bfloat16"))
        weights += [] if lossless else [Stored(quantize=name) for name in QUANTIZE[kind]]
    keeps_pages = bool(base.metered().layout.paged)
    for stored in weights:
        yield stored
        if keeps_pages and not lossless:
            yield replace(stored, kv_dtype="int8")


def recipe_for(model: ModelFiles | Config, kind: str, stored: Stored) -> Recipe:
    return recipe_of(model, kind, RunConfig(quantize=stored.quantize, dtype=stored.dtype, kv_dtype=stored.kv_dtype))


def prepare(site: Site, stored: Stored, recipe: Recipe, times: StepTimes) -> Prepared:
    metered = recipe.metered()
    memory = memory_of(recipe, 1, 1, StepShape.prefill(MEMORY_STEP), None)
    return Prepared(
        site, stored, recipe, metered, forms_by_operation(metered), times, memory.weights, memory.step / MEMORY_STEP
    )


def grid(prepared: Prepared) -> Iterator[Configuration]:
    """Every choice of rows and tokens of a step, the engine's own first."""
    kind = prepared.site.kind
    blocked = None if prepared.site.supported else f"this version does not run on {prepared.site.title}"
    usual = prepared.site.suits
    choices = [(rows, tokens) for rows in ROWS[kind] for tokens in STEP_TOKENS[kind]]
    for rows, tokens in sorted({usual, *choices}, key=lambda choice: choice != usual):
        yield Configuration(prepared, rows, tokens, not_yet=blocked)


def tensor_parallel(base: Configuration, ways: int) -> Configuration | None:
    """The same over several devices that work on each step together; None where nothing is known of their link."""
    link = base.site.link_bytes_per_s
    if link is None:
        return None
    model = base.prepared.metered.model
    token_bytes = model.hidden * base.prepared.recipe.dtype.itemsize
    layout = Layout(ways, link / 2, 2 * len(model.blocks), token_bytes)  # a link's figure is of both directions
    return replace(base, layout=layout, not_yet="not yet: tensor parallel")
