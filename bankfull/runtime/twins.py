"""The tensors of a running model beside their twins in another model of the same build, found by one walk over both.

The walk knows no layer: it follows attributes, containers, closures and bound methods of both models in parallel, so
that what is derived from a weight is found like the weight itself. What is no tensor must be equal: a number, a layout
or a kernel that follows from the old weights would be wrong beside the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from math import isnan
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.ops.registry import Kit, Operation, Provider
from bankfull.weights.qtensor import LateParts

HOLDS_NONE = (Build, Kit, Operation, Provider)
"""What layers keep of their making; no tensor of the model is reached through it alone."""
VALUES: tuple[type, ...] = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, slice, range, type)
VALUES += (ModuleType, BuiltinFunctionType, np.generic)
"""Kinds of objects that are compared as a whole."""
SHOWN = 60


class UnlikeTwins(Exception):
    """Something that is no tensor's content differs. The text has no full stop."""


@dataclass(frozen=True, slots=True)
class TwinTensors:
    """A tensor of the running model, and the one whose content it gets."""

    own: Tensor
    new: Tensor


@dataclass(slots=True)
class Twins:
    """What `commit` has to write."""

    tensors: list[TwinTensors] = field(default_factory=list)
    late: list[tuple[LateParts, LateParts]] = field(default_factory=list)
    """Parts that the running model has not made: it takes over the others."""

    @property
    def nbytes(self) -> int:
        return sum(pair.own.nbytes for pair in self.tensors)

    def commit(self) -> None:
        """Overwrite the running model in place. The caller sees to it that no step reads it meanwhile."""
        with torch.inference_mode():
            for pair in self.tensors:
                pair.own.copy_(pair.new)
            for own, new in self.late:
                if not own.is_made:
                    own.take_over(new)
                else:  # it was read since
                    for name in own:
                        own[name].copy_(new[name])


def twins_of(own: Any, new: Any, further: Callable[[], Sequence[tuple[Any, Any]]] = tuple) -> Twins:
    """`further`: what holds weights beside the two models, perhaps in another form. Raises UnlikeTwins."""
    walk = _Walk()
    walk.meet(own, new, "")
    for number, (a, b) in enumerate(further()):
        walk.meet(a, b, f"captured weight {number}")
    return walk.found()


def tensors_of(model: Any) -> list[Tensor]:
    """All tensors that a walk over one model finds."""
    walk = _Walk(alone=True)
    walk.meet(model, model, "")
    return [pair.own for pair in walk.found().tensors]


