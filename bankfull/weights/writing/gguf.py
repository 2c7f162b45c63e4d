"""Writes a quantized model as one .gguf file, which llama.cpp and this engine read.

| scheme | type in the file |
|---|---|
| int8, int4 in groups | q8_0, q4_0: the same values; a wider group repeats its scale |
| uint4 in groups | q4_1, whose minimum is the product of scale and zero point, rounded to float16 |
| int3, int2, uint3, uint2 in groups | q4_0: the same values, without the smaller size |
| blocks | as they are |
| unquantized | matrices as they are, vectors as f32 |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.groups import as_blocks, unpack_pairs
from bankfull.weights.gguf.names import gguf_name, interleaved_rows
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme
from bankfull.weights.source import ModelFiles
from bankfull.weights.writing.gguf_fields import architecture_fields, refuse_inexpressible, scaling_fields
from bankfull.weights.writing.gguf_header import StoredTensor, planned_gguf
from bankfull.weights.writing.gguf_text import text_fields
from bankfull.weights.writing.output import OutputFolder, PlannedFile
from bankfull.weights.writing.target import TargetTensor

BLOCK = 32


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The layout of the file, and what each tensor becomes in it."""

    files: ModelFiles
    targets: Sequence[TargetTensor]
    name: str
    _extra: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that a directory has in its configuration."""

    def refuse(self) -> None:
        refuse_inexpressible(self.files.config)
        for target in self.targets:
            self._own_name(target)

    def planned(self) -> list[PlannedFile]:
        tensors = [StoredTensor(self._own_name(t), t.shape, kind_of(t), (t.name,)) for t in self.targets]
        most = Counter(t.kind for t in tensors if len(t.shape) > 1).most_common(1)
        kind = most[0][0] if most else "f32"
        scaling, extra = scaling_fields(self.files.config)
        self._extra.update(extra)
        tensors += [StoredTensor(name, tuple(t.shape), "f32", (name,)) for name, t in self._extra.items()]
        fields = architecture_fields(self.name, self.files.config, kind) | scaling | text_fields(self.files)
        return [planned_gguf(f"{self.name}.{kind.upper()}.gguf", fields, tensors)]

    def scheme(self, target: TargetTensor) -> Scheme:
        return SCHEMES[kind_of(target)]

    def stored(self, target: TargetTensor) -> list[str]:
        return [self._own_name(target)]

    def encoded(self, target: TargetTensor, tensor: QTensor) -> dict[str, Tensor]:
        order = interleaved_rows(target.name, self.files.config)
        if order is not None:
            tensor = tensor.rows(order)
        kind = kind_of(target)
        if SCHEMES[kind].is_dense:
            return {self._own_name(target): tensor.dequantize(SCHEMES[kind].parts[0].dtype)}
        blocks = as_q4_1(tensor) if kind == "q4_1" and tensor.scheme.name != "q4_1" else as_blocks(tensor)
        assert blocks.scheme.name == kind, (target.name, blocks.scheme.name, kind)
        return {self._own_name(target): blocks.parts["blocks"]}

    def finish(self, folder: OutputFolder, planned: Sequence[PlannedFile]) -> None:
        for name, tensor in self._extra.items():
            folder.put(name, tensor)

    def _own_name(self, target: TargetTensor) -> str:
        name = gguf_name(target.name, self.files.config["model_type"])
        if name is None:
            kind = self.files.config["model_type"]
            raise ConfigError(
                f"A GGUF file of the architecture {kind!r} has no place for {target.name}; leave --format gguf out."
            )
        return name


def kind_of(target: TargetTensor) -> str:
    """The type of a tensor in the file."""
    scheme = target.scheme
    if scheme.is_dense:
        return "f32" if len(target.shape) == 1 or scheme.name == "f64" else scheme.name
    if "codes" not in (part.name for part in scheme.parts):
        return scheme.name
    return twin_of(scheme)


def twin_of(scheme: Scheme) -> str:
    return "q8_0" if scheme.name.startswith("int8") else "q4_1" if scheme.name.startswith("uint4") else "q4_0"


def as_q4_1(weight: QTensor) -> QTensor:
    """A uint4 weight as q4_1 blocks: scale * code + minimum."""
    scales = weight.parts["scales"]
    minima = (-scales.to(torch.float32) * weight.parts["zeros"].to(torch.float32)).to(torch.float16)
    if not bool(minima.isfinite().all()):
        raise ConfigError("A matrix has values too large for a GGUF file with zero points; leave --asymmetric out.")
    repeat = weight.scheme.block // BLOCK
    head = [part.repeat_interleave(repeat, -1).reshape(-1, 1).view(torch.uint8) for part in (scales, minima)]
    codes = unpack_pairs(weight.parts["codes"]).reshape(-1, BLOCK)
    blocks = torch.cat((*head, codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)), -1)
    scheme = SCHEMES["q4_1"]
    shape = (*weight.shape[:-1], scheme.row_bytes(weight.shape[-1]))
    return QTensor(scheme, {"blocks": blocks.reshape(shape)}, weight.shape)
