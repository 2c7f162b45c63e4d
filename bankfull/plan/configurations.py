"""Candidate configurations: devices and their number, storage of weights and KV cache, rows, step token budget.

A configuration that this version cannot run carries the reason, is shown with it, and is never recommended.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bankfull.config import DiffusionChoice, RunConfig, SchedConfig, StateConfig
from bankfull.decode.diffusion import canvas_shape
from bankfull.errors import ConfigError
from bankfull.fleet.routing import DEFAULT_POLICY
from bankfull.limits.layout.dims import ModelDims
from bankfull.limits.layout.measured import dims_of
from bankfull.limits.layout.wire import kv_bytes
from bankfull.limits.meter.closed_form import ClosedForm, forms_by_operation
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.memory import memory_of
from bankfull.limits.model.recipe import Recipe, recipe_of
from bankfull.models.registry import Config
from bankfull.ops.pages.rounded import ROUNDED, pages_name
from bankfull.plan.layouts import ParallelLayout
from bankfull.plan.losses import NO_LOSS, StoredLoss
from bankfull.plan.separate import PlannedPools, SeparatedSpec, simulate_separated
from bankfull.plan.simulate import ReplicaSpec, Run, simulate
from bankfull.plan.sites import Site
from bankfull.plan.step_times import StepTimes
from bankfull.plan.traffic import TraceRequest
from bankfull.ranks.mesh import MeshSpec
from bankfull.runtime.denoised import LONGEST_STEP, suited_state
from bankfull.runtime.memory import Sizes, plan_memory
from bankfull.sched.canvas import Canvas
from bankfull.sched.gates import gate_of
from bankfull.state.spec import Layout, layout_of
from bankfull.types import CanvasShape
from bankfull.weights.requantized import Requantized, block_types, parse_quantization
from bankfull.weights.source import ModelFiles

QUANTIZE = {
    "cpu": ("int8", "q6_k,keep", "int4", "q4_k,keep"),
    "cuda": ("int8", "fp8", "int4", "int4:32"),
}
"""Weight types that kernels of a kind of device read as they are stored. Others, such as wide groups on a CPU, become
one of these at load and would only lose more."""
ROUNDED_PAGES = {"cpu": ("int8",), "cuda": ("int8", "int4")}
"""Rounded formats of the KV cache. fp8 takes the bytes of int8 and loses more; on a CPU int4 is slow."""
ROWS = {"cpu": (8, 32, 64), "cuda": (32, 128, 256)}
STEP_TOKENS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192)}
"""Step token budgets, which are also the chunk sizes of chunked prefill."""
MEMORY_STEP = 512
"""Tokens for which the memory of a step is metered; it grows linearly with them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Storage of weights and KV cache."""

    quantize: str | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"

    @property
    def lossy(self) -> bool:
        return self.quantize is not None or self.kv_dtype in ROUNDED

    @property
    def options(self) -> list[str]:
        options = [] if self.quantize is None else ["--quantize", self.quantize]
        options += [] if self.dtype == "auto" else ["--dtype", self.dtype]
        return options if self.kv_dtype == "auto" else [*options, "--kv-dtype", self.kv_dtype]


@dataclass(slots=True, eq=False)
class PreparedModel:
    """A model with one storage on one device, with its meter and step times."""

    site: Site
    stored: Stored
    recipe: Recipe
    metered: MeteredModel
    forms: dict[str, ClosedForm]
    times: StepTimes
    weights: int
    """Bytes of weights in memory."""
    step_bytes: float
    """Bytes of intermediate results per token of a step."""
    loss: StoredLoss = NO_LOSS
    state: StateConfig = field(init=False)
    """The state's options, as the engine chooses them for the model."""
    layout: Layout = field(init=False)
    canvas: CanvasShape | None = field(init=False)
    """The blocks of a diffusion model, with the engine's default options."""
    _dims: ModelDims | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        model = self.metered.model
        self.state = suited_state(model, StateConfig())
        self.layout = layout_of(model.states(), self.state.page_tokens)
        self.canvas = None if model.diffusion is None else canvas_shape(model.diffusion, DiffusionChoice.parse(""))

    @property
    def dims(self) -> ModelDims:
        """What layouts divide."""
        if self._dims is None:
            self._dims = dims_of(self.recipe)
        return self._dims

    @property
    def name(self) -> str:
        weights = self.stored.quantize or (self.stored.dtype if self.stored.dtype != "auto" else self.as_saved)
        return f"{weights}, kv {pages_name(self.recipe.kv_dtype)}"

    @property
    def sees_all(self) -> bool:
        """Whether each step computes whole sequences."""
        return self.canvas is not None and self.canvas.whole

    def denoising(self, sequences: int, prompt: int, output: int) -> StepShape:
        """A step in the middle of the answers: one block of each sequence, or all of its tokens."""
        canvas = self.canvas
        assert canvas is not None, "a model that predicts the next token has no canvas"
        known = prompt + output // 2
        shape = Canvas(canvas, self.metered.model.max_positions)
        end = shape.canvas_end(known, prompt, prompt + output)
        return StepShape((end - shape.border(known),) * sequences, (end,) * sequences, sequences * canvas.block)

    @property
    def as_saved(self) -> str:
        return "/".join(self.recipe.quantized_types) or str(self.recipe.matrices).removeprefix("torch.")