class _Walk:
    def __init__(self, alone: bool = False) -> None:
        """`alone`: both models are the same one."""
        self._alone = alone
        self._seen: set[tuple[int, int]] = set()
        self._tensors: dict[tuple[Any, ...], tuple[TwinTensors, str]] = {}
        self._late: list[tuple[LateParts, LateParts]] = []

    def found(self) -> Twins:
        return Twins(_without_views([pair for pair, _ in self._tensors.values()]), self._late)

    def meet(self, own: Any, new: Any, place: str) -> None:
        if own is None or new is None or isinstance(own, VALUES):
            if own is not new and not _equal(own, new):
                raise UnlikeTwins(f"{place} is {_shown(own)} in the running model and {_shown(new)} in the other")
            return
        if isinstance(own, HOLDS_NONE) or (own is new and not self._alone):
            return
        if type(own) is not type(new) and not isinstance(own, Tensor | Mapping):
            names = type(own).__name__, type(new).__name__
            raise UnlikeTwins(f"{place} is of the type {names[0]} in the running model and {names[1]} in the other")
        pair = (id(own), id(new))
        if pair in self._seen:
            return
        self._seen.add(pair)
        if isinstance(own, Tensor):
            self._meet_tensors(own, new, place)
        elif isinstance(own, LateParts):
            self._meet_late(own, new, place)
        else:
            for name, a, b in self._parts(own, new, place):
                self.meet(a, b, name)

    def _parts(self, own: Any, new: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(own, np.ndarray):
            if not np.array_equal(own, new):
                raise UnlikeTwins(f"{place} has other numbers in the two models")
        elif isinstance(own, Mapping):
            if not isinstance(new, Mapping) or own.keys() != new.keys():
                raise UnlikeTwins(f"{place} has other names in the two models")
            yield from ((f"{place}[{key!r}]", value, new[key]) for key, value in list(own.items()))
        elif isinstance(own, Set):
            if own != new:
                raise UnlikeTwins(f"{place} has other members in the two models")
        elif isinstance(own, Sequence):
            if len(own) != len(new):
                raise UnlikeTwins(f"{place} has {len(own)} parts in the running model and {len(new)} in the other")
            yield from ((f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(own, new, strict=True)))
        elif isinstance(own, MethodType):
            yield place, own.__func__, new.__func__
            yield place, own.__self__, new.__self__
        elif isinstance(own, partial):
            yield place, own.func, new.func
            yield place, own.args, new.args
            yield place, own.keywords, new.keywords
        elif isinstance(own, FunctionType):
            if own.__code__ is not new.__code__:
                raise UnlikeTwins(
                    f"{place} is computed by {own.__qualname__} in one model and {new.__qualname__} in the other"
                )
            yield place, own.__defaults__, new.__defaults__
            yield place, own.__kwdefaults__, new.__kwdefaults__
            names, cells = own.__code__.co_freevars, zip(own.__closure__ or (), new.__closure__ or (), strict=True)
            yield from (
                (f"{place}.{name}", a.cell_contents, b.cell_contents) for name, (a, b) in zip(names, cells, strict=True)
            )
        else:
            yield from self._attributes(own, new, place)

    def _attributes(self, own: Any, new: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
        held = _attributes_of(own)
        if not held and not hasattr(own, "__dict__") and not _slots_of(type(own)):
            raise UnlikeTwins(f"{place} is a {type(own).__name__}, whose content nobody knows")
        beside = _attributes_of(new)
        for name, value in held.items():
            at = f"{place}.{name}".lstrip(".")
            if name not in beside:
                if not isinstance(getattr(type(new), name, None), cached_property):
                    raise UnlikeTwins(f"{at} is in the running model only")
                yield at, value, getattr(new, name)  # made at its first use, which the other one had not yet
            else:
                yield at, value, beside[name]
        for name in beside.keys() - held.keys():
            if not isinstance(getattr(type(own), name, None), cached_property):
                raise UnlikeTwins(f"{f'{place}.{name}'.lstrip('.')} is not in the running model")

    def _meet_late(self, own: LateParts, new: LateParts, place: str) -> None:
        if list(own) != list(new):
            raise UnlikeTwins(f"{place} has other parts in the two models")
        if not own.is_made and not self._alone:
            self._late.append((own, new))
        elif own.is_made:
            for name in own:
                self.meet(own[name], new[name], f"{place}[{name!r}]")

    def _meet_tensors(self, own: Tensor, new: Tensor, place: str) -> None:
        facts = [(tuple(one.shape), one.dtype, one.device) for one in (own, new)]
        if facts[0] != facts[1]:
            told = [
                f"{list(shape)} of {str(dtype).removeprefix('torch.')} on {device}" for shape, dtype, device in facts
            ]
            raise UnlikeTwins(f"{place} is {told[0]} in the running model and {told[1]} in the other")
        if own.device.type == "meta" or not own.numel():
            return
        if own.data_ptr() == new.data_ptr() and not self._alone:
            return  # nothing that a source holds: pages, or a table that all models share
        # A repeated number is stored once.
        sizes = [1 if stride == 0 else size for size, stride in zip(own.shape, own.stride(), strict=True)]
        pair = TwinTensors(
            *(one.as_strided(sizes, one.stride()) if sizes != list(own.shape) else one for one in (own, new))
        )
        key = (own.data_ptr(), tuple(sizes), own.stride(), own.dtype)
        before = self._tensors.setdefault(key, (pair, place))
        if before[0].new.data_ptr() != new.data_ptr() and not torch.equal(_bits(before[0].new), _bits(pair.new)):
            raise UnlikeTwins(f"{before[1]} and {place} are one in the running model and two in the other")


def _bits(tensor: Tensor) -> Tensor:
    """Numbers that are equal only if all bits are: NaN equals NaN."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    return tensor if whole is None or tensor.dtype.is_complex else tensor.view(whole)


def _without_views(pairs: list[TwinTensors]) -> list[TwinTensors]:
    """The pairs without those whose bytes are inside of another pair's on both sides: each byte is copied once."""
    dropped: set[int] = set()
    end = apart = 0
    whole = [pair for pair in pairs if pair.own.is_contiguous() and pair.new.is_contiguous()]
    for pair in sorted(whole, key=lambda one: (one.own.data_ptr(), -one.own.nbytes)):
        first, last = pair.own.data_ptr(), pair.own.data_ptr() + pair.own.nbytes
        if last <= end and pair.new.data_ptr() - first == apart:
            dropped.add(id(pair))
        else:
            end, apart = last, pair.new.data_ptr() - first
    return [pair for pair in pairs if id(pair) not in dropped]


def _equal(own: Any, new: Any) -> bool:
    if type(own) is not type(new):
        return False
    return bool(own == new) or (isinstance(own, float) and isnan(own) and isnan(new))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _slots_of(kind: type) -> list[str]:
    slots: list[str] = []
    for base in kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        slots += (own,) if isinstance(own, str) else own
    return [name for name in slots if name not in ("__dict__", "__weakref__")]


def _attributes_of(one: Any) -> dict[str, Any]:
    """What an object holds: properties are not asked."""
    held = {name: getattr(one, name) for name in _slots_of(type(one)) if hasattr(one, name)}
    return held | getattr(one, "__dict__", {})
