"""Declarations of the state that a layer keeps of a sequence, and their grouping for the pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from bankfull.errors import ModelError
from bankfull.state.mask import Mask, Sight, kept_pages

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
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
    """State that grows with the sequence. With a window, only the last `window` tokens stay live; with a mask, only
    those that it lets a later token see."""

    tensors: tuple[TensorSpec, ...]
    window: Sight = None


@dataclass(frozen=True, slots=True)
class Recurrent:
    """State of constant size, replaced by every token."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """The tensors of an earlier layer's state (cross-layer attention): its layer, and its number in that layer. In the
    second of two joined models, negative layers are those of the first one: -1 is its last layer."""

    layer: int
    state: int = 0


StateSpec = Paged | Recurrent | Shared
Member = tuple[int, int]
"""A layer, and the number of the state among that layer's states."""


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """States whose pages are allocated and freed together. One page holds `page_tokens` tokens of all of them."""

    members: tuple[Member, ...]
    tensors: tuple[TensorSpec, ...]
    window: Sight
    page_tokens: int

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(layer for layer, _ in self.members))

    @property
    def token_bytes(self) -> int:
        return len(self.members) * sum(t.nbytes for t in self.tensors)

    @property
    def extent(self) -> int | None:
        """Tokens after which a page that no query keeps is forgotten; None: never."""
        return self.window.extent if isinstance(self.window, Mask) else self.window

    def frames_for(self, length: int, new: int) -> int:
        """The most pages that a sequence of `length` tokens ever holds at once, with at most `new` tokens per step."""
        page = self.page_tokens
        whole, reach = -(-length // page), self.extent
        if reach is None:
            return whole
        kept = 0
        if isinstance(self.window, Mask):
            kept = kept_pages(self.window, whole, page)
        return min(whole, (reach - 1 + new) // page + 2 + kept)


@dataclass(frozen=True, slots=True)
class RecurrentGroup:
    """All recurrent states: one slot holds every one of them."""

    members: tuple[Member, ...]
    tensors: tuple[tuple[TensorSpec, ...], ...]
    """Tensors of each member."""

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(layer for layer, _ in self.members))

    @property
    def slot_bytes(self) -> int:
        return sum(tensor.nbytes for member in self.tensors for tensor in member)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the layers of a model share the pools."""

    paged: tuple[PagedGroup, ...]
    recurrent: RecurrentGroup | None
    owners: tuple[tuple[Member, ...], ...]
    """For each state of each layer, the state that owns its tensors: itself, unless it is `Shared`."""
    groups: tuple[tuple[int | None, ...], ...]
    """For each state of each layer, the number of its paged group; None for a recurrent state."""
    frame_bytes: int
    block_tokens: int
    """Granularity of the hash chain; every group's page is a whole number of blocks."""

    def frames_for(self, length: int, new: int) -> int:
        return sum([group.frames_for(length, new) for group in self.paged])

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token of context costs while no window is full."""
        return sum(g.token_bytes for g in self.paged)

    def part(self, first: int, count: int) -> Layout:
        """The layout of a model that owns `count` layers from `first` on, where several models share the pools. It has
        the same paged groups, and recurrent state only if its own layers have any."""
        if count == len(self.owners):
            return self
        groups = self.groups[first : first + count]
        recurrent = self.recurrent if any(None in states for states in groups) else None
        return replace(self, owners=self.owners[first : first + count], groups=groups, recurrent=recurrent)

    def held(self, first: int, last: int) -> Layout:
        """The layout on a rank that keeps the state of the layers first .. last - 1 only. Groups, tokens of a page and
        numbers of pages and slots are those of all ranks; the bytes behind them are this rank's."""

        def kept(member: Member) -> bool:
            return first <= member[0] < last

        paged = tuple(replace(group, members=tuple(filter(kept, group.members))) for group in self.paged)
        recurrent = self.recurrent
        if recurrent is not None:
            pairs = [pair for pair in zip(recurrent.members, recurrent.tensors, strict=True) if kept(pair[0])]
            recurrent = RecurrentGroup(tuple(member for member, _ in pairs), tuple(tensors for _, tensors in pairs))
        return replace(self, paged=paged, recurrent=recurrent, frame_bytes=_frame_bytes(paged))


def _frame_bytes(paged: Sequence[PagedGroup]) -> int:
    frame = max((group.token_bytes * group.page_tokens for group in paged), default=0)
    return -(-frame // FRAME_ALIGN) * FRAME_ALIGN


def joined_states(
    first: Sequence[tuple[StateSpec, ...]], second: Sequence[tuple[StateSpec, ...]]
) -> list[tuple[StateSpec, ...]]:
    """The layers of two models in one list, for one layout."""
    moved = [
        tuple(replace(spec, layer=spec.layer + len(first)) if isinstance(spec, Shared) else spec for spec in states)
        for states in second
    ]
    return [*first, *moved]


def layout_of(layers: Sequence[Sequence[StateSpec]], page_tokens: int) -> Layout:
    """Group equal states of all layers. The heaviest group gets `page_tokens` per page, the others as many as fit the
    frame.

    Page sizes divide one another, so that a common border of all groups is the border of the longest page.
    """
    alike: dict[tuple[tuple[TensorSpec, ...], Sight], list[Member]] = {}
    slots: dict[Member, tuple[TensorSpec, ...]] = {}
    for layer, states in enumerate(layers):
        for number, spec in enumerate(states):
            if isinstance(spec, Recurrent):
                slots[layer, number] = spec.tensors
            elif isinstance(spec, Paged):
                if not sum(tensor.nbytes for tensor in spec.tensors):
                    raise ModelError(
                        f"Layer {layer} declares pages without content; leave the state out, or give it tensors."
                    )
                alike.setdefault((spec.tensors, spec.window), []).append((layer, number))
    weights = {key: len(members) * sum(t.nbytes for t in key[0]) for key, members in alike.items()}
    heaviest = max(weights.values(), default=0)
    paged = []
    multiple = 1
    for key in sorted(alike, key=lambda k: -weights[k]):
        multiple = heaviest // weights[key] // multiple * multiple
        paged.append(PagedGroup(tuple(alike[key]), key[0], key[1], page_tokens * multiple))
    group_of = {member: number for number, group in enumerate(paged) for member in group.members}
    owners = tuple(
        tuple(_owner(layers, (layer, number)) for number in range(len(states))) for layer, states in enumerate(layers)
    )
    return Layout(
        tuple(paged),
        RecurrentGroup(tuple(slots), tuple(slots.values())) if slots else None,
        owners,
        tuple(tuple(group_of.get(owner) for owner in states) for states in owners),
        _frame_bytes(paged),
        page_tokens,
    )


def _owner(layers: Sequence[Sequence[StateSpec]], member: Member) -> Member:
    layer, number = member
    spec = layers[layer][number]
    if not isinstance(spec, Shared):
        return member
    earlier = layers[spec.layer] if 0 <= spec.layer < layer else ()
    if not 0 <= spec.state < len(earlier) or isinstance(earlier[spec.state], Shared):
        raise ModelError(f"Layer {layer} shares the state of layer {spec.layer}, which owns none or comes later.")
    return spec.layer, spec.state
