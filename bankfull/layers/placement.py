"""Where the weights of a model's modules lie, and what computes with them.

A placement is data: a build asks it for the home of each module that it descends to, and reads a weight or hands out a
tensor without data accordingly. So a layer never knows whether its weights are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

import torch

from bankfull.axes import WeightAxis
from bankfull.ops.registry import Kit
from bankfull.weights.blank_source import META


class Role(Enum):
    """What a module belongs to."""

    MIXER = "what a rank with mixers runs: embedding, norms, mixers and head"
    FEED = "a feed-forward layer; such layers say so themselves (`Build.of`)"


class Mode(StrEnum):
    """How a weight reaches the operations that multiply by it."""

    RESIDENT = "resident"
    """It is read from the file, and stays where it is computed with."""
    ELSEWHERE = "elsewhere"
    """It is not read here: its layer has a tensor without data in its place."""


@dataclass(frozen=True, slots=True)
class Home:
    device: torch.device
    kit: Kit
    dtype: torch.dtype
    mode: Mode = Mode.RESIDENT

    @property
    def elsewhere(self) -> Home:
        """The home of what is not read here."""
        return Home(META, Kit(self.kit.device, ()), self.dtype, Mode.ELSEWHERE)


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """A weight that a model has asked for."""

    name: str
    axes: tuple[WeightAxis, ...]
    role: Role
    home: Home


class Placement(Protocol):
    @property
    def roles(self) -> frozenset[Role]:
        """What this rank computes: modules of other roles have no weights here."""
        ...

    def home(self, module: str, role: Role, here: Home) -> Home:
        """The home of a module's own weights. `here`: the home of what is read here."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Every weight of the model is read here."""

    roles: frozenset[Role] = frozenset(Role)

    def home(self, module: str, role: Role, here: Home) -> Home:
        return here
