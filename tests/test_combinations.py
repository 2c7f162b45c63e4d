"""What options declare: each declaration can be asked for, and what it refuses is refused before a weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from bankfull import assembly, precision
from bankfull.assembly import assemble
from bankfull.choices import ACTIVATIONS, GIVEN, PAGE_TYPES, ROUNDING, SEPARATE, SPARSE
from bankfull.combinations import declarations, every_declaration, refuse_impossible
from bankfull.config import DiffusionChoice, RunConfig, SchedConfig, StateConfig
from bankfull.declared import Declared, Trait, judged
from bankfull.decode.diffusion import Denoising
from bankfull.decode.plain import Plain
from bankfull.errors import ConfigError
from bankfull.familiar import configure
from bankfull.loading import load
from bankfull.precision import choose_activations
from bankfull.ranks.mesh import LAYOUTS, SEQUENCE
from bankfull.runtime.device import Cpu
from bankfull.sched.gates import GATES
from bankfull.sched.policies import policy_of
from bankfull.scheduling import BATCHING, POLICIES, readers
from bankfull.speculation import OWN, OWN_TREES, SPECULATIVE
from bankfull.weights.requantized import Requantized
from bankfull.weights.source import ModelFiles, open_model
from tests.models.diffusion import make
from tests.parallel.apart_device import ApartCpu
from tests.tiny import config_of, folder_of

Options = dict[str, Any]
SPELLED = {name: f"{name}:DIR" for name in ("draft", "medusa", "eagle", "streaming", "tree-streaming")}
SPELLED["chain"] = "chain:medusa:DIR"
VALUES: Options = {"kv_evict": "sinks:2,window:9", "diffusion": "threshold=0.5", "ray": "head:6379"}
VALUES |= {"prefill_tokens": 3, "prefill_rows": 3, "kv_host": "1MiB", "kv_disk": "1MiB"}


class OwnTrees(Plain):
    """A strategy of the program's own, whose drafts may be trees."""

    trees = True


def asked() -> Iterator[tuple[Options, Declared]]:
    """Options that ask for each declaration that needs or refuses something."""
    for name, table in (("kv_dtype", PAGE_TYPES), ("activations", ACTIVATIONS), ("batching", BATCHING)):
        yield from (({name: value}, declared) for value, declared in judged(table))
    for name, declared in judged(SPECULATIVE):
        yield {"speculative": SPELLED.get(name, name)}, declared
    yield from (({name: VALUES[name]}, declared) for name, declared in judged(GIVEN) if name != "ray")
    yield {"parallel": "tp=2", "ray": VALUES["ray"]}, GIVEN["ray"]
    yield from (({"parallel": f"{name}=1"}, declared) for name, declared in judged(LAYOUTS))
    yield from (({"parallel": f"sp={name}"}, declared) for name, declared in judged(SEQUENCE))
    yield {"--separate": True}, SEPARATE
    yield {"strategy": Plain()}, OWN
    yield {"strategy": OwnTrees()}, OWN_TREES
    yield {"quantize": "int8"}, ROUNDING
    yield {"quantize": "2:4"}, SPARSE


HERE = Cpu()


@dataclass(frozen=True)
class Place:
    """Where a trait is in the way."""

    shape: str = "llama"
    options: tuple[tuple[str, Any], ...] = ()
    device: Any = HERE

    def beside(self, asked: Options) -> Options:
        """The options of the place and those that are asked for, in one layout."""
        both = dict(self.options) | asked
        if layouts := [given["parallel"] for given in (asked, dict(self.options)) if "parallel" in given]:
            both["parallel"] = ",".join(layouts)
        return both


REFUSED = {
    Trait.LATENT: Place("latent"),
    Trait.ODD_HEADS: Place("odd"),
    Trait.RECURRENT: Place("mamba"),
    Trait.DIFFUSION: Place("diffusion"),
    Trait.OUTLIERS: Place("outliers"),
    Trait.QUANTIZED: Place("quantized"),
    Trait.GPU: Place(device=SimpleNamespace(kind="cuda", ship=None)),
    Trait.HOST_MEMORY: Place(),
    Trait.RANKS: Place(options=(("parallel", "tp=2"),)),
    Trait.STAGES: Place(options=(("parallel", "pp=2"),)),
    Trait.DIVIDED_TOKENS: Place(options=(("parallel", "cp=2"),)),
    Trait.DEALT_PAGES: Place(options=(("parallel", "cp=2"),), device=ApartCpu()),
}
LACKING = {
    Trait.PAGES: Place("mamba"),
    Trait.FULL_ATTENTION: Place("mamba"),
    Trait.FEED_FORWARD: Place("mamba"),
    Trait.DIFFUSION: Place(),
    Trait.TOP_ATTENTION: Place("latent"),
    Trait.TENSOR_RANKS: Place(options=(("parallel", "cp=2"),)),
    Trait.CONTEXT_RANKS: Place(options=(("parallel", "tp=2"),)),
    Trait.EXPERT_RANKS: Place(options=(("parallel", "tp=2"),)),
    Trait.PREDICTION_MODULE: Place(),
    Trait.BLOCKS: Place(),
    Trait.BY_ROW: Place(),
    Trait.SPARSE_KERNELS: Place(),
    Trait.PREFIX_CACHE: Place(options=(("prefix_cache", False),)),
    Trait.ARRIVAL_ORDER: Place(options=(("policy", "srpt"),)),
}
CASES = [
    (options, reason, places[trait])
    for options, declared in asked()
    for reasons, places in ((declared.needs, LACKING), (declared.refuses, REFUSED))
    for trait, reason in reasons.items()
]


