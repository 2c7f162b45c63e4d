"""The tensors of a model without their data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bankfull.weights.qtensor import QTensor
from bankfull.weights.source_view import SourceView

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class BlankTensors(SourceView):
    """The tensors of a source without their data. All are dense, whatever they are in the file: nothing multiplies
    them, and a rank cuts its part of a fused matrix with outlier columns by the columns' numbers, which are data."""

    def get(self, name: str) -> QTensor:
        return QTensor.dense(torch.empty(self.source.shape(name), device=META))

    def release(self) -> None:
        """Nothing to release: nothing was read."""
