"""From a model's name to an engine that runs it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from bankfull.building import build_weights, plan_build, ran_out_of_memory
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.adaptive import halved
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Strategy
from bankfull.drafters import adaptive_width, device_strategy, host_drafting, no_automatic_drafts
from bankfull.engine import Engine
from bankfull.errors import ConfigError
from bankfull.frontend import Frontend
from bankfull.layers.apart import Feeds, with_remote_feeds
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import family_of, stages_of
from bankfull.ops import Kit, native
from bankfull.ops.activations import INT8
from bankfull.precision import choose_dtype
from bankfull.quantize.at_load import as_multiplied
from bankfull.runtime.captured_chunks import sizes_for as captured_prompts
from bankfull.runtime.denoised import suited_state, suited_steps, suited_strategy
from bankfull.runtime.device import Device, open_device
from bankfull.runtime.device_runner import DeviceRunner, captured_widths
from bankfull.runtime.forward import Eager
from bankfull.runtime.memory import Sizes, plan_memory, shown
from bankfull.runtime.refused import (
    refuse_eviction_without_use,
    refuse_feed_ranks_without_use,
    refuse_other_format,
    refuse_other_size,
    refuse_pages_without_use,
    refuse_short_context,
)
from bankfull.runtime.rehearsal import every_kind, largest, rehearsal
from bankfull.runtime.tiering import add_tiers, begun_fingerprint, state_facts
from bankfull.sched.canvas import Canvas
from bankfull.sched.scheduler import Scheduler
from bankfull.speculation import SpeculativeChoice
from bankfull.state.manager import StateManager
from bankfull.state.spec import Layout, joined_states, layout_of
from bankfull.text.load import load_tokenizer
from bankfull.text.template import ChatTemplate
from bankfull.text.tokenizer import Tokenizer
from bankfull.weights.locate import locate
from bankfull.weights.requantized import inner_weights
from bankfull.weights.source import ModelFiles, open_model

if TYPE_CHECKING:
    from bankfull.parallel.following import FeedRunner
    from bankfull.parallel.groups import Ranks

log = logging.getLogger("bankfull")

OFFERED = frozenset[str]()
"""Features that a strategy may need beyond hidden states and logits: none so far."""


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


@dataclass(slots=True)
class Loaded(Assembled):
    """A model that is ready to run on text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    frontend: Frontend


def load(
    name: str,
    run: RunConfig,
    sched: SchedConfig,
    state: StateConfig,
    max_len: int | None = None,
    *,
    device: Device | None = None,
    strategy: Strategy | None = None,
    text: tuple[Tokenizer, ChatTemplate | None] | None = None,
) -> Loaded:
    """`device`, `strategy`: instead of the configuration's. `text`: tokenizer and chat template, if read already."""
    files = open_model(locate(name))
    refuse_other_format(files, run.stored)
    family_of(files.config)  # refuses an unsupported architecture before anything else is read
    with ThreadPoolExecutor(1) as pool:  # one thread reads the vocabulary; the kernels' threads repack weights
        reading = pool.submit(lambda: text or load_tokenizer(files))
        device = device or open_device(run.device)
        if run.mesh.ranks > 1:
            made = assemble_leader(name, files, run, sched, state, max_len, device)
        else:
            made = assemble(files, run, sched, state, max_len=max_len, device=device, strategy=strategy)
        tokenizer, template = reading.result()
    frontend = Frontend(
        made.engine, tokenizer, template, vocab=made.model.vocab, max_len=made.sizes.max_len, seed=run.seed
    )
    parts = {field.name: getattr(made, field.name) for field in fields(made)}
    return Loaded(**parts, tokenizer=tokenizer, template=template, frontend=frontend)


def assemble_leader(
    name: str,
    files: ModelFiles,
    run: RunConfig,
    sched: SchedConfig,
    state: StateConfig,
    max_len: int | None,
    device: Device,
) -> Assembled:
    """Rank 0 of a model over several ranks, which it starts."""
    from bankfull.parallel.leading import lead
    from bankfull.parallel.refused import refuse_layout

    run = replace(run, device=device.kind)
    refuse_layout(run, state, files.config)

    def own_part(run: RunConfig, ranks: Ranks) -> Assembled:
        return assemble(files, run, sched, state, max_len=max_len, device=device, ranks=ranks)

    made, followers = lead(name, files.path, run, sched, state, max_len, device, own_part)
    followers.attach(made.engine.runner, made.engine.scheduler.state)
    return made


def load_rank(
    name: str, run: RunConfig, sched: SchedConfig, state: StateConfig, max_len: int | None, ranks: Ranks
) -> DeviceRunner:
    """The runner of another rank: the same model, state and steps as rank 0's."""
    device = open_device(run.device)
    made = assemble(open_model(locate(name)), run, sched, state, max_len=max_len, device=device, ranks=ranks)
    return made.engine.runner


