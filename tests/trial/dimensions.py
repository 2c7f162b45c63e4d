"""What a case is made of. Each dimension is declared once: its name, its values and their weights, and what it sets.
A new feature is a line here (and a line of `plain.py` where it changes the tokens); drawing, replaying, shrinking,
counting and the table of combinations follow from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bankfull.combinations import declarations, file_traits, model_traits, option_traits, refuse, without_data
from bankfull.declared import Trait
from bankfull.errors import ConfigError
from bankfull.ranks.mesh import ALONE
from bankfull.runtime.device import Cpu
from bankfull.scheduling import POLICIES
from bankfull.weights.source import open_model
from tests.trial import formats
from tests.trial.case import Case
from tests.trial.models import model_of
from tests.trial.setup import Setup, suits_late
from tests.trial.strategies import FOR_TINY, STRATEGIES

Value = Any


def _everywhere(model: str, value: Value) -> bool:
    return True


@dataclass(frozen=True)
class Option:
    """A dimension of the engine. The first value is what a case without it means."""

    name: str
    values: Mapping[Value, float]
    """With their weights. Values that start processes or threads, or cost seconds, are rare."""
    use: Callable[[Setup, Value], None]
    where: Callable[[str, Value], bool] = _everywhere
    """Whether a model and a value can be drawn together, where the trial itself has no such pair."""

    @property
    def usual(self) -> Value:
        return next(iter(self.values))


OPTIONS: dict[str, Option] = {}
DECLARED = ("strategy", "prefill_rows", "prefill_tokens", "tiers")
"""Dimensions whose refusals are asked of `bankfull.combinations`."""
TREE_SEED = 4
"""With it, drafters that propose chains or trees by a case's seed propose trees."""


def refused_for_certain(model: str, name: str, value: Value, options: Mapping[str, Value]) -> bool:
    """Pairs of which one is enough now and then: the table of combinations has them. `options`: those drawn before."""
    kind, layout = model.partition(":")[0], str(options.get("layout", ""))
    if name in DECLARED and _impossible(model, name, value, layout):
        return True
    if layout and _refused_on_ranks(name, value, layout):
        return True
    if name == "service" and value == "separate" and kind == "diffusion":
        return True
    if name == "prefix_cache" and options.get("service") == "separate":
        return not value
    if name == "format":
        return bool(value) and ("quantize" in options or not formats.fits(model, value))
    if name == "activations":
        rows = options.get("quantize") == "int8:row" or options.get("format") in formats.BY_ROW
        blocks = options.get("quantize", options.get("format", "fp8"))
        return (value == "token" and not rows) or (value == "int8" and "fp8" in blocks)
    return kind == "diffusion" and name in ("strategy", "layout") and value != OPTIONS[name].usual


@cache
def _traits(model: str) -> dict[Trait, bool]:
    files = open_model(model_of(model).folder)
    return model_traits(without_data(files), ALONE) | file_traits(files)


@cache
def _impossible(model: str, name: str, value: Value, layout: str) -> bool:
    """Whether one value is refused for what it declares. A tier of host memory is made by hand here."""
    setup = Setup(Case(TREE_SEED, model, {}), model_of(model))
    OPTIONS[name].use(setup, value)
    setup.run["parallel"] = layout
    run, sched, state = setup.configs()
    strategy = None if setup.strategy is None else setup.strategy([[1, 2, 3]])
    traits = _traits(model) | option_traits(Cpu(), run, state)
    try:
        refuse(declarations(run, sched, state, strategy), traits, run.mesh)
    except ConfigError:
        return True
    return False


def _refused_on_ranks(name: str, value: Value, layout: str) -> bool:
    """Host memory has no use on a CPU."""
    if name == "depth":
        return value == 1 and not suits_late(layout)
    return name == "tiers" and value in ("host", "both")


def _declare(
    name: str,
    values: Mapping[Value, float],
    use: Callable[[Setup, Value], None],
    where: Callable[[str, Value], bool] = _everywhere,
) -> None:
    OPTIONS[name] = Option(name, values, use, where)


def sets(part: str, name: str) -> Callable[[Setup, Value], None]:
    """The option of that name in `RunConfig`, `SchedConfig` or `StateConfig`."""
    return lambda setup, value: getattr(setup, part).__setitem__(name, value)


def rounds(name: str) -> Callable[[Setup, Value], None]:
    """A lossy option of `RunConfig`: the plain loop rounds alike."""

    def use(setup: Setup, value: Value) -> None:
        setup.run[name] = value
        setup.rounds = True

    return use


def marks(name: str) -> Callable[[Setup, Value], None]:
    return lambda setup, value: setattr(setup, name, value)


def _evenly(*values: Value, first: float = 1.0) -> dict[Value, float]:
    return {value: first if i == 0 else 1.0 for i, value in enumerate(values)}


def _batching(setup: Setup, value: str) -> None:
    setup.sched |= {"batching": value, "batch_size": 2} | ({"batch_timeout": 0.002} if value == "dynamic" else {})


