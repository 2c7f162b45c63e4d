"""What enters the matrices of one layer on the calibration text, computed when a method asks for it.

Matrices that a method has quantized already take part with their quantized values, so that a later matrix of the same
layer can make up for their error. A pass over the text ends at the matrix that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bankfull.layers.mixer import Mixer
from bankfull.ops.reference.experts import gated
from bankfull.quantize.layered import BuiltLayer, LayeredModel, LayerStep
from bankfull.quantize.method import SAMPLED, LayerData, Matrix
from bankfull.quantize.recording import ExpertCall, ExpertSite
from bankfull.state.storage import Storage
from bankfull.weights.qtensor import QTensor

COMPARED = 2048
"""Tokens on which the outputs of a block are compared."""


@dataclass(slots=True)
class CalibrationStreams:
    """The hidden states of every calibration sequence, as they enter a layer."""

    sequences: Sequence[Sequence[int]]
    hidden: list[Tensor]
    kept: dict[int, list[Storage]] = field(default_factory=dict)
    """By layer, for each sequence: keys and values that later layers share."""

    def kept_of(self, sequence: int) -> dict[int, Storage]:
        return {layer: storages[sequence] for layer, storages in self.kept.items()}

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))


class _Enough(Exception):
    """Ends a pass at the matrix that was asked for."""


class LayerActivations:
    def __init__(self, model: LayeredModel, streams: CalibrationStreams, data: LayerData) -> None:
        self._model, self._streams, self._data = model, streams, data
        self._float = model.layer(data.number, {**data.matrices, **data.plain})
        self._groups, self._key, self._sites, self._part = self._structure()
        self._last: tuple[str, frozenset[str], Tensor] | None = None
        self._inputs: dict[str, Tensor] = {}
        self._calls: dict[str, list[ExpertCall]] = {}
        self._compared: dict[str, list[tuple[int, Tensor, Tensor]]] = {}

    @property
    def built(self) -> BuiltLayer:
        """The layer with float weights."""
        return self._float

    def groups(self) -> list[tuple[Matrix, ...]]:
        return self._groups

    def hessian(self, name: str, expert: int | None = None) -> Tensor:
        if name in self._sites:
            rows = self._of_expert(name, expert)
            return rows.T @ rows * (2 / max(1, len(rows)))
        key = self._key.get(name, name)
        done = frozenset(self._earlier(key) & self._data.quantized.keys())
        if self._last is None or self._last[:2] != (key, done):
            self._last = None  # frees the memory first
            self._last = key, done, self._accumulated(key, self._data.matrices[name].shape[-1])
        return self._last[2]

    def inputs(self, name: str, expert: int | None = None) -> Tensor:
        if name in self._sites:
            return _spread(self._of_expert(name, expert), SAMPLED)
        if not self._inputs:
            self._sample()
        found = self._inputs.get(self._key.get(name, name))
        return torch.empty(0, self._data.matrices[name].shape[-1]) if found is None else found

    def output_error(self, replaced: Mapping[str, Tensor]) -> float:
        places = {self._part[name] for name in replaced if name in self._part}
        if not self._compared:
            self._compare()
        built = self._model.layer(self._data.number, {**self._data.matrices, **self._data.plain, **replaced})
        error = count = 0.0
        for place in places:
            for sequence, x, y in self._compared[place]:
                if place == "mixer":
                    made = self._step(sequence).mix(built.block.mixer, x)
                else:
                    assert built.block.feed is not None
                    made = built.block.feed(x)
                error += float((made - y).square().sum(dtype=torch.float64))
                count += y.numel()
        return error / max(1.0, count)

    def _earlier(self, key: str) -> set[str]:
        """Matrices that are computed before one, and so change its input."""
        found: set[str] = set()
        for group in self._groups:
            if group[0][0] == key:
                break
            found |= {name for name, _ in group}
        return found

    # -- passes over the text

    def _step(self, sequence: int) -> LayerStep:
        streams = self._streams
        return self._model.step(self._data.number, streams.sequences[sequence], streams.kept_of(sequence))

    def _current(self) -> BuiltLayer:
        """The layer with the matrices that are quantized so far."""
        done = self._data.quantized
        if not done:
            return self._float
        values = {name: weight.dequantize() for name, weight in done.items()}
        return self._model.layer(self._data.number, {**self._data.matrices, **self._data.plain, **values})

    def _run(self, built: BuiltLayer, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            try:
                self._step(sequence).run(built.block, self._streams.hidden[sequence])
            except _Enough:
                continue

    def _structure(
        self,
    ) -> tuple[list[tuple[Matrix, ...]], dict[str, str], dict[str, ExpertSite], dict[str, str]]:
        """Matrices that share an input, in the order of computation; for each, the first one; the experts' matrices;
        and the part of the layer (mixer, feed) that each belongs to."""
        order: list[tuple[Tensor, list[str]] | ExpertSite] = []
        part: dict[str, str] = {}
        now = ["mixer"]

        def enters(name: str, x: Tensor) -> None:
            part[name] = now[0]
            if name not in self._data.matrices:
                return
            known = next(
                (names for one in order if not isinstance(one, ExpertSite) for names in (one[1],) if one[0] is x), None
            )
            if known is None:
                order.append((x, [name]))
            elif name not in known:
                known.append(name)

        def experts(site: ExpertSite, call: ExpertCall) -> None:
            order.append(site)

        def mixed(x: Tensor, y: Tensor) -> None:
            now[0] = "feed"

        self._float.recorder.listen, self._float.recorder.listen_experts = enters, experts
        tapped = _tapped(self._float, mixed, lambda x, y: None)
        self._run(tapped, [0])
        self._float.recorder.listen = self._float.recorder.listen_experts = None
        groups: list[tuple[Matrix, ...]] = []
        key: dict[str, str] = {}
        sites: dict[str, ExpertSite] = {}
        for one in order:
            if isinstance(one, ExpertSite):
                own = [group for group in one.groups() if group[0][0] in self._data.matrices]
                groups += own
                sites |= {name: one for group in own for name, _ in group}
                part |= dict.fromkeys(sites, "feed")
            else:
                groups.append(tuple((name, None) for name in one[1]))
                key |= dict.fromkeys(one[1], one[1][0])
        return groups, key, sites, part

    def _accumulated(self, key: str, columns: int) -> Tensor:
        total, count = torch.zeros(columns, columns), [0]
        if key not in self._key:
            return total  # never multiplied as a matrix

        def enters(name: str, x: Tensor) -> None:
            if name == key:
                total.addmm_(x.T, x)
                count[0] += len(x)
                raise _Enough

        built = self._current()
        built.recorder.listen = enters
        self._run(built, range(len(self._streams.sequences)))
        built.recorder.listen = None
        return total.mul_(2 / max(1, count[0]))

    def _sample(self) -> None:
        """Keep some tokens' inputs of all matrices."""
        each = max(1, SAMPLED // len(self._streams.sequences))
        found: dict[str, list[Tensor]] = {}
        seen: set[str] = set()

        def enters(name: str, x: Tensor) -> None:
            if self._key.get(name) == name and name not in seen:
                seen.add(name)
                found.setdefault(name, []).append(_spread(x, each).clone())

        built = self._current()
        built.recorder.listen = enters
        for sequence in range(len(self._streams.sequences)):
            seen.clear()
            self._run(built, [sequence])
        built.recorder.listen = None
        self._inputs = {name: torch.cat(rows) for name, rows in found.items()}

    def _compare(self) -> None:
        """Keep what enters and leaves the parts of the layer with float weights, on the first sequences."""
        kept: dict[str, list[tuple[int, Tensor, Tensor]]] = {"mixer": [], "feed": []}
        now = [0]
        built = _tapped(
            self._float,
            lambda x, y: kept["mixer"].append((now[0], x, y)),
            lambda x, y: kept["feed"].append((now[0], x, y)),
        )
        tokens = 0
        for sequence, own in enumerate(self._streams.sequences):
            now[0] = sequence
            self._run(built, [sequence])
            tokens += len(own)
            if tokens >= COMPARED:
                break
        self._compared = kept

    # -- experts

    def _of_expert(self, name: str, expert: int | None) -> Tensor:
        """The inputs of one expert's matrix."""
        site = self._sites[name]
        if site.down not in self._calls:
            self._calls[site.down] = self._expert_calls(site)
        number = next(index // 2 for index, group in enumerate(site.groups()) if (name, expert) in group)
        rows = [call.x[(call.chosen == number).any(-1)] for call in self._calls[site.down]]
        x = torch.cat(rows)
        if any((name, expert) == matrix for matrix in site.groups()[2 * number]):
            return x
        call = self._calls[site.down][0]
        gate, up = (self._expert_matrix(site, number, which, call) for which in ("gate", "up"))
        gate_bias, up_bias = (None if one is None else one[number] for one in (call.gate_bias, call.up_bias))
        return gated(linear(x, gate, gate_bias), linear(x, up, up_bias), call.kind)

    def _expert_matrix(self, site: ExpertSite, number: int, which: str, call: ExpertCall) -> Tensor:
        """Gate or up of one expert, quantized where it is already."""
        stored: QTensor = getattr(call, which)
        done = self._data.quantized.get(getattr(site, which).format(number))
        if done is None or site.shares_tensor:
            return stored.rows(slice(number, number + 1)).dequantize()[0]
        return done.rows(slice(number, number + 1)).dequantize()[0] if site.stacked else done.dequantize()

    def _expert_calls(self, site: ExpertSite) -> list[ExpertCall]:
        calls: list[ExpertCall] = []

        def experts(found: ExpertSite, call: ExpertCall) -> None:
            if found.down == site.down:
                calls.append(call)
                raise _Enough

        built = self._current()
        built.recorder.listen_experts = experts
        self._run(built, range(len(self._streams.sequences)))
        built.recorder.listen_experts = None
        return calls


def advance(
    model: LayeredModel,
    streams: CalibrationStreams,
    number: int,
    replaced: Mapping[str, Tensor],
    built: BuiltLayer | None = None,
) -> None:
    """Run every sequence through a layer, in place. `built`: the layer, if it exists already."""
    built = built or model.layer(number, replaced)
    storages = []
    for index, tokens in enumerate(streams.sequences):
        step = model.step(number, tokens, streams.kept_of(index))
        streams.hidden[index].copy_(step.run(built.block, streams.hidden[index]))
        if number in model.shared:
            storages.append(step.storage)
    if storages:
        streams.kept[number] = storages


Tap = Callable[[Tensor, Tensor], None]


class _TappedMixer:
    def __init__(self, mixer: Mixer, tap: Tap) -> None:
        self._mixer, self._tap = mixer, tap
        self.states, self.rope, self.plan = mixer.states, mixer.rope, mixer.plan

    def run(self, x: Any, states: Any, meta: Any, angles: Any) -> Tensor:
        y = self._mixer.run(x, states, meta, angles)
        self._tap(x, y)
        return y


def _tapped(built: BuiltLayer, mixed: Tap, fed: Tap) -> BuiltLayer:
    """The layer with calls of `mixed` and `fed` after its mixer and its feed-forward layer."""
    block, feed = built.block, built.block.feed

    def tapped_feed(x: Tensor) -> Tensor:
        assert feed is not None
        y = feed(x)
        fed(x, y)
        return y

    mixer = _TappedMixer(block.mixer, mixed)
    return replace(built, block=replace(block, mixer=mixer, feed=None if feed is None else tapped_feed))


def _spread(rows: Tensor, count: int) -> Tensor:
    """At most `count` rows, evenly spread."""
    return rows if len(rows) <= count else rows[torch.linspace(0, len(rows) - 1, count).long()]
