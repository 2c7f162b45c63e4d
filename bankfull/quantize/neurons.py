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

from bankfull.errors import ConfigError, ModelError
from bankfull.quantize.gptq import DAMPING
from bankfull.quantize.method import LayerData
from bankfull.quantize.recording import CPU
from bankfull.quantize.walk import LayerDone, WalkOptions, walk
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source import ModelFiles, TensorSource

BLOCK = 64
DOWN, UPS = "down_proj.weight", ("gate_proj", "up_proj")
SIZE = "intermediate_size"


@dataclass(slots=True)
class NeuronBlocks:
    """The method as the walk runs it: it zeroes the neurons of removed blocks, and remembers those that stay."""

    count: int
    """Blocks that stay in each layer."""
    block: int = BLOCK
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Neurons that stay, by the name of the down projection."""

    name: str = "neurons"
    calibrated: bool = True

    def quantize(self, layer: LayerData) -> None:
        down, ups = _feed(layer.matrices)
        matrix, hessian = layer.matrices[down], layer.hessian(down)
        energy = hessian.diagonal().clamp(min=0) * matrix.square().sum(0)
        best = energy.view(-1, self.block).sum(-1).argsort(descending=True, stable=True)[: self.count].sort().values
        kept = (best[:, None] * self.block + torch.arange(self.block, device=best.device)).flatten()
        gone = torch.ones(matrix.shape[-1], dtype=torch.bool, device=kept.device).index_fill(0, kept, False)
        for name in ups:
            layer.quantized[name] = QTensor.dense(layer.matrices[name].masked_fill(gone[:, None], 0))
        layer.quantized[down] = QTensor.dense(
            torch.zeros_like(matrix).index_copy(1, kept, refitted(matrix, hessian, kept))
        )
        self.kept[down] = kept.cpu()


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


def _feed(names: Mapping[str, object]) -> tuple[str, list[str]]:
    """The down projection of a layer, and the matrices whose rows are its inputs."""
    downs = [name for name in names if name.endswith(DOWN)]
    if len(downs) != 1:
        raise ModelError(
            f"Blocks of neurons are removed from one feed-forward layer with a {DOWN.removesuffix('.weight')} per "
            f"layer, and here a layer has {len(downs)}; prune weights instead."
        )
    stem = downs[0].removesuffix(DOWN)
    return downs[0], [f"{stem}{up}.weight" for up in UPS if f"{stem}{up}.weight" in names]


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
    method = NeuronBlocks(min(blocks - 1, max(1, round((1 - share) * blocks))), block)
    downs: dict[str, Tensor] = {}
    for name in (name for name in files.source.names() if name.endswith(DOWN)):
        if files.source.shape(name)[-1:] != (width,):
            raise ModelError(f"{name} has {files.source.shape(name)[-1]} columns, not the {SIZE} of {width}.")
    for name, tensor in walk(files, method, WalkOptions(sequences, done=done, device=device)):
        if name in method.kept:
            scheme = files.source.scheme(name)
            dtype = scheme.parts[0].dtype if scheme.is_dense else torch.bfloat16
            downs[name] = tensor.dequantize()[:, method.kept[name]].to(dtype).contiguous()
    kept = {
        f"{down.removesuffix(DOWN)}{up}.{end}": neurons
        for down, neurons in method.kept.items()
        for up in UPS
        for end in ("weight", "bias")
        if files.source.has(f"{down.removesuffix(DOWN)}{up}.{end}")
    }
    config = {**files.config, SIZE: method.count * block}
    return replace(files, config=config, source=PrunedNeurons(files.source, kept, downs))
