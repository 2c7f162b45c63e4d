"""From a model's name to an engine that runs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from bankfull.assembly import Assembled, assemble, measured_steps
from bankfull.building import build_weights, plan_build
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.strategy import Strategy
from bankfull.frontend import Frontend
from bankfull.layers.apart import Feeds
from bankfull.models.registry import family_of, stages_of
from bankfull.ops import native
from bankfull.precision import choose_dtype
from bankfull.quantize.at_load import as_multiplied
from bankfull.runtime.denoised import suited_steps
from bankfull.runtime.device import Device, open_device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.runtime.refused import refuse_other_format
from bankfull.text.load import load_tokenizer
from bankfull.text.template import ChatTemplate
from bankfull.text.tokenizer import Tokenizer
from bankfull.weights.locate import locate
from bankfull.weights.source import ModelFiles, open_model

if TYPE_CHECKING:
    from bankfull.parallel.following import FeedRunner
    from bankfull.parallel.groups import Ranks


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
            assembled = assemble_leader(name, files, run, sched, state, max_len, device)
        else:
            assembled = assemble(files, run, sched, state, max_len=max_len, device=device, strategy=strategy)
        tokenizer, template = reading.result()
    frontend = Frontend(
        assembled.engine,
        tokenizer,
        template,
        vocab=assembled.model.vocab,
        max_len=assembled.sizes.max_len,
        seed=run.seed,
    )
    parts = {field.name: getattr(assembled, field.name) for field in fields(assembled)}
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

    assembled, followers = lead(name, files.path, run, sched, state, max_len, device, own_part)
    followers.attach(assembled.engine.runner, assembled.engine.scheduler.state)
    return assembled


def load_rank(
    name: str, run: RunConfig, sched: SchedConfig, state: StateConfig, max_len: int | None, ranks: Ranks
) -> DeviceRunner:
    """The runner of another rank: the same model, state and steps as rank 0's."""
    device = open_device(run.device)
    assembled = assemble(open_model(locate(name)), run, sched, state, max_len=max_len, device=device, ranks=ranks)
    return assembled.engine.runner


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
