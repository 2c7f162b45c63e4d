"""An engine from a configuration and a source of tensors, part by part."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from bankfull.building import build_weights, plan_build, ran_out_of_memory
from bankfull.combinations import Asked, refuse_impossible
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.adaptive import halved
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Strategy
from bankfull.drafters import adaptive_width, device_strategy, host_drafting, no_automatic_drafts
from bankfull.engine import Engine
from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import stages_of
from bankfull.ops import Kit, native
from bankfull.ops.products.activations import INT8
from bankfull.precision import choose_dtype
from bankfull.quantize.at_load import as_multiplied
from bankfull.runtime.captured_chunks import sizes_for as captured_prompts
from bankfull.runtime.denoised import suited_state, suited_steps, suited_strategy
from bankfull.runtime.device import Device, open_device
from bankfull.runtime.device_runner import DeviceRunner, captured_widths
from bankfull.runtime.forward import Eager
from bankfull.runtime.memory import Sizes, plan_memory, shown
from bankfull.runtime.refused import refuse_eviction_without_use, refuse_other_size, refuse_short_context
from bankfull.runtime.rehearsal import every_kind, largest, rehearsal
from bankfull.runtime.tiering import add_tiers, begun_fingerprint, state_facts
from bankfull.sched.canvas import Canvas
from bankfull.sched.scheduler import Scheduler
from bankfull.speculation import SpeculativeChoice
from bankfull.spread.apart import with_remote_feeds
from bankfull.state.manager import StateManager
from bankfull.state.spec import Layout, joined_states, layout_of
from bankfull.weights.requantized import inner_weights
from bankfull.weights.source import ModelFiles

if TYPE_CHECKING:
    from bankfull.parallel.groups import Ranks

log = logging.getLogger("bankfull")


@dataclass(slots=True)
class Assembled:
    """A model that is ready to run on tokens, and everything it came with."""

    files: ModelFiles
    build: Build
    """The options as dtypes, and the provider of each of the model's operations."""
    model: Decoder
    device: Device
    layout: Layout
    sizes: Sizes
    engine: Engine[DeviceRunner]
    phases: dict[str, float]
    """Seconds of each part of the start."""
    run: RunConfig

    @property
    def kit(self) -> Kit:
        return self.build.kit

    @property
    def start(self) -> str | None:
        """The parts of the start and their seconds in one line; None on a CPU, where all of it loads weights."""
        if self.device.kind == "cpu":
            return None
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items())
        replaying = self.engine.runner.replaying
        recorded = "" if replaying is None else f"; {replaying.recorded}"
        return f"{sum(self.phases.values()):.1f} s ({parts}{recorded})"

    @property
    def uncaptured(self) -> str | None:
        """Why steps run without capture although the device captures steps: one sentence."""
        run = self.engine.runner.run_model
        return run.uncaptured if isinstance(run, Eager) else None


def assemble(
    files: ModelFiles,
    run: RunConfig,
    sched: SchedConfig,
    state: StateConfig,
    *,
    max_len: int | None = None,
    device: Device | None = None,
    strategy: Strategy | None = None,
    ranks: Ranks | None = None,
    also: Asked = (),
) -> Assembled:
    """An engine over a configuration and any source of tensors. `ranks`: this rank's groups, if the model is split; the
    first rank has refused what is impossible. `also`: what the engine is for, beside its options."""
    device = device or open_device(run.device)
    if ranks is None:
        refuse_impossible(files, device, run, sched, state, strategy, also)
    return Assembly(files, run, sched, state, max_len, device, strategy, ranks).made()


