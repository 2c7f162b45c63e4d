"""The tensors of a model without their data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from bankfull.weights.outliers import KEPT, outlier_count
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme
from bankfull.weights.source_view import SourceView

META = torch.device("meta")


def blank(scheme: Scheme, shape: tuple[int, ...], outliers: int | None = None) -> QTensor:
    """A tensor of a storage scheme, without data. `outliers`: columns that are kept beside it."""
    tensor = QTensor(scheme, scheme.empty(shape, META), shape)
    if outliers is None:
        return tensor
    values = torch.empty((*shape[:-1], outliers), dtype=KEPT, device=META)
    return replace(tensor, outliers=(torch.empty(outliers, dtype=torch.int64, device=META), values))


@dataclass(frozen=True, slots=True)
class FileShapes(SourceView):
    """The tensors of a source in their storage schemes, without data; the source is never read."""

    read: dict[str, QTensor] = field(default_factory=dict)

    def get(self, name: str) -> QTensor:
        if name not in self.read:
            count = outlier_count(self.source, name)
            self.read[name] = blank(self.source.scheme(name), self.source.shape(name), count)
        return self.read[name]

    def unread(self) -> list[str]:
        return [name for name in self.source.names() if name not in self.read]

    def release(self) -> None:
        """Nothing to release: nothing was read."""