SERVED = SchedConfig(policy="priority")
"""The scheduling of `bankfull serve`."""
SCHEDULING = (
    "policy",
    "batching",
    "batch_size",
    "batch_timeout",
    "prefill_tokens",
    "prefill_rows",
    "decode_rows",
    "quantum_ms",
    "starvation",
    "weights",
)
"""Fields of a `SchedConfig` that are options of `serve` under their own names."""


@dataclass(frozen=True, slots=True)
class Configuration:
    prepared: PreparedModel
    rows: int
    step_tokens: int
    replicas: int = 1
    route: str = DEFAULT_POLICY
    layout: ParallelLayout | None = None
    """Layout of a replica over several devices; None = each replica is one device."""
    not_yet: str | None = None
    """Why this version cannot run it."""
    separation: PlannedPools | None = None
    """Prefill and decode on engines of their own, which are the replicas."""
    scheduling: SchedConfig = SERVED
    """Policy, gate and budgets; rows and step_tokens are the configuration's own."""

    @property
    def site(self) -> Site:
        return self.prepared.site

    @property
    def lossy(self) -> bool:
        return self.prepared.stored.lossy

    @property
    def usual(self) -> bool:
        """Whether the engine would choose these values by default."""
        return (self.rows, self.step_tokens) == self.site.suits

    @property
    def devices(self) -> int:
        return self.replicas * self.ways

    @property
    def ways(self) -> int:
        """Devices of one replica."""
        return 1 if self.layout is None else self.layout.ways

    @property
    def rank_weights(self) -> float:
        """Bytes of weights on the device that has most."""
        return self.prepared.weights if self.layout is None else self.layout.weights

    @property
    def state_share(self) -> float:
        """Fraction of a sequence's state on that device."""
        return 1.0 if self.layout is None else self.layout.state_share

    @property
    def dollars_per_hour(self) -> float | None:
        price = self.site.dollars_per_hour
        return None if price is None else price * self.devices

    def commands(self, model: str) -> list[str]:
        """The command that starts it; none if this version cannot run it."""
        if self.not_yet is not None:
            return []
        # A replica of several sees only the devices that Ray gives it.
        here = self.site.here and self.replicas == 1
        device = self.site.name if here else self.site.kind
        words = ["bankfull", "serve", model, "--device", device, *self.prepared.stored.options]
        words += ["--rows", str(self.rows), "--step-tokens", str(self.step_tokens), *scheduling_words(self.scheduling)]
        words += [] if self.layout is None else ["--parallel", str(self.layout.mesh)]
        if self.separation is not None:
            words += ["--separate", str(self.separation)]
        elif self.replicas > 1:
            words += ["--replicas", str(self.replicas), "--routing", self.route]
        return [shlex.join(words)]

    def sizes(self, longest: int) -> Sizes:
        """The engine's allocation; ConfigError if it cannot hold the longest request."""
        prepared, site = self.prepared, self.site
        if prepared.sees_all and longest > self.step_tokens:
            raise ConfigError(
                f"the model computes the whole sequence in each step, and {longest} tokens are more than a step of "
                f"{self.step_tokens}"
            )
        tokens = self.step_tokens if self.layout is None else self.step_tokens / self.layout.activation_ranks
        aside = self.rank_weights + prepared.step_bytes * tokens
        free = int(site.memory - aside)
        if free <= 0:
            raise ConfigError(f"the weights need {aside / 1e9:.1f} GB, but the device has {site.memory / 1e9:.1f} GB")
        sizes = plan_memory(
            prepared.layout,
            SchedConfig(rows=self.rows, step_tokens=self.step_tokens),
            prepared.state,
            free=int(free / self.state_share),
            depth=site.depth,
            made_for=prepared.metered.model.max_positions,
            max_len=None,
            share=site.share,
        )
        if sizes.max_len < longest:
            raise ConfigError(f"the free memory holds {sizes.max_len} tokens of context, but {longest} are needed")
        return sizes

    @property
    def times(self) -> StepTimes:
        alone = self.prepared.times
        if self.layout is None:
            return alone
        return StepTimes(
            self.prepared.forms, alone.ceilings, alone.rates, alone.efficiency, alone.overlaps, self.layout
        )

    def replica(self, longest: int) -> ReplicaSpec:
        sizes = self.sizes(longest)
        sched = replace(self.scheduling, rows=sizes.rows, step_tokens=self.step_tokens)
        gate_of(sched)  # a batch of more sequences than rows is refused
        prepared = self.prepared
        return ReplicaSpec(
            prepared.layout, sizes, sched, prepared.state, self.site.depth, self.times, canvas=prepared.canvas
        )

    def transfer_seconds(self, tokens: int) -> float:
        """Time to send the state of a prompt from a prefill engine to a decode engine, each rank its share."""
        assert self.site.links is not None, "a separation needs a link"
        link = self.site.links.link(self.devices)
        return link.seconds(1, kv_bytes(self.prepared.dims, tokens) * self.state_share)

    def run(self, trace: Sequence[TraceRequest], longest: int) -> Run:
        """Simulate a trace."""
        spec = self.replica(longest)
        if self.separation is None:
            return simulate(spec, trace, self.replicas, self.route)
        return simulate_separated(SeparatedSpec(spec, spec, self.separation, self.transfer_seconds), trace, self.route)

    def as_json(self, model: str) -> dict[str, Any]:
        stored = self.prepared.stored
        return {
            "device": self.site.name,
            "here": self.site.here,
            "replicas": self.replicas,
            "ways": self.ways,
            "parallel": None if self.layout is None else str(self.layout.mesh),
            "devices": self.devices,
            "separate": None if self.separation is None else asdict(self.separation),
            "route": self.route if self.replicas > 1 else None,
            "quantize": stored.quantize,
            "dtype": stored.dtype,
            "kv_dtype": stored.kv_dtype,
            "weights": self.prepared.name,
            "lossy": self.lossy,
            **self.prepared.loss.as_json(),
            "rows": self.rows,
            "step_tokens": self.step_tokens,
            "not_yet": self.not_yet,
            "commands": self.commands(model),
        }


