"""Whole blocks of feed-forward neurons removed: the matrices shrink, so that bytes and time are saved everywhere.

A block's score is what its neurons add to the layer's output on the calibration text: the energy of each neuron times
the squared norm of its column in the down projection. The blocks with the highest scores stay, as many in every layer,
and the down projection is refitted to the neurons that are left (least squares on the same text).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bankfull.axes import EXPERTS, NEURONS
from bankfull.errors import ConfigError, ModelError
from bankfull.quantize.gptq import DAMPING
from bankfull.quantize.method import LayerData
from bankfull.quantize.recording import CPU
from bankfull.quantize.walk import LayerDone, WalkOptions, walk
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source import ModelFiles, TensorSource

BLOCK = 64
SIZE = "intermediate_size"


@dataclass(slots=True)
class NeuronBlocks:
    """The method as the walk runs it: it zeroes the neurons of removed blocks, and remembers those that stay."""

    count: int
    """Blocks that stay in each layer."""
    block: int = BLOCK
    width: int | None = None
    """Neurons of each layer; None: any number."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Rows that stay, by the name of a matrix or bias that makes the neurons."""
    downs: dict[str, Tensor] = field(default_factory=dict)
    """Neurons that stay, by the name of the matrix that reads them."""

    name: str = "neurons"
    calibrated: bool = True

    def quantize(self, layer: LayerData) -> None:
        down = _down(layer)
        matrix, hessian = layer.matrices[down], layer.hessian(down)
        if self.width not in (None, matrix.shape[-1]):
            raise ModelError(f"{down} has {matrix.shape[-1]} columns, not the {SIZE} of {self.width}.")
        energy = hessian.diagonal().clamp(min=0) * matrix.square().sum(0)
        best = energy.view(-1, self.block).sum(-1).argsort(descending=True, stable=True)[: self.count].sort().values
        kept = (best[:, None] * self.block + torch.arange(self.block, device=best.device)).flatten()
        for name, axes in layer.axes.items():
            if not axes or not axes[0].counts(NEURONS):
                continue
            # Gate and up may be one matrix, one after the other.
            rows = torch.cat([kept + part * len(matrix.T) for part in range(len(axes[0].parts))])
            self.kept[name] = rows.cpu()
            if name in layer.matrices:
                gone = torch.ones(axes[0], dtype=torch.bool, device=kept.device).index_fill(0, rows, False)
                layer.quantized[name] = QTensor.dense(layer.matrices[name].masked_fill(gone[:, None], 0))
        layer.quantized[down] = QTensor.dense(
            torch.zeros_like(matrix).index_copy(1, kept, refitted(matrix, hessian, kept))
        )
        self.downs[down] = kept.cpu()


def refitted(matrix: Tensor, hessian: Tensor, kept: Tensor) -> Tensor:
    """The columns `kept` (out, kept), changed so that the outputs on the calibration text change least."""
    inner = hessian[kept][:, kept]
    mean = float(inner.diagonal().mean())
    if not 0 < mean < float("inf"):
        return matrix[:, kept]
    # Damping pulls towards the columns as they were, not towards zero.
    inner.diagonal().add_(DAMPING * mean)
    factor, failed = torch.linalg.cholesky_ex(inner)
    if int(failed):
        return matrix[:, kept]
    wanted = matrix @ hessian[:, kept] + DAMPING * mean * matrix[:, kept]
    solution: Tensor = torch.cholesky_solve(wanted.T, factor).T
    return solution if bool(solution.isfinite().all()) else matrix[:, kept]


def _down(layer: LayerData) -> str:
    """The matrix that reads the neurons of a layer."""
    axes = {name: layer.axes.get(name, ()) for name in layer.matrices}
    downs = [name for name, one in axes.items() if len(one) == 2 and one[1].counts(NEURONS)]
    experts = [name for name, one in axes.items() if not one or one[0].counts(EXPERTS)]
    if len(downs) != 1 or experts:
        raise ModelError(
            "Blocks of neurons are removed from one feed-forward layer per layer, without experts, and here a layer "
            f"has {len(downs)}{f' and {experts[0]}' if experts else ''}; prune weights instead."
        )
    return downs[0]


@dataclass(frozen=True, slots=True)
class PrunedNeurons:
    """A source with the remaining neurons. Refitted down projections are held in the dtype of the checkpoint."""

    source: TensorSource
    kept: Mapping[str, Tensor]
    """Rows that stay, by the name of a matrix or bias."""
    downs: Mapping[str, Tensor]

    def names(self) -> list[str]:
        return self.source.names()

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.downs:
            return tuple(self.downs[name].shape)
        shape = self.source.shape(name)
        return (len(self.kept[name]), *shape[1:]) if name in self.kept else shape

    def scheme(self, name: str) -> Scheme:
        return BY_DTYPE[self.downs[name].dtype] if name in self.downs else self.source.scheme(name)

    def get(self, name: str) -> QTensor:
        tensor = self.source.get(name)
        if name in self.downs:
            return QTensor.dense(self.downs[name])
        return tensor.rows(self.kept[name]) if name in self.kept else tensor

    def unread(self) -> list[str]:
        return self.source.unread()

    def release(self) -> None:
        self.source.release()


def remove_neurons(
    files: ModelFiles,
    share: float,
    sequences: Sequence[Sequence[int]],
    *,
    block: int = BLOCK,
    done: LayerDone | None = None,
    device: torch.device = CPU,
) -> ModelFiles:
    """The model without `share` of its feed-forward neurons, in whole blocks. It runs, and can be saved or quantized,
    like any other model. `sequences`: token ids of the calibration text."""
    width = files.config.get(SIZE)
    if not 0 < share < 1:
        raise ConfigError(f"--sparsity {share:g} of the neurons cannot be removed; give a share between 0 and 1.")
    if not isinstance(width, int) or width % block or width < 2 * block:
        raise ConfigError(f"The model's {SIZE} is {width}, which is not made of blocks of {block} neurons.")
    blocks = width // block
    method = NeuronBlocks(min(blocks - 1, max(1, round((1 - share) * blocks))), block, width)
    downs: dict[str, Tensor] = {}
    for name, tensor in walk(files, method, WalkOptions(sequences, done=done, device=device)):
        if name in method.downs:
            scheme = files.source.scheme(name)
            dtype = scheme.parts[0].dtype if scheme.is_dense else torch.bfloat16
            downs[name] = tensor.dequantize()[:, method.downs[name]].to(dtype).contiguous()
    config = {**files.config, SIZE: method.count * block}
    return replace(files, config=config, source=PrunedNeurons(files.source, method.kept, downs))
