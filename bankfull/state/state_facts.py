"""What the numbers in the state of an engine depend on: it names files of the disk tier, and engines that differ in it
hand each other nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any


class StateFacts:
    """Some facts take long, such as the hash of large files. They are made when somebody asks."""

    def __init__(self, given: Mapping[str, Any | Callable[[], Any]]) -> None:
        self._given = given

    @cached_property
    def _made(self) -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in self._given.items()}

    def beside(self, **others: Any) -> StateFacts:
        """The same facts, some of them others."""
        return StateFacts({**self._given, **others})

    def all(self) -> dict[str, Any]:
        """All facts by name, as JSON."""
        return self._made
