"""Which tensor of the checkpoint each product of a layer multiplies, and what enters it.

Layers bind their operations through the `Build` at the place of their tensors. `RecordingBuild` is one that wraps
products, so that every family can be recorded without a change of its layers. `SomeLayers` places a few layers of a
model alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bankfull.axes import Axes
from bankfull.layers.build import Build
from bankfull.layers.placement import Home, Role
from bankfull.ops import Epilogue, Operation, expert_mlp, linear, rms_norm, write_latents
from bankfull.ops.registry import Function
from bankfull.quantize.method import Matrix
from bankfull.weights.qtensor import QTensor

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """The experts of a layer: the templates of their tensors' names, and how the operation was last called."""

    gate: str
    up: str
    down: str
    count: int
    stacked: bool
    """Whether a name holds all experts' matrices."""
    shares_tensor: bool
    """Whether gate and up are one tensor."""

    def groups(self) -> list[tuple[Matrix, ...]]:
        """Matrices with the same input, expert by expert."""
        groups: list[tuple[Matrix, ...]] = []
        for expert in range(self.count):
            gate, up, down = (self._matrix(name, expert) for name in (self.gate, self.up, self.down))
            groups += [(gate,) if self.shares_tensor else (gate, up), (down,)]
        return groups

    def _matrix(self, name: str, expert: int) -> Matrix:
        return (name, expert) if self.stacked else (name.format(expert), None)


@dataclass(frozen=True, slots=True)
class ExpertCall:
    x: Tensor
    chosen: Tensor
    gate: QTensor
    up: QTensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    kind: str


@dataclass(slots=True)
class InputRecorder:
    """Calls its listeners with what enters the products of a layer."""

    listen: Callable[[str, Tensor], None] | None = None
    """Gets the name of a matrix and its input (tokens, columns)."""
    listen_experts: Callable[[ExpertSite, ExpertCall], None] | None = None
    reuse: Callable[[str, Tensor, QTensor, Callable[[], Tensor]], Tensor] | None = None
    """Gets the name of a matrix, its input, the weight (the matrix or a part of it) and what computes the product;
    returns the output."""
    origins: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """Name of a tensor that a layer holds, by the tensor's id. The tensor is kept, so that its id stays its own."""

    linears: set[str] = field(default_factory=set)
    """Matrices that linear layers multiply."""

    def name_of(self, held: Any) -> str | None:
        origin = self.origins.get(id(held))
        return None if origin is None else origin[0]

    def own(self, name: str, held: Any) -> Any:
        self.origins[id(held)] = name, held
        return held

    def enters(self, name: str, x: Tensor) -> None:
        if self.listen is not None:
            self.listen(name, x)

    def output(self, name: str, x: Tensor, weight: QTensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute() if self.reuse is None else self.reuse(name, x, weight, compute)


@dataclass(frozen=True, slots=True)
class SomeLayers:
    """A placement (`layers.placement`): some layers of a model, or what surrounds its layers, and nothing else."""

    stem: str
    """The place of all layers: "model.layers"."""
    live: tuple[str, ...] | None
    """The layers that are read, as "model.layers.3"; None: what surrounds the layers."""
    roles: frozenset[Role] = frozenset(Role)

    def home(self, module: str, role: Role, here: Home) -> Home:
        if self.live is None:
            lives = re.match(rf"{re.escape(self.stem)}\.\d+(\.|$)", module) is None
        else:
            of = (f"{module}.".startswith(f"{one}.") or one.startswith(f"{module}.") for one in self.live)
            lives = not module or any(of)
        return here if lives else here.elsewhere


@dataclass(frozen=True, slots=True)
class RecordingBuild(Build):
    """Builds layers whose products are recorded."""

    recorder: InputRecorder = field(default_factory=InputRecorder)
    surrounds: bool = False
    """Whether it builds what surrounds the layers: nothing is recorded, and tables are read row by row."""

    @property
    def _records(self) -> bool:
        return self.reads and not self.surrounds

    def weight(self, name: str, axes: Axes, for_linear: bool = False) -> QTensor:
        if not self._records:
            read = self._asked(name, axes)
            return self._find(name, axes) if read else self._left(name, axes)
        if for_linear:
            self.recorder.linears.add(self._full(name))
        tensor: QTensor = self.recorder.own(self._full(name), Build.weight(self, name, axes, for_linear))
        return tensor

    def stacked(self, name: str, count: int, axes: Axes, held: Sequence[int] | None = None) -> QTensor:
        stack, whole = Build.stacked(self, name, count, axes, held), name.replace("{}.", "")
        if self._records:
            self.recorder.own(self._full(whole if self.has(whole) else name), stack)
        return stack

    def tensor(self, name: str, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
        tensor = Build.tensor(self, name, axes, dtype)
        if self._records:
            self.recorder.own(self._full(name), tensor)
        return tensor

    def bind(self, operation: Operation, **facts: Any) -> Function:
        run = Build.bind(self, operation, **facts)
        if not self._records:
            return run
        if operation is linear and not facts.get("best"):
            return self._product(run, facts["weight"])
        if operation is expert_mlp:
            return self._experts(run, *facts["weights"])
        if operation is write_latents:
            return self._latents(run)
        return run

    def _product(self, run: Function, weight: QTensor) -> Function:
        name, recorder = self._full("weight"), self.recorder
        recorder.own(name, weight)

        def product(x: Tensor, weight: QTensor, epilogue: Epilogue) -> Any:
            recorder.enters(name, x)
            return recorder.output(name, x, weight, lambda: run(x, weight, epilogue))

        return product

    def _latents(self, run: Function) -> Function:
        """Keys and values are products of the normed latents, which attention computes in its own way."""
        name, recorder = self._full("kv_b_proj.weight"), self.recorder

        def write(made: Tensor, norm: Tensor, eps: float, *others: Any) -> Any:
            recorder.enters(name, rms_norm(made[:, : len(norm)], norm, eps, 0.0))
            return run(made, norm, eps, *others)

        return write

    def _experts(self, run: Function, gate: QTensor, up: QTensor, down: QTensor) -> Function:
        recorder = self.recorder
        names = [recorder.name_of(one) for one in (gate, up, down)]
        fused = names[0] is None
        if fused:  # halves of one tensor, the only other stack at this place
            names[0] = names[1] = next(
                name
                for name, held in recorder.origins.values()
                if name.startswith(f"{self.prefix}.") and len(held.shape) == 3 and name != names[2]
            )
        first, second, third = (name or "" for name in names)
        site = ExpertSite(first, second, third, gate.shape[0], "{}" not in third, fused)

        def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate: Any, up: Any, down: Any, *others: Any) -> Any:
            if recorder.listen_experts is not None:
                recorder.listen_experts(site, ExpertCall(x, chosen, gate, up, others[0], others[1], others[3]))
            return run(x, chosen, weights, gate, up, down, *others)

        return experts