def load_feeds(name: str, run: RunConfig, sched: SchedConfig, max_len: int | None, ranks: Ranks) -> FeedRunner:
    """The runner of a rank of feed-forward layers."""
    from bankfull.parallel.following import FeedRunner

    device = open_device(run.device)
    files = open_model(locate(name))
    files = as_multiplied(files, run, device, choose_dtype(run.dtype, files, device.kind))
    if run.threads is not None:
        native.set_threads(run.threads)
    whole = plan_build(files, run, device, max_len or 0)
    model = build_weights(files, ranks.build(whole, stages_of(files.config, run.mesh.pp)), device)
    assert ranks.sides is not None
    feeds = Feeds(whole, model, ranks.sides)
    if device.kind != "cpu":  # the ranks with mixers measure the memory of these steps
        for size in measured_steps(suited_steps(model, sched.suited(**device.suits), sched.step_tokens, max_len)):
            device.peak(partial(feeds.run, sum(size)))
    return FeedRunner(feeds, device)


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
) -> Assembled:
    """An engine over a configuration and any source of tensors. `ranks`: this rank's groups, if the model is split."""
    device = device or open_device(run.device)
    choice = SpeculativeChoice.parse(run.speculative if strategy is None else "off")
    fingerprint = begun_fingerprint(files, state)
    pages = None if ranks is None else ranks.pages
    strategy = strategy or device_strategy(choice, files, run, device, pages) or Plain()
    files = as_multiplied(files, run, device, choose_dtype(run.dtype, files, device.kind))
    if missing := ", ".join(sorted(strategy.needs - OFFERED)):
        raise ConfigError(f"{type(strategy).__name__} needs {missing}, which is not offered; choose another strategy.")
    if run.threads is not None:
        native.set_threads(run.threads)
    if device.kind == "cpu" and run.providers == "auto":
        native.notify()
    asked, sched = sched.step_tokens, sched.suited(**device.suits)
    phases = Phases()
    build = plan_build(files, run, device, max_len or 0)
    if ranks is not None:
        build = ranks.build(build, stages_of(files.config, run.mesh.pp))
    # How many tokens an expert gets is known in the step only, which tokens a rank has follows from lengths, and other
    # ranks run the feed-forward layers.
    uncaptured = run.mesh.ep > 1 or run.mesh.cp > 1 or run.mesh.sp != "off" or run.mesh.ffn > 0
    captured_kit = None if uncaptured else build.kit
    if run.activations == "auto" and build.activations.blocks is INT8 and not build.activations.copies:
        log.warning(
            "a second copy of the weights would take up to %s, more than a quarter of the free memory; steps of many "
            "rows are slower without it (activations='int8' makes it anyway).",
            shown(inner_weights(files.source)),
        )
    model = build_weights(files, build, device)
    if ranks is not None and ranks.sides is not None:
        refuse_feed_ranks_without_use(model, run.mesh)
        model = with_remote_feeds(build, model, ranks.sides)
    strategy = suited_strategy(model, strategy, run, choice)
    state, sched = suited_state(model, state), suited_steps(model, sched, asked, max_len)
    strategy.prepare(model)
    phases.end("weights")
    refuse_other_size(model, strategy)
    refuse_pages_without_use(layout_of(model.states(), state.page_tokens), run.kv_dtype)
    layout = layout_of(joined_states(model.states(), strategy.states()), state.page_tokens)
    if build.stage is not None:
        layout = layout.held(build.stage.first, build.stage.last)
    depth = device.depth if run.depth is None else run.depth
    if run.mesh.pp > 1:
        depth = run.mesh.pp
    drafting = None if strategy.canvas is not None else host_drafting(choice, device, layout, depth)
    guesses = 0 if drafting is None else drafting.width
    adaptive = adaptive_width(choice, strategy)
    widths = (*(() if adaptive is None else strategy.widths()), *halved(guesses))
    with refusing_large_steps(device, sched):
        captured = captured_widths(strategy, widths)
        kinds = every_kind(model, layout, device, captured_kit, sched.rows, sched.step_tokens, captured)
        if not run.mesh.ffn:  # other ranks run a part of each step, and none of these
            device.compile_ahead(kinds, build.kit)
        phases.end("kernels compiled")
        aside = step_memory(model, layout, device, sched) + (0 if ranks is None else ranks.bytes_of_copies)
    phases.end("the largest step")
    sizes = plan_memory(
        layout,
        sched,
        state,
        free=device.free_memory() - aside,
        depth=depth,
        made_for=model.max_positions,
        max_len=max_len,
        drafts=max(strategy.width(0), guesses),
        share=device.share,
        page_ranks=run.mesh.page_ranks,
    )
    if ranks is not None:  # all know the same pages, as many as the ranks hold if each has the least memory
        frames, slots, rows, length = ranks.least((sizes.frames, sizes.slots, sizes.rows, sizes.max_len))
        sizes = Sizes(frames, slots, rows, length, sizes.notices)
    refuse_short_context(sizes.max_len, strategy)
    refuse_eviction_without_use(layout_of(model.states(), state.page_tokens), build.kv_evict, sizes.max_len)
    for notice in sizes.notices:
        log.warning(notice)
    sched = replace(sched, rows=sizes.rows)
    manager = StateManager(layout, sizes.frames, sizes.slots, state)
    try:
        runner = DeviceRunner(
            model,
            layout,
            device,
            strategy,
            rows=sizes.rows,
            max_len=sizes.max_len,
            frames=sizes.frames,
            slots=sizes.slots,
            kit=captured_kit,
            step_tokens=sched.step_tokens,
            guesses=guesses,
            widths=widths,
        )
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        size = shown(sizes.nbytes(layout))
        raise ConfigError(f"The {size} of {sizes.frames} pages could not be allocated; lower memory.") from error
    add_tiers(manager, runner, state, state_facts(files, build, run, fingerprint), ranks)
    phases.end("state and captured steps")
    canvas = None if strategy.canvas is None else Canvas(strategy.canvas, sizes.max_len)
    scheduler = Scheduler(sched, manager, ahead=strategy.ahead, canvas=canvas)
    if ranks is not None:
        scheduler.stages, runner.chooses = run.mesh.pp, ranks.chooses
    engine = Engine(scheduler, runner, strategy, depth, drafting=drafting, adaptive=adaptive)
    engine.draft_ways = choice.ways(drafting is not None)
    if engine.no_drafts and choice.name == "auto":
        engine.no_drafts = no_automatic_drafts(device, layout) or engine.no_drafts
    return Assembled(files, build, model, device, layout, sizes, engine, phases.seconds)


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