class Assembly:
    """The parts of an engine, in the order in which they are made: each needs those before it."""

    def __init__(
        self,
        files: ModelFiles,
        run: RunConfig,
        sched: SchedConfig,
        state: StateConfig,
        max_len: int | None,
        device: Device,
        strategy: Strategy | None,
        ranks: Ranks | None,
    ) -> None:
        self.run, self.max_len, self.device, self.ranks = run, max_len, device, ranks
        self.choice = SpeculativeChoice.parse(run.speculative if strategy is None else "off")
        self.fingerprint = begun_fingerprint(files, state)
        pages = None if ranks is None else ranks.pages
        self.strategy = strategy or device_strategy(self.choice, files, run, device, pages) or Plain()
        self.files = as_multiplied(files, run, device, choose_dtype(run.dtype, files, device.kind))
        if run.threads is not None:
            native.set_threads(run.threads)
        if device.kind == "cpu" and run.providers == "auto":
            native.notify()
        self.sched, self.state = sched.suited(**device.suits), state
        self._asked_tokens = sched.step_tokens
        self.phases = Phases()

    def made(self) -> Assembled:
        self._make_model()
        self._choose_drafts()
        self._choose_memory()
        engine = self._engine(self._runner())
        parts = (self.files, self.build, self.model, self.device, self.layout, self.sizes, engine)
        return Assembled(*parts, self.phases.seconds, self.run)

    def _make_model(self) -> None:
        """The weights, and what the model changes in the options."""
        run, device, ranks = self.run, self.device, self.ranks
        build = plan_build(self.files, run, device, self.max_len or 0)
        if ranks is not None:
            build = ranks.build(build, stages_of(self.files.config, run.mesh.pp))
        if run.activations == "auto" and build.activations.blocks is INT8 and not build.activations.copies:
            log.warning(
                "a second copy of the weights would take up to %s, more than a quarter of the free memory; steps of "
                "many rows are slower without it (activations='int8' makes it anyway).",
                shown(inner_weights(self.files.source)),
            )
        model = build_weights(self.files, build, device)
        if ranks is not None and ranks.sides is not None:
            model = with_remote_feeds(build, model, ranks.sides)
        self.build, self.model = build, model
        self.strategy = suited_strategy(model, self.strategy, run)
        self.state = suited_state(model, self.state)
        self.sched = suited_steps(model, self.sched, self._asked_tokens, self.max_len)
        self.strategy.prepare(model)
        self.phases.end("weights")
        refuse_other_size(model, self.strategy)
        self.layout = layout_of(joined_states(model.states(), self.strategy.states()), self.state.page_tokens)
        if build.stage is not None:
            self.layout = self.layout.held(build.stage.first, build.stage.last)

    def _choose_drafts(self) -> None:
        """How many steps the host runs ahead, and how many drafts a step may verify."""
        run, strategy = self.run, self.strategy
        self.depth = self.device.depth if run.depth is None else run.depth
        if run.mesh.pp > 1:
            self.depth = run.mesh.pp
        looks_up = strategy.canvas is None
        self.drafting = host_drafting(self.choice, self.device, self.layout, self.depth) if looks_up else None
        self.guesses = 0 if self.drafting is None else self.drafting.width
        self.adaptive = adaptive_width(self.choice, strategy)
        self.widths = (*(() if self.adaptive is None else strategy.widths()), *halved(self.guesses))

    @property
    def captured_kit(self) -> Kit | None:
        """None where steps cannot be captured: how many tokens an expert gets is known in the step only, which tokens a
        rank has follows from lengths, and other ranks run the feed-forward layers."""
        mesh = self.run.mesh
        return None if mesh.ep > 1 or mesh.cp > 1 or mesh.sp != "off" or mesh.ffn > 0 else self.build.kit

    def _choose_memory(self) -> None:
        """Pages, slots, rows and the longest sequence, by what the largest step leaves."""
        run, device, sched, ranks = self.run, self.device, self.sched, self.ranks
        with refusing_large_steps(device, sched):
            captured = captured_widths(self.strategy, self.widths)
            kinds = every_kind(
                self.model, self.layout, device, self.captured_kit, sched.rows, sched.step_tokens, captured
            )
            if not run.mesh.ffn:  # other ranks run a part of each step, and none of these
                device.compile_ahead(kinds, self.build.kit)
            self.phases.end("kernels compiled")
            reserved = step_memory(self.model, self.layout, device, sched)
            reserved += 0 if ranks is None else ranks.bytes_of_copies
        self.phases.end("the largest step")
        sizes = plan_memory(
            self.layout,
            sched,
            self.state,
            free=device.free_memory() - reserved,
            depth=self.depth,
            made_for=self.model.max_positions,
            max_len=self.max_len,
            drafts=max(self.strategy.width(0), self.guesses),
            share=device.share,
            page_ranks=run.mesh.page_ranks,
        )
        if ranks is not None:  # all know the same pages, as many as the ranks hold if each has the least memory
            frames, slots, rows, length = ranks.least((sizes.frames, sizes.slots, sizes.rows, sizes.max_len))
            sizes = Sizes(frames, slots, rows, length, sizes.notices)
        refuse_short_context(sizes.max_len, self.strategy)
        refuse_eviction_without_use(self.build.kv_evict, sizes.max_len)
        for notice in sizes.notices:
            log.warning(notice)
        self.sizes, self.sched = sizes, replace(sched, rows=sizes.rows)

    def _runner(self) -> DeviceRunner:
        sizes = self.sizes
        try:
            return DeviceRunner(
                self.model,
                self.layout,
                self.device,
                self.strategy,
                rows=sizes.rows,
                max_len=sizes.max_len,
                frames=sizes.frames,
                slots=sizes.slots,
                kit=self.captured_kit,
                step_tokens=self.sched.step_tokens,
                guesses=self.guesses,
                widths=self.widths,
            )
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            size = shown(sizes.nbytes(self.layout))
            raise ConfigError(f"The {size} of {sizes.frames} pages could not be allocated; lower memory.") from error

    def _engine(self, runner: DeviceRunner) -> Engine[DeviceRunner]:
        ranks, strategy, state = self.ranks, self.strategy, self.state
        manager = StateManager(self.layout, self.sizes.frames, self.sizes.slots, state)
        add_tiers(manager, runner, state, state_facts(self.files, self.build, self.run, self.fingerprint), ranks)
        self.phases.end("state and captured steps")
        canvas = None if strategy.canvas is None else Canvas(strategy.canvas, self.sizes.max_len)
        scheduler = Scheduler(self.sched, manager, ahead=strategy.ahead, canvas=canvas)
        if ranks is not None:
            scheduler.stages, runner.chooses = self.run.mesh.pp, ranks.chooses
        engine = Engine(scheduler, runner, strategy, self.depth, drafting=self.drafting, adaptive=self.adaptive)
        engine.draft_ways = self.choice.ways(self.drafting is not None)
        if engine.no_drafts and self.choice.name == "auto":
            engine.no_drafts = no_automatic_drafts(self.device, self.layout) or engine.no_drafts
        return engine


class Phases:
    """Seconds of each part of a start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = perf_counter()

    def end(self, name: str) -> None:
        now = perf_counter()
        self.seconds[name] = now - self._begun
        self._begun = now
        log.info(f"{name}: {self.seconds[name]:.2f} s")


def measured_steps(sched: SchedConfig) -> list[list[int]]:
    """New tokens per sequence of the steps whose memory is measured: the largest one, and the largest captured one of
    prompts."""
    return [largest(sched.rows, sched.step_tokens), *([size] for size in captured_prompts(sched.step_tokens)[-1:])]


def step_memory(model: Decoder, layout: Layout, device: Device, sched: SchedConfig) -> int:
    """Bytes of the largest step beside weights and state, measured where the device can, plus those of the largest
    captured step of prompts, since graphs keep their memory."""
    if device.kind == "cpu":
        return 0
    return sum(device.peak(rehearsal(model, layout, device, size)) for size in measured_steps(sched))


@contextmanager
def refusing_large_steps(device: Device, sched: SchedConfig) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"A step of {sched.step_tokens} tokens does not fit beside the weights: {shown(device.free_memory())} are "
            "free; lower step_tokens or rows."
        ) from error