def ways_to_store(model: ModelFiles | Config, kind: str, lossless: bool) -> Iterator[Stored]:
    """Storage options of the loader for a kind of device; a quantized file is not quantized again."""
    base = recipe_of(model, kind)
    weights = [Stored()]
    if not block_types(base.files.source):
        if base.dtype_name == "float32" and base.matrices.itemsize == 4:
            weights.append(Stored(dtype="bfloat16"))
        weights += [] if lossless else [Stored(quantize=name) for name in _fitting(base, kind)]
    rounds_pages = not lossless and base.metered().takes_rounded_pages
    for stored in weights:
        yield stored
        if rounds_pages:
            yield from (replace(stored, kv_dtype=name) for name in ROUNDED_PAGES[kind])


def _fitting(base: Recipe, kind: str) -> Iterator[str]:
    """Weight types that apply to at least one matrix of the model."""
    for name in QUANTIZE[kind]:
        wish = parse_quantization(name, kind)
        if block_types(Requantized(base.files.source, wish.types, wish.tables)):
            yield name


def recipe_for(model: ModelFiles | Config, kind: str, stored: Stored) -> Recipe:
    return recipe_of(model, kind, RunConfig(quantize=stored.quantize, dtype=stored.dtype, kv_dtype=stored.kv_dtype))