class Unread:
    """A model's tensors; reading one ends the test."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        assert name not in ("get", "get_experts"), "a weight is read"
        return getattr(self._source, name)


def files_of(shape: str, folder: Path) -> ModelFiles:
    if shape == "diffusion":
        make("sdar", folder)
    elif shape == "odd":
        config = config_of("llama")
        config.head_dim = 6
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        folder = folder_of("llama" if shape in ("outliers", "quantized") else shape)
    files = open_model(folder)
    if shape in ("outliers", "quantized"):
        files = replace(files, source=Requantized(files.source, ("int8_g32", "keep")))
    return replace(files, source=Unread(files.source))


def identity(value: object) -> str:
    """The same in every process of a run: without addresses of objects."""
    return re.sub(r" object at 0x[0-9a-f]+", "", str(value))[:60]


@pytest.mark.parametrize(("options", "reason", "place"), CASES, ids=identity)
def test_what_is_declared_is_refused_before_a_weight_is_read(
    options: Options, reason: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr(assembly, "build_weights", fail)
    monkeypatch.setattr(assembly, "device_strategy", lambda *given: None)
    if place.shape == "outliers":
        monkeypatch.setattr(precision, "keeps_outliers", lambda source: True)
    files = files_of(place.shape, tmp_path)
    with pytest.raises(ConfigError) as refused:
        given = place.beside(options)
        strategy, separate = given.pop("strategy", None), given.pop("--separate", False)
        run, sched, state, _ = configure(given)
        if place.device.kind == "cuda":
            refuse_impossible(files, place.device, run, sched, state)
            choose_activations(run, files, "cuda")
        also = (("--separate", SEPARATE),) if separate else ()
        assemble(files, run, sched, state, device=place.device, strategy=strategy, also=also)
    said = re.sub(r"\\{[^}]*\\}", "[^{}\n]+", re.escape(reason))
    assert re.fullmatch(said, str(refused.value)) and reason.endswith(".")


def test_the_table_of_combinations_has_all_that_can_be_asked_for() -> None:
    told = {id(declared) for _, declared in every_declaration()}
    ways = {id(way) for way in SPECULATIVE.values()}  # with the options that they have by default
    assert {id(declared) for _, declared in asked()} - ways <= told


def test_a_strategy_object_is_refused_where_another_would_run(tmp_path: Path) -> None:
    """Denoising is what a diffusion model runs, so an object of it may be given."""
    make("sdar", tmp_path)
    diffusion, llama = open_model(tmp_path), open_model(folder_of("llama"))
    with pytest.raises(ConfigError, match="The strategy Plain is not for a diffusion model"):
        refuse_impossible(diffusion, Cpu(), RunConfig(), strategy=Plain())
    refuse_impossible(diffusion, Cpu(), RunConfig(), strategy=Denoising(DiffusionChoice()))
    with pytest.raises(ConfigError, match="needs a diffusion model"):
        refuse_impossible(llama, Cpu(), RunConfig(), strategy=Denoising(DiffusionChoice()))
    with pytest.raises(ConfigError, match="The strategy Plain is an object of this process"):
        load(str(folder_of("llama")), RunConfig(parallel="tp=2"), SchedConfig(), StateConfig(), strategy=Plain())


def test_usual_options_ask_for_nothing() -> None:
    """So that a usual start makes no layers twice."""
    found = declarations(RunConfig(), SchedConfig(), StateConfig())
    assert not any(declared.traits for _, declared in found)


def test_trees_are_refused_where_an_option_makes_them() -> None:
    mamba = open_model(folder_of("mamba"))
    for way, out in (("medusa:DIR", "add tree=chain"), ("draft:DIR,breadth=2", "add breadth=1")):
        with pytest.raises(ConfigError, match=f"recurrent state verifies chains .*; {out}"):
            refuse_impossible(mamba, Cpu(), RunConfig(speculative=way))
    for way in ("medusa:DIR,tree=chain", "draft:DIR", "chain:eagle:DIR,tree=chain", "suffix", "jacobi"):
        refuse_impossible(mamba, Cpu(), RunConfig(speculative=way))


def test_every_policy_and_way_of_batching_can_be_made() -> None:
    assert GATES.keys() == BATCHING.keys()
    for name in POLICIES:
        assert policy_of(SchedConfig(policy=name)).rank is not None
    fields = SchedConfig.__dataclass_fields__
    assert all(option in fields for option, _, _ in readers())


def test_an_option_that_no_chosen_way_reads_is_refused_with_those_that_do() -> None:
    for option, owner, reading in readers():
        value = {"weights": {"alice": 2.0}}.get(option, 3)
        for name in reading:
            configure({option: value, owner: name})
        with pytest.raises(ConfigError, match=f"has no effect here; it needs {owner}={' or '.join(reading)}"):
            configure({option: value})
