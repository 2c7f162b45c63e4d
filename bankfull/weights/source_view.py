"""The beginning of every source that shows another one's tensors in another form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bankfull.weights.scheme import Scheme
    from bankfull.weights.source import TensorSource


@dataclass(frozen=True, slots=True)
class SourceView:
    """Names, shapes, schemes and what was read are those of `source`, unless a view says otherwise."""

    source: TensorSource

    def names(self) -> list[str]:
        return self.source.names()

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def scheme(self, name: str) -> Scheme:
        return self.source.scheme(name)

    def unread(self) -> list[str]:
        return self.source.unread()

    def release(self) -> None:
        self.source.release()
