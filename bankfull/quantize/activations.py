"""What enters the matrices of one layer on the calibration text, computed when a method asks for it.

Matrices that a method has quantized already take part with their quantized values, so that a later matrix of the same
layer can make up for their error. A pass over the text ends at the matrix that is asked for, and takes from the pass
before what has not changed (`kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bankfull.layers.mixer import Mixer
from bankfull.ops.experts.body import gated
from bankfull.quantize.kept import KeptOutputs
from bankfull.quantize.layered import BuiltLayer, LayeredModel, LayerStep
from bankfull.quantize.method import SAMPLED, LayerData, Matrix
from bankfull.quantize.recording import ExpertCall, ExpertSite
from bankfull.state.storage import Storage
from bankfull.weights.qtensor import QTensor

COMPARED = 2048
"""Tokens on which the outputs of a block are compared."""
PROBE = 16
"""Tokens that show the structure of a layer."""
ROWS_AT_ONCE = 4096
"""Inputs that are added to a Hessian at once."""
COLUMNS_AT_ONCE = 512
"""Columns of a Hessian that are one product: what lies below its diagonal blocks is not computed."""
MIXER, FEED = "mixer", "feed"
"""The parts of a layer."""


@dataclass(slots=True)
class CalibrationStreams:
    """The hidden states of every calibration sequence, as they enter a layer."""

    sequences: Sequence[Sequence[int]]
    hidden: list[Tensor]
    kept: dict[int, list[Storage]] = field(default_factory=dict)
    """Keys and values that later layers share, by layer, for each sequence."""

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
        self._kept = KeptOutputs()
        self._dequantized: dict[str, tuple[QTensor, Tensor]] = {}
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
        inputs = self._inputs.get(self._key.get(name, name))
        return self._data.matrices[name].new_empty(0, self._data.matrices[name].shape[-1]) if inputs is None else inputs

    def output_error(self, replaced: Mapping[str, Tensor]) -> float:
        places = {self._part[name] for name in replaced if name in self._part}
        if not self._compared:
            self._compare()
        built = self._model.layer(self._data.number, {**self._data.matrices, **self._data.plain, **replaced})
        error = count = 0.0
        for place in places:
            for sequence, x, y in self._compared[place]:
                if place == MIXER:
                    output = self._step(sequence).mix(built.block.mixer, x)
                else:
                    assert built.block.feed is not None
                    output = built.block.feed(x)
                error += float((output - y).square().sum(dtype=torch.float64))
                count += y.numel()
        return error / max(1.0, count)

    def advance(self) -> None:
        """Run the text through the layer as it is now, in place."""
        values = self._values()
        built = self._model.layer(self._data.number, values)
        mixer_runs = self._data.number in self._model.shared  # later layers need its keys and values
        _advance(self._model, self._streams, self._data.number, self._reusing(built, values, mixer_runs), self._begin)

    def _earlier(self, key: str) -> set[str]:
        """Matrices that are computed before one, and so change its input."""
        earlier: set[str] = set()
        for group in self._groups:
            if group[0][0] == key:
                break
            earlier |= {name for name, _ in group}
        return earlier

    # -- passes over the text

    def _step(self, sequence: int) -> LayerStep:
        streams = self._streams
        return self._model.step(self._data.number, streams.sequences[sequence], streams.kept_of(sequence))

    def _values(self) -> dict[str, Tensor]:
        """The tensors of the layer, those that are quantized so far with their quantized values."""
        data = self._data
        for name, tensor in data.quantized.items():
            if name not in self._dequantized or self._dequantized[name][0] is not tensor:
                self._dequantized[name] = tensor, tensor.dequantize()
        return {**data.plain, **data.matrices, **{name: self._dequantized[name][1] for name in data.quantized}}

    def _current(self, key: str | None = None) -> BuiltLayer:
        """The layer with the matrices that are quantized so far. `key`: the matrix at which the pass ends, so that
        what comes before it need not be computed again."""
        if not self._data.quantized:
            return self._float
        values = self._values()
        built = self._model.layer(self._data.number, values)
        return built if key is None else self._reusing(built, values, self._part.get(key) == MIXER)

    def _reusing(self, built: BuiltLayer, values: Mapping[str, Tensor], mixer_runs: bool) -> BuiltLayer:
        """The layer, with outputs that are known from an earlier pass. `mixer_runs`: whether the mixer must run, for
        what happens inside of it."""
        plain = tuple(values[name] for name in self._data.plain)
        mixing = [name for name in self._data.matrices if self._part.get(name) == MIXER]

        def product(name: str, x: Tensor, weight: QTensor, compute: Callable[[], Tensor]) -> Tensor:
            whole, data = values.get(name), weight.parts["data"]
            if whole is None or whole.data_ptr() != data.data_ptr() or whole.shape != data.shape:
                return compute()  # a part of the matrix: its name does not say which
            return self._kept.of(name, (*plain, whole), x, compute)

        def mixed(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
            if mixer_runs:
                return compute()
            return self._kept.of(MIXER, (*plain, *(values[name] for name in mixing)), x, compute, mixing)

        built.recorder.reuse = product
        return _around(built, mixed, lambda x, compute: compute())

    def _begin(self, sequence: int) -> None:
        self._kept.sequence = sequence

    def _run(self, built: BuiltLayer, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._begin(sequence)
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
        now = [MIXER]

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
            now[0] = FEED

        self._float.recorder.listen, self._float.recorder.listen_experts = enters, experts
        tapped = _tapped(self._float, mixed, lambda x, y: None)
        step = self._model.step(self._data.number, self._streams.sequences[0][:PROBE], self._streams.kept_of(0))
        step.run(tapped.block, self._streams.hidden[0][:PROBE])
        self._float.recorder.listen = self._float.recorder.listen_experts = None
        groups: list[tuple[Matrix, ...]] = []
        key: dict[str, str] = {}
        sites: dict[str, ExpertSite] = {}
        for one in order:
            if isinstance(one, ExpertSite):
                of_site = [group for group in one.groups() if group[0][0] in self._data.matrices]
                groups += of_site
                sites |= {name: one for group in of_site for name, _ in group}
                part |= dict.fromkeys(sites, FEED)
            else:
                groups.append(tuple((name, None) for name in one[1]))
                key |= dict.fromkeys(one[1], one[1][0])
        return groups, key, sites, part

    def _accumulated(self, key: str, columns: int) -> Tensor:
        total = torch.zeros(columns, columns, device=self._model.device)
        if key not in self._key:
            return total  # never multiplied as a matrix
        waiting: list[Tensor] = []

        def enters(name: str, x: Tensor) -> None:
            if name == key:
                waiting.append(x)
                raise _Enough

        built, count = self._current(key), 0
        built.recorder.listen = enters
        for sequence in range(len(self._streams.sequences)):
            self._run(built, [sequence])
            last = sequence + 1 == len(self._streams.sequences)
            if waiting and (last or sum(map(len, waiting)) >= ROWS_AT_ONCE):
                rows = torch.cat(waiting)
                waiting.clear()
                count += len(rows)
                add_products(total, rows)
        built.recorder.listen = None
        return mirrored(total).mul_(2 / max(1, count))

    def _sample(self) -> None:
        """Keep some tokens' inputs of all matrices."""
        each = max(1, SAMPLED // len(self._streams.sequences))
        inputs: dict[str, list[Tensor]] = {}
        seen: set[str] = set()

        def enters(name: str, x: Tensor) -> None:
            if self._key.get(name) == name and name not in seen:
                seen.add(name)
                inputs.setdefault(name, []).append(_spread(x, each).clone())

        built = self._current()
        built.recorder.listen = enters
        for sequence in range(len(self._streams.sequences)):
            seen.clear()
            self._run(built, [sequence])
        built.recorder.listen = None
        self._inputs = {name: torch.cat(rows) for name, rows in inputs.items()}

    def _compare(self) -> None:
        """Keep what enters and leaves the parts of the layer with float weights, on the first sequences."""
        kept: dict[str, list[tuple[int, Tensor, Tensor]]] = {MIXER: [], FEED: []}
        now = [0]
        built = _tapped(
            self._float,
            lambda x, y: kept[MIXER].append((now[0], x, y)),
            lambda x, y: kept[FEED].append((now[0], x, y)),
        )
        tokens = 0
        for sequence, ids in enumerate(self._streams.sequences):
            now[0] = sequence
            self._run(built, [sequence])
            tokens += len(ids)
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

        built = self._current(site.down)
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
    _advance(model, streams, number, built or model.layer(number, replaced), lambda sequence: None)


def _advance(
    model: LayeredModel, streams: CalibrationStreams, number: int, built: BuiltLayer, begin: Callable[[int], None]
) -> None:
    storages = []
    for index, tokens in enumerate(streams.sequences):
        begin(index)
        step = model.step(number, tokens, streams.kept_of(index))
        streams.hidden[index].copy_(step.run(built.block, streams.hidden[index]))
        if number in model.shared:
            storages.append(step.storage)
    if storages:
        streams.kept[number] = storages


def add_products(total: Tensor, rows: Tensor) -> None:
    """Adds rows^T rows to the blocks of `total` on and above its diagonal."""
    for at in range(0, len(total), COLUMNS_AT_ONCE):
        upto = at + COLUMNS_AT_ONCE
        total[at:upto, at:].addmm_(rows[:, at:upto].T, rows[:, at:])


def mirrored(total: Tensor) -> Tensor:
    """Fills the blocks below the diagonal, in place."""
    for at in range(0, len(total), COLUMNS_AT_ONCE):
        upto = at + COLUMNS_AT_ONCE
        total[upto:, at:upto] = total[at:upto, upto:].T
    return total


Tap = Callable[[Tensor, Tensor], None]
Around = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""Gets the input of a part of a layer, and what computes its output; returns the output."""


class _MixerAround:
    def __init__(self, mixer: Mixer, around: Around) -> None:
        self._mixer, self._around = mixer, around
        self.states, self.rope, self.plan = mixer.states, mixer.rope, mixer.plan

    def run(self, x: Any, states: Any, meta: Any, angles: Any) -> Tensor:
        return self._around(x, lambda: self._mixer.run(x, states, meta, angles))


def _around(built: BuiltLayer, mixed: Around, fed: Around) -> BuiltLayer:
    """The layer with its mixer and its feed-forward layer inside of `mixed` and `fed`."""
    block, feed = built.block, built.block.feed
    inner = None if feed is None else lambda x: fed(x, lambda: feed(x))
    return replace(built, block=replace(block, mixer=_MixerAround(block.mixer, mixed), feed=inner))


def _tapped(built: BuiltLayer, mixed: Tap, fed: Tap) -> BuiltLayer:
    """The layer with calls of `mixed` and `fed` after its mixer and its feed-forward layer."""

    def tapping(tap: Tap) -> Around:
        def around(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
            y = compute()
            tap(x, y)
            return y

        return around

    return _around(built, tapping(mixed), tapping(fed))


def _spread(rows: Tensor, count: int) -> Tensor:
    """At most `count` rows, evenly spread."""
    return rows if len(rows) <= count else rows[torch.linspace(0, len(rows) - 1, count).long().to(rows.device)]
