"""An engine with random weights, and traces of its runs; built from the same classes as the offline API."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from bankfull.assembly import Assembled, assemble
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.strategy import Strategy
from bankfull.errors import RequestError
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.closed_form import ClosedForm, closed_form
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import least_seconds
from bankfull.limits.meter.step import StepShape
from bankfull.ops.cost import Cost
from bankfull.quantize.outliers import NAME as LLM_INT8
from bankfull.runtime.device import open_device
from bankfull.runtime.rows import Job
from bankfull.sample.params import SamplingParams
from bankfull.synthetic.random_weights import RandomWeights, random_model
from bankfull.synthetic.shapes import shape_config, with_layers
from bankfull.types import Request, StepPlan
from benchmarks.gpu.mxfp4 import MXFP4Experts
from benchmarks.gpu.outliers import with_outliers

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """Configuration of an engine; works with the same set-up share one."""

    shape: str
    quantize: str | None = None
    dtype: str = "bfloat16"
    rows: int = 256
    step_tokens: int = 8192
    max_len: int = 4096
    layers: int | None = None
    """Layers of a shortened model; None = all."""
    diffusion: str = ""
    """Options of denoising, for diffusion models."""
    activations: str = "auto"
    kv_dtype: str = "auto"
    mxfp4: bool = False
    """Whether experts are MXFP4."""

    @property
    def config(self) -> dict[str, Any]:
        config = shape_config(self.shape)
        return config if self.layers is None else with_layers(config, self.layers)

    @property
    def label(self) -> str:
        """The model's name, for display."""
        return self.shape if self.layers is None else f"{self.shape} ({self.layers} layers)"

    @property
    def weights(self) -> str:
        """Storage of the weights, for display."""
        rounded = "" if self.activations == "auto" else f", activations by {self.activations}"
        cached = "" if self.kv_dtype == "auto" else f", {self.kv_dtype} K/V"
        experts = ", MXFP4 experts" if self.mxfp4 else ""
        return f"{self.quantize or self.dtype}{experts}{rounded}{cached}"


@dataclass(slots=True)
class Trace:
    """One run of some requests. Times are in seconds of host time since the first request was added."""

    shapes: list[StepShape] = field(default_factory=list)
    launched: list[float] = field(default_factory=list)
    """Planning time of the step with the same index."""
    tokens: list[tuple[float, int, bool]] = field(default_factory=list)
    """(time, request, whether it is the last) of each token."""
    ids: list[int] = field(default_factory=list)
    """Token ids, in the order of `tokens`."""
    seconds: float = 0.0

    @property
    def all_started(self) -> float:
        """When every request had its first token."""
        first: dict[int, float] = {}
        for now, request, _ in self.tokens:
            first.setdefault(request, now)
        return max(first.values())

    @property
    def first_ended(self) -> float:
        return min(now for now, _, last in self.tokens if last)

    def decode_shapes(self) -> list[StepShape]:
        """Shapes of the pure decode steps."""
        return [shape for shape in self.shapes if shape.tokens == len(shape.counts)]


class Session:
    """One engine and its runs."""

    def __init__(
        self,
        setup: Setup,
        device: str = "auto",
        seed: int = 0,
        strategy: Strategy | None = None,
        weights: type[RandomWeights] | None = None,
    ) -> None:
        self.setup, self._random = setup, random.Random(seed)
        opened = open_device(device)
        begun = perf_counter()
        dtype: torch.dtype = getattr(torch, setup.dtype)
        drawn = weights or (MXFP4Experts if setup.mxfp4 else RandomWeights)
        if setup.quantize == "2:4":  # the option drops zeros that are there already
            from benchmarks.gpu.sparse24 import PrunedWeights

            drawn = PrunedWeights
        files = random_model(setup.shape, setup.config, dtype, opened.torch, weights=drawn)
        quantize = setup.quantize
        if quantize == LLM_INT8:
            files, quantize = with_outliers(files, opened.torch), None
        run = RunConfig(
            device=device,
            dtype=setup.dtype,
            quantize=quantize,
            activations=setup.activations,
            kv_dtype=setup.kv_dtype,
            speculative="off",
            diffusion=setup.diffusion,
        )
        sched = SchedConfig(rows=setup.rows, step_tokens=setup.step_tokens)
        self.made: Assembled = assemble(
            files, run, sched, StateConfig(), max_len=setup.max_len, device=opened, strategy=strategy
        )
        self.engine = self.made.engine
        self.phases: dict[str, float] = dict(self.made.phases)
        """Seconds of each part of the start-up."""
        self.phases["start, in all"] = perf_counter() - begun
        self.run([self.prompt(8)], 2)
        self.phases["first tokens"] = perf_counter() - begun - self.phases["start, in all"]

    @property
    def dtype(self) -> str:
        return str(self.made.build.dtype).removeprefix("torch.")

    @cached_property
    def form(self) -> ClosedForm:
        """Minimum cost of a step, from the meter, for the weights as stored in this engine."""
        build = self.made.build
        return closed_form(MeteredModel.of_build(self.made.files, build))

    def cost(self, shapes: Sequence[StepShape]) -> Cost:
        return sum((self.form.cost(shape) for shape in shapes), Cost())

    def least(self, shapes: Sequence[StepShape], ceilings: Ceilings) -> float:
        """Shortest time in seconds of these steps on these ceilings."""
        costs = [self.form.cost(shape) for shape in shapes]
        return least_seconds(costs, ceilings, self.dtype)

    def prompt(self, length: int) -> list[int]:
        """Different each time, so that the prefix cache is never hit."""
        return self._random.choices(range(self.made.model.vocab), k=length)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [self.prompt(length) for _ in range(count)]

    def run(
        self, prompts: Sequence[Sequence[int]], outputs: int, before: Callable[[Trace], None] | None = None
    ) -> Trace:
        """Run all prompts at once with `outputs` tokens each; `before` is called before each step."""
        trace, engine = Trace(), self.engine
        begun = perf_counter()

        def note(plan: StepPlan) -> None:
            if plan.work:
                trace.shapes.append(StepShape.of(plan.work))
                trace.launched.append(perf_counter() - begun)

        engine.on_launch.append(note)
        try:
            for number, prompt in enumerate(prompts):
                job = Job(GREEDY, number)
                engine.add(Request(number, tuple(prompt), len(prompt) + outputs, payload=job))
            engine.scheduler.sealed = True
            while engine.busy:
                if before is not None:
                    before(trace)
                settled = engine.step()
                now = perf_counter() - begun
                for output in settled:
                    if output.error is not None:
                        raise RequestError(output.error)
                    trace.ids += output.tokens
                    for i in range(len(output.tokens)):
                        last = output.finish is not None and i == len(output.tokens) - 1
                        trace.tokens.append((now, int(str(output.request)), last))
        finally:
            engine.scheduler.sealed = False
            engine.on_launch.remove(note)
            for number in range(len(prompts)):
                engine.abort(number)
                engine.started.pop(number, None)
        trace.seconds = perf_counter() - begun
        return trace