def _tiers(setup: Setup, value: str) -> None:
    if value == "disk":
        setup.state["kv_disk"] = "256KiB"
    else:
        setup.tiers = value
    setup.tight = setup.tight or bool(value)


def _layout(setup: Setup, value: str) -> None:
    setup.run["parallel"], setup.driver = value, "ranks"


def _format(setup: Setup, value: str) -> None:
    setup.model = formats.published(setup.case.model, value)


LAYOUTS = ("tp=2", "pp=2", "cp=2", "tp=2,pp=2", "tp=2,sp=on", "ffn=1", "tp=2,ffn=1", "cp=2,ep=2")
ON_RANKS = ("off", "auto", "lookup", "ngram", "suffix", "jacobi", "lookahead", "draft", "draft-typical", "mtp")
"""Strategies that ranks have: those with a name, which every rank makes by itself, or that the host has alone."""

_declare("driver", {"engine": 12.0, "http": 1.5}, marks("driver"))
_declare("service", {"": 8.0, "replicas": 1.0, "separate": 1.0}, marks("service"))
_declare(
    "strategy",
    _evenly(*STRATEGIES, first=4.0) | {"guess": 6.0, "lookup": 4.0, "tree": 3.0},
    lambda setup, value: STRATEGIES[value](setup),
    lambda model, value: value not in FOR_TINY or model.startswith("tiny:"),
)
_declare(
    "diffusion",
    {"": 1.0, "threshold=0.4": 1.0, "threshold=1,tokens=3": 1.0, "threshold=0.5,tokens=2": 1.0},
    sets("run", "diffusion"),
    lambda model, value: not value or model.startswith("diffusion:"),
)
_declare(
    "layout",
    {"": 60.0} | dict.fromkeys(LAYOUTS, 0.3),
    _layout,
)
_declare("page", {4: 3.0, 1: 1.0, 16: 2.0}, sets("state", "page_tokens"))
_declare("chunk", {16: 3.0, 1: 0.5, 7: 2.0, 64: 2.0}, sets("sched", "step_tokens"))
_declare("rows", {4: 3.0, 1: 1.0, 2: 1.0}, sets("sched", "rows"))
_declare("policy", _evenly(*sorted(POLICIES, key=lambda name: name != "fcfs"), first=8.0), sets("sched", "policy"))
_declare("batching", {"continuous": 12.0, "static": 1.0, "dynamic": 1.0}, _batching)
_declare("prefill_tokens", {0: 8.0, 3: 1.0}, sets("sched", "prefill_tokens"))
_declare("prefill_rows", {0: 8.0, 1: 1.0}, sets("sched", "prefill_rows"))
_declare("decode_rows", {0: 8.0, 1: 1.0}, sets("sched", "decode_rows"))
_declare("step_ms", {0.0: 6.0, 0.25: 1.0}, sets("sched", "step_ms"))
_declare("prefix_cache", {True: 5.0, False: 1.0}, sets("state", "prefix_cache"))
_declare("snapshot_every", {2: 2.0, 1: 1.0, 16: 1.0}, sets("state", "snapshot_every"))
_declare("pool", {"roomy": 2.0, "tight": 1.0}, lambda setup, value: setattr(setup, "tight", value == "tight"))
_declare("preempt", {False: 3.0, True: 1.0}, marks("preempts"))
_declare("tiers", {"": 6.0, "host": 1.0, "disk": 1.0, "both": 1.0}, _tiers)
_declare("kv_dtype", {"auto": 12.0, "bfloat16": 1.0, "int8": 1.0, "fp8": 1.0, "int4": 1.0}, rounds("kv_dtype"))
_declare("kv_evict", {"": 20.0, "sinks:2,window:9": 1.0}, rounds("kv_evict"))
_declare(
    "quantize",
    {
        "": 16.0,
        "int8": 1.0,
        "int8:row": 0.5,
        "int4:32": 1.0,
        "fp8": 0.1,
        "q8_0": 0.5,
        "q4_k,keep": 0.2,
        "llm.int8": 0.1,
    },
    rounds("quantize"),
)
_declare(
    "format",
    {"": 120.0}
    | dict.fromkeys(formats.NAMES, 1.0)
    | dict.fromkeys(formats.GGUF, 4.0)
    | {"made awq": 0.2, "made gptq": 0.4},
    _format,
)
# Rare as they are with weights that suit them. Not int8-few: what it computes depends on the number of a step's rows.
_declare("activations", {"float": 24.0, "int8": 6.0, "token": 12.0, "bf16": 1.0}, rounds("activations"))
_declare("providers", {"auto": 4.0, "torch": 1.0}, sets("run", "providers"))
_declare("depth", {0: 2.0, 1: 1.0}, lambda setup, value: setattr(setup, "late", bool(value)))
_declare("captured", {True: 5.0, False: 1.0}, marks("captured"))
_declare(
    "written",
    {"": 5.0, "goes on": 1.0, "restart": 1.0},
    marks("written"),
    lambda model, value: not value or not model.startswith("diffusion:"),
)
