"""Impossible combinations, found before weights are read: what the given options declare, against the traits of the
model, its files, the device and the layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from bankfull.choices import ACTIVATIONS, DENOISING, GIVEN, PAGE_TYPES, ROUNDING, SEPARATE, SPARSE, WRITING
from bankfull.config import DiffusionChoice, RunConfig, SchedConfig, StateConfig
from bankfull.declared import Declared, Trait, Traits
from bankfull.decode.diffusion import Denoising, canvas_shape
from bankfull.decode.strategy import Strategy
from bankfull.decode.streams import takes_streams
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.latent import LatentAttention
from bankfull.models.mtp import has_module
from bankfull.models.registry import Config, build_model, family_of, rank_config, stages_of
from bankfull.ops.registry import Kit
from bankfull.ranks.mesh import ALONE, LAYOUTS, SEQUENCE, MeshSpec
from bankfull.runtime.device import Device
from bankfull.scheduling import BATCHING
from bankfull.speculation import OWN, OWN_TREES, SPECULATIVE, SpeculativeChoice
from bankfull.state.spec import Paged, Recurrent
from bankfull.torch_parts import with_all
from bankfull.weights.blank_source import META, FileShapes
from bankfull.weights.source import ModelFiles
from bankfull.weights.sparse_source import WANTED

Asked = Sequence[tuple[str, Declared]]
"""What is asked for, in the words in which it was asked for, and what it declares."""
OF_OPTIONS = frozenset(
    {Trait.HOST_MEMORY, Trait.GPU, Trait.PREFIX_CACHE, Trait.ARRIVAL_ORDER, *ALONE.traits},
)
"""Traits that are known without the model."""


def refuse_impossible(
    files: ModelFiles,
    device: Device,
    run: RunConfig,
    sched: SchedConfig | None = None,
    state: StateConfig | None = None,
    strategy: Strategy | None = None,
    also: Asked = (),
) -> None:
    """Raises ConfigError for what the options cannot do with each other, on the device, or with the model. No weights
    are read, and the model's layers are made, without data, only if an option depends on them. `strategy`: instead of
    the configuration's. `also`: what the engine is for, beside its options."""
    sched, state, mesh = sched or SchedConfig(), state or StateConfig(), run.mesh
    asked = [*declarations(run, sched, state, strategy), *also]
    refuse(asked, option_traits(device, run, state), mesh)
    if mesh.ranks > 1:
        refuse_uneven(mesh, files.config)
    if all(declared.traits <= OF_OPTIONS for _, declared in asked):
        return
    model = without_data(files)
    refuse(asked, model_traits(model, mesh) | file_traits(files), mesh)
    if model.diffusion is not None:
        canvas_shape(model.diffusion, DiffusionChoice.parse(run.diffusion))


def refuse(asked: Iterable[tuple[str, Declared]], traits: Traits, mesh: MeshSpec) -> None:
    for shown, declared in asked:
        declared.refuse(shown, traits, layout=mesh, stages=mesh.pp)


def declarations(
    run: RunConfig, sched: SchedConfig, state: StateConfig, strategy: Strategy | None = None
) -> Iterator[tuple[str, Declared]]:
    """What these options declare, as they were given."""
    if strategy is None:
        yield from SpeculativeChoice.parse(run.speculative).declarations()
    elif isinstance(strategy, Denoising):
        yield f"diffusion={strategy.choice.text!r}", DENOISING
    else:
        yield type(strategy).__name__, OWN_TREES if strategy.trees else OWN
    yield f"kv_dtype={run.kv_dtype!r}", PAGE_TYPES[run.kv_dtype]
    yield from run.mesh.declarations()
    for name, declared in GIVEN.items():
        owner = next(owner for owner in (run, sched, state) if hasattr(owner, name))
        if value := getattr(owner, name):
            yield f"{name}={value!r}", declared


def every_declaration() -> Iterator[tuple[str, Declared]]:
    """All values that need or refuse something, as options of `LLM`, of `load` or of the service, with what they
    declare."""
    found: list[tuple[str, Declared]] = []
    for option, table in (("kv_dtype", PAGE_TYPES), ("activations", ACTIVATIONS), ("batching", BATCHING)):
        found += [(f"{option}={name}", declared) for name, declared in table.items()]
    found += [("quantize", ROUNDING), (f"quantize={WANTED}", SPARSE), *GIVEN.items(), ("--separate", SEPARATE)]
    found += [("write_weights", WRITING)]
    found += [(f"parallel={name}", axis) for name, axis in LAYOUTS.items()]
    found += [(f"parallel=sp={name}", way) for name, way in SEQUENCE.items()]
    for name, way in SPECULATIVE.items():
        found += SpeculativeChoice(name, {key: option.usual for key, option in way.options.items()}).declarations()
    found += [("strategy=OBJECT", OWN), ("strategy=OBJECT with trees", OWN_TREES)]
    return ((asked, declared) for asked, declared in found if declared.traits)


def option_traits(device: Device, run: RunConfig, state: StateConfig) -> dict[Trait, bool]:
    """Those of `OF_OPTIONS` that options of different owners depend on."""
    return {
        Trait.GPU: device.kind != "cpu",
        Trait.HOST_MEMORY: device.ship is None,
        Trait.PREFIX_CACHE: state.prefix_cache,
        **run.mesh.traits,
    }


def file_traits(files: ModelFiles) -> dict[Trait, bool]:
    return {Trait.PREDICTION_MODULE: has_module(files.config, files.source)}


def without_data(files: ModelFiles) -> Decoder:
    """The model's layers over tensors that have shapes only. Refuses files that do not belong to the configuration."""
    build = Build(FileShapes(files.source), Kit("cpu", ()), torch.float32, META)
    return with_all(lambda: build_model(files.config, build))


def model_traits(model: Decoder, mesh: MeshSpec) -> dict[Trait, bool]:
    """What the layers tell. `mesh`: whose stages are asked for feed-forward layers."""
    states = [state for of_layer in model.states() for state in of_layer]
    pages = [state for state in states if isinstance(state, Paged)]
    heads = [mixer.heads.size for mixer in model.mixers if isinstance(mixer, Attention)]
    stages = [model.blocks[first:end] for first, end in mesh.stages(len(model.blocks))]
    return {
        Trait.PAGES: bool(pages),
        Trait.FULL_ATTENTION: any(state.window is None for state in pages),
        Trait.FEED_FORWARD: all(any(block.feed is not None for block in stage) for stage in stages),
        Trait.LATENT: any(isinstance(mixer, LatentAttention) for mixer in model.mixers),
        Trait.ODD_HEADS: any(size % 8 for size in heads),
        Trait.RECURRENT: any(isinstance(state, Recurrent) for state in states),
        Trait.TOP_ATTENTION: takes_streams(model.blocks[-1]),  # every stream runs there; `streams` looks below, too
        Trait.DIFFUSION: model.diffusion is not None,
    }


def refuse_uneven(mesh: MeshSpec, config: Config) -> None:
    """Refuse a layout that does not divide the model, or that its family does not split."""
    family_of(config)
    if mesh.tp > 1 or mesh.ffn:
        rank_config(config, mesh.tp, mesh.feed_tp, mesh.ep > 1)
    stages_of(config, mesh.pp)