def prepare(site: Site, stored: Stored, recipe: Recipe, times: StepTimes, loss: StoredLoss = NO_LOSS) -> PreparedModel:
    metered = recipe.metered()
    memory = memory_of(recipe, 1, 1, StepShape.prefill(MEMORY_STEP), None)
    forms, step = forms_by_operation(metered), memory.step / MEMORY_STEP
    return PreparedModel(site, stored, recipe, metered, forms, times, memory.weights, step, loss)


def scheduling_words(scheduling: SchedConfig) -> list[str]:
    """Options of `bankfull serve` for what differs from its own scheduling."""
    words = []
    for name in SCHEDULING:
        value = getattr(scheduling, name)
        implied = name == "policy" and scheduling.batching != "continuous"
        if value != getattr(SERVED, name) and not implied:
            text = ",".join(f"{key}={weight:g}" for key, weight in value) if name == "weights" else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return words


def grid(prepared: PreparedModel, scheduling: SchedConfig = SERVED) -> Iterator[Configuration]:
    """All choices of rows and step token budget, the engine's default first."""
    kind = prepared.site.kind
    blocked = None if prepared.site.supported else f"this version does not run on {prepared.site.title}"
    usual = prepared.site.suits
    if prepared.sees_all:  # a step must hold a sequence
        rows, tokens = usual
        usual = rows, max(tokens, min(prepared.metered.model.max_positions, LONGEST_STEP))
    choices = [(rows, tokens) for rows in ROWS[kind] for tokens in STEP_TOKENS[kind]]
    for rows, tokens in sorted({usual, *choices}, key=lambda choice: choice != usual):
        yield Configuration(prepared, rows, tokens, not_yet=blocked, scheduling=scheduling)


def joined(base: Configuration, mesh: MeshSpec) -> Configuration:
    """The same with each replica on several devices; ConfigError if the mesh does not fit the model."""
    links = base.site.links
    if links is None:
        raise ConfigError(
            f"no link between several {base.site.name} is known; give --link, or devices of the catalogue that have one"
        )
    base.prepared.dims.check(mesh)
    return replace(base, layout=None if mesh.ranks == 1 else ParallelLayout(mesh, base.prepared.dims, links))


def separated(base: Configuration, engines: PlannedPools) -> Configuration:
    """The same with prefill and decode on engines of their own."""
    if base.site.links is None:
        raise ConfigError(
            f"no link between several {base.site.name} is known; give --link, or devices of the catalogue that have one"
        )
    if base.prepared.canvas is not None:
        raise ConfigError("a diffusion model has no prefill to separate")
    return replace(base, replicas=engines.engines, separation=engines)


def meshes(dims: ModelDims, ranks: int) -> list[MeshSpec]:
    """Layouts over this many devices that fit the model: tensor, pipeline, context and expert, and two at a time."""
    half = ranks // 2
    wanted = [MeshSpec(tp=ranks), MeshSpec(pp=ranks)]
    wanted += [MeshSpec(tp=half, pp=2), MeshSpec(tp=half, cp=2)] if half > 1 else [MeshSpec(cp=ranks)]
    if any(layer.experts is not None for layer in dims.layers):
        wanted.append(MeshSpec(tp=ranks, ep=ranks))
    return [mesh for mesh in wanted if _fits(dims, mesh)]


def _fits(dims: ModelDims, mesh: MeshSpec) -> bool:
    try:
        dims.check(mesh)
    except ConfigError:
        return False
    return True
