"""What a layer remembers of a sequence, declared per layer and grouped for the pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from bankfull.errors import ModelError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
FRAME_ALIGN = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a state: its shape per token (paged) or per slot (recurrent)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Paged:
    """State that grows with the sequence; with a window, only the last `window` tokens stay live."""

    tensors: tuple[TensorSpec, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Recurrent:
    """State of constant size, replaced by every token."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """No state of its own: the layer reads what layer `layer` wrote (cross-layer attention)."""

    layer: int


StateSpec = Paged | Recurrent | Shared


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers whose pages live and die together. One page holds `page_tokens` tokens of all of them."""

    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    window: int | None
    page_tokens: int

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * sum(t.nbytes for t in self.tensors)

    def frames_for(self, length: int, new: int) -> int:
        """Pages that a sequence of `length` tokens can ever hold at once, when a step gives it at most `new` tokens."""
        whole = -(-length // self.page_tokens)
        return whole if self.window is None else min(whole, (self.window - 1 + new) // self.page_tokens + 2)


@dataclass(frozen=True, slots=True)
class RecurrentGroup:
    """All recurrent layers: one slot holds the state of every one of them."""

    layers: tuple[int, ...]
    tensors: tuple[tuple[TensorSpec, ...], ...]

    @property
    def slot_bytes(self) -> int:
        return sum(t.nbytes for layer in self.tensors for t in layer)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the layers of a model share the pools."""

    paged: tuple[PagedGroup, ...]
    recurrent: RecurrentGroup | None
    owner: tuple[int, ...]
    """For each layer the layer whose state it uses: itself, unless `Shared`."""
    frame_bytes: int
    block_tokens: int
    """Granularity of the hash chain; every group's page is a whole number of blocks."""

    def frames_for(self, length: int, new: int) -> int:
        return sum(group.frames_for(length, new) for group in self.paged)

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token of context costs while no window has been left."""
        return sum(g.token_bytes for g in self.paged)


def layout_of(specs: Sequence[StateSpec], page_tokens: int) -> Layout:
    """Group layers of equal state; the heaviest group gets `page_tokens` per page, the others as many as fit the frame.

    Page sizes divide one another, so that a common border of all groups is the border of the longest page.
    """
    owner = tuple(_owner(specs, layer) for layer in range(len(specs)))
    alike: dict[tuple[tuple[TensorSpec, ...], int | None], list[int]] = {}
    recurrent = [i for i, spec in enumerate(specs) if isinstance(spec, Recurrent)]
    for i, spec in enumerate(specs):
        if isinstance(spec, Paged):
            if not sum(tensor.nbytes for tensor in spec.tensors):
                raise ModelError(f"Layer {i} declares pages without content; leave the state out, or give it tensors.")
            alike.setdefault((spec.tensors, spec.window), []).append(i)
    weights = {key: len(layers) * sum(t.nbytes for t in key[0]) for key, layers in alike.items()}
    heaviest = max(weights.values(), default=0)
    groups = []
    multiple = 1
    for key in sorted(alike, key=lambda k: -weights[k]):
        multiple = heaviest // weights[key] // multiple * multiple
        groups.append(PagedGroup(tuple(alike[key]), key[0], key[1], page_tokens * multiple))
    frame = max((g.token_bytes * g.page_tokens for g in groups), default=0)
    slots = RecurrentGroup(tuple(recurrent), tuple(_tensors(specs[i]) for i in recurrent)) if recurrent else None
    return Layout(tuple(groups), slots, owner, -(-frame // FRAME_ALIGN) * FRAME_ALIGN, page_tokens)


def _owner(specs: Sequence[StateSpec], layer: int) -> int:
    spec = specs[layer]
    if not isinstance(spec, Shared):
        return layer
    if not 0 <= spec.layer < layer or isinstance(specs[spec.layer], Shared):
        raise ModelError(f"Layer {layer} shares the state of layer {spec.layer}, which owns none or comes later.")
    return spec.layer


def _tensors(spec: StateSpec) -> tuple[TensorSpec, ...]:
    assert isinstance(spec, Recurrent)
    return spec.tensors
