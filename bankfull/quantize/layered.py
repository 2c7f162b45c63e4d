"""A model that is never in memory as a whole: its embedding, and its layers one at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.mixer import Angles, Mixer
from bankfull.layers.placement import PlacedWeight
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quantize.recording import CPU, InputRecorder, RecordingBuild, SomeLayers
from bankfull.runtime.naive import single_batch
from bankfull.state.spec import Layout, Shared, StateSpec, layout_of
from bankfull.state.storage import LayerStates, Storage
from bankfull.torch_parts import complete
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source import ModelFiles
from bankfull.weights.source_view import SourceView

PAGE = 16


@dataclass(frozen=True, slots=True)
class ReplacedSource(SourceView):
    """Some tensors of a source replaced by others of the same shape."""

    replaced: Mapping[str, Tensor]

    def scheme(self, name: str) -> Scheme:
        return QTensor.dense(self.replaced[name]).scheme if name in self.replaced else self.source.scheme(name)

    def get(self, name: str) -> QTensor:
        return QTensor.dense(self.replaced[name]) if name in self.replaced else self.source.get(name)

    def unread(self) -> list[str]:
        return []  # a layer alone leaves most tensors unread


@dataclass(frozen=True, slots=True)
class BuiltLayer:
    block: Block
    recorder: InputRecorder


class LayeredModel:
    """All arithmetic is float32, by the bodies of the operations."""

    def __init__(self, files: ModelFiles, length: int, device: torch.device = CPU) -> None:
        """`length`: tokens of the longest sequence that will be run. `device`: where layers run; what surrounds them
        runs on the CPU, so that tables are never copied."""
        complete()  # layers that are not in memory are built without data
        self.files, self.length, self.device = files, length, device
        self._angles: dict[int, Mapping[str, Angles]] = {}
        nothing = self._build(SomeLayers("", ()), {}, InputRecorder())
        build_model(files.config, nothing)
        self.weights: Mapping[str, PlacedWeight] = nothing.weights
        """What the model asks for, by name, with its axes."""
        self.stem = layers_stem(list(self.weights))
        self._outside = self._built(None, {}, InputRecorder())
        self.states: list[tuple[StateSpec, ...]] = self._outside.states()
        self.shared = {spec.layer for states in self.states for spec in states if isinstance(spec, Shared)}
        """Layers whose keys and values later layers read."""

    @property
    def reads_masks(self) -> bool:
        """Whether it is a diffusion model."""
        return self._outside.diffusion is not None

    @property
    def max_positions(self) -> int:
        return self._outside.max_positions

    def __len__(self) -> int:
        return len(self.states)

    def names(self, layer: int) -> list[str]:
        """All tensors of a layer."""
        return [name for name in self.files.source.names() if name.startswith(f"{self.stem}.{layer}.")]

    def outside(self) -> list[str]:
        """All tensors that belong to no layer."""
        inside = {name for layer in range(len(self)) for name in self.names(layer)}
        return [name for name in self.files.source.names() if name not in inside]

    def layer(self, number: int, replaced: Mapping[str, Tensor]) -> BuiltLayer:
        """A layer with some of its tensors replaced."""
        recorder = InputRecorder()
        # A layer may be built from tensors of the one whose keys and values it shares.
        layers = [number, *(spec.layer for spec in self.states[number] if isinstance(spec, Shared))]
        model = self._built(tuple(f"{self.stem}.{layer}" for layer in layers), replaced, recorder)
        return BuiltLayer(model.blocks[number], recorder)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """The hidden states that enter the first layer."""
        return self._outside.embed(self._batch(_NO_STATE, tokens, CPU)).to(torch.float32)

    def normed(self, hidden: Tensor) -> Tensor:
        """The hidden states after the last norm, from those after the last layer."""
        return self._outside.norm(hidden)

    def logits(self, normed: Tensor) -> Tensor:
        return self._outside.head(normed)

    def _built(self, live: tuple[str, ...] | None, replaced: Mapping[str, Tensor], recorder: InputRecorder) -> Decoder:
        return build_model(self.files.config, self._build(SomeLayers(self.stem, live), replaced, recorder))

    def _build(self, placement: SomeLayers, replaced: Mapping[str, Tensor], recorder: InputRecorder) -> Build:
        surrounds = placement.live is None
        build = RecordingBuild(
            ReplacedSource(self.files.source, replaced),
            kit_for("cpu", "torch"),
            torch.float32,
            CPU if surrounds else self.device,
            expand=True,
            max_len=self.length,
            recorder=recorder,
            surrounds=surrounds,
        )
        return build.placed(placement)

    def _batch(self, layout: Layout, tokens: Sequence[int], device: torch.device) -> Batch:
        return single_batch(layout, tokens, 0, len(tokens), 0, device)

    def _angles_of(self, length: int) -> Mapping[str, Angles]:
        """RoPE's angles for the first `length` positions, which are the same in every layer."""
        if length not in self._angles:
            positions = torch.arange(length)
            angles = {name: rope(positions) for name, rope in self._outside.ropes.items()}
            self._angles[length] = {name: (a.to(self.device), b.to(self.device)) for name, (a, b) in angles.items()}
        return self._angles[length]

    def step(self, layer: int, tokens: Sequence[int], kept: Mapping[int, Storage]) -> LayerStep:
        """What a layer needs to run over one sequence. `kept`: the states of earlier layers that it may share."""
        specs = self.states[layer]
        owners = {spec.layer for spec in specs if isinstance(spec, Shared)}
        if owners:
            (owner,) = owners  # a layer that shares its keys and values has no other state
            layout, storage = layout_of([self.states[owner]], PAGE), kept[owner]
        else:
            layout = layout_of([specs], PAGE)
            frames = sum(-(-len(tokens) // group.page_tokens) for group in layout.paged)
            storage = Storage(layout, frames, 2, self.device)
        return LayerStep(self._batch(layout, tokens, self.device), storage, self._angles_of(len(tokens)))


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One pass of a layer over one sequence."""

    batch: Batch
    storage: Storage
    angles: Mapping[str, Angles]

    @property
    def layer_states(self) -> LayerStates:
        return self.storage.layers[0]

    def run(self, block: Block, x: Tensor) -> Tensor:
        """The hidden states after the block."""
        x, branch = block.run((x, None), self.layer_states, self.meta(block.mixer), self.angles_of(block.mixer))
        return x if branch is None else x + branch

    def mix(self, mixer: Mixer, x: Tensor) -> Tensor:
        return mixer.run(x, self.layer_states, self.meta(mixer), self.angles_of(mixer))

    def meta(self, mixer: Mixer) -> Any:
        return mixer.plan(self.batch, self.storage.layout.groups[0])

    def angles_of(self, mixer: Mixer) -> Angles | None:
        return None if mixer.rope is None else self.angles[mixer.rope]


def layers_stem(names: Sequence[str]) -> str:
    """The place of a model's layers: what precedes the first number in most names."""
    counts: Counter[str] = Counter()
    numbers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
        if at:
            counts[".".join(parts[:at])] += 1
            numbers[".".join(parts[:at])].add(parts[at])
    stems = [stem for stem, _ in counts.most_common() if "0" in numbers[stem]]
    if not stems:
        raise ModelError("The model's tensors have no numbered layers, so they cannot be quantized layer by layer.")
    return stems[0]


_NO_STATE = layout_of([], PAGE)
