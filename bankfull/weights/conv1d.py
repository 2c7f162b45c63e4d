"""GPT-2 directories store the matrices of their blocks as (inputs, outputs); other families and GGUF store them
transposed. So do quantized directories: quantizers put linear layers in the place of these modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bankfull.errors import ModelError
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source_view import SourceView

_CONV1D = re.compile(r"(^|\.)(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")


def is_stored_transposed(config: Mapping[str, Any], name: str) -> bool:
    """Whether a Hugging Face directory with this configuration stores the matrix as (inputs, outputs)."""
    return config.get("model_type") == "gpt2" and _CONV1D.search(name) is not None


@dataclass(frozen=True, slots=True)
class Conv1DSource(SourceView):
    """A GPT-2 directory's tensors, with the matrices of its blocks as (outputs, inputs)."""

    config: Mapping[str, Any]
    quantized: Collection[str] = ()
    """Matrices that the directory holds quantized."""

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.source.shape(name)
        return shape[::-1] if self._is_transposed(name) else shape

    def get(self, name: str) -> QTensor:
        tensor = self.source.get(name)
        if not self._is_transposed(name):
            return tensor
        if not tensor.is_dense or len(tensor.shape) != 2:
            raise ModelError(f"Tensor {name} has shape {tensor.shape}, but it must be an unquantized matrix.")
        return QTensor.dense(tensor.parts["data"].T.contiguous())

    def _is_transposed(self, name: str) -> bool:
        return name not in self.quantized and is_stored_transposed(self.config, name)
