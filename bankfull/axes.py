"""What the dimensions of a weight count.

A layer names the axes of each weight that it asks for. Which rows a rank holds of a fused tensor, which rows are pruned
with a neuron, and what an inventory prints follow from them.
"""

from __future__ import annotations

from enum import StrEnum


class AxisKind(StrEnum):
    """What an axis counts. Called with a number, and the elements of each, it is such an axis."""

    HIDDEN = "hidden"
    """Channels of the residual stream."""
    HEADS = "heads"
    """Heads of a mixer: of queries, or those of a recurrence."""
    KV_HEADS = "kv_heads"
    """Heads of keys and values. With fewer heads than ranks, several ranks hold the same."""
    HEAD = "head"
    """Elements of one head, the same for all heads."""
    NEURONS = "neurons"
    """Neurons of a feed-forward layer."""
    EXPERTS = "experts"
    VOCAB = "vocab"
    CHANNELS = "channels"
    """Channels of a recurrent mixer without heads."""
    GROUPS = "groups"
    """Groups of heads that share inputs of a recurrence; several ranks may hold the same."""
    STATE = "state"
    """Numbers of a recurrence's state."""
    LATENT = "latent"
    """Numbers of a vector of low rank between two products."""
    TAPS = "taps"
    """Tokens in the window of a convolution."""
    POSITIONS = "positions"
    """Learned positions."""
    PARTS = "parts"
    """Few numbers with a fixed meaning, such as a real and an imaginary part."""
    SIZE = "size"
    """Not named."""

    def __call__(self, count: int, each: int = 1) -> WeightAxis:
        return WeightAxis(count * each, self, each)


COPIED = frozenset((AxisKind.KV_HEADS, AxisKind.GROUPS))
"""AxisKinds of which several ranks may hold the same part."""


class WeightAxis(int):
    """The length of a dimension, which knows what it counts. In arithmetic it is the number."""

    kind: AxisKind
    each: int
    """Elements of one of what is counted: the size of a head."""
    _parts: tuple[WeightAxis, ...]

    def __new__(
        cls, length: int, kind: AxisKind = AxisKind.SIZE, each: int = 1, parts: tuple[WeightAxis, ...] = ()
    ) -> WeightAxis:
        axis = super().__new__(cls, length)
        axis.kind, axis.each, axis._parts = kind, each, parts
        return axis

    @property
    def count(self) -> int:
        return int(self) // self.each

    @property
    def parts(self) -> tuple[WeightAxis, ...]:
        """The axes that a fused tensor holds one after another; else only this one."""
        return self._parts or (self,)

    def counts(self, *kinds: AxisKind) -> bool:
        """Whether it, or a part of it, is of one of these kinds."""
        return any(part.kind in kinds for part in self.parts)

    @property
    def text(self) -> str:
        """As an inventory prints it. A message shows the number."""
        sizes = (f"{part.count}x{part.each}" if part.each > 1 else f"{part.count}" for part in self.parts)
        return " + ".join(f"{part.kind} {size}" for part, size in zip(self.parts, sizes, strict=True))


Axes = tuple[int, ...]
"""The length of each dimension of a weight, as a `WeightAxis` that says what it counts."""


def sizes(axes: Axes) -> tuple[int, ...]:
    """The shape of a weight as plain numbers."""
    return tuple(map(int, axes))


def joined(*axes: int) -> WeightAxis:
    """The axis of a fused tensor, which holds these one after another."""
    parts = [part for axis in axes for part in as_axis(axis).parts]
    return parts[0] if len(parts) == 1 else WeightAxis(sum(parts), parts=tuple(parts))


def as_axis(length: int, kind: AxisKind = AxisKind.SIZE) -> WeightAxis:
    """An axis as it is; a number as an axis of this kind."""
    return length if isinstance(length, WeightAxis) else kind(length)


CHANNELS = AxisKind.CHANNELS
EXPERTS = AxisKind.EXPERTS
GROUPS = AxisKind.GROUPS
HEAD = AxisKind.HEAD
HEADS = AxisKind.HEADS
HIDDEN = AxisKind.HIDDEN
KV_HEADS = AxisKind.KV_HEADS
LATENT = AxisKind.LATENT
NEURONS = AxisKind.NEURONS
PARTS = AxisKind.PARTS
POSITIONS = AxisKind.POSITIONS
STATE = AxisKind.STATE
TAPS = AxisKind.TAPS
VOCAB = AxisKind.VOCAB
