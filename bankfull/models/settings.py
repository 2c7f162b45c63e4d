"""Typed access to the settings of one block of a composed model: each is read once, and none is left unread."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from bankfull.errors import ModelError
from bankfull.models.fields import MAX_SIZE, ConfigFields

WIDEST = 64
"""Tokens in the window of a short convolution, at most."""


class BlockSettings:
    """The settings of one block. Each one is read once; a setting that is not read is an error."""

    def __init__(self, block: str, values: Mapping[str, Any], fields: ConfigFields) -> None:
        self.block, self._values, self._read = block, dict(values), {"mixer", "feed"}
        self.fields = fields

    @property
    def hidden(self) -> int:
        return self.fields.size("hidden_size")

    def convolution(self, default: int) -> int:
        """`width`: tokens in the window of a short convolution."""
        width = self.size("width", default)
        if not 2 <= width <= WIDEST:
            raise self.wrong("width", width, f"from 2 to {WIDEST} tokens")
        return width

    def size(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if value is None:
            raise ModelError(f"Block {self.block!r} lacks {name!r}; give it as a whole number.")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < MAX_SIZE:
            raise self.wrong(name, value, f"a whole number from 1 to {MAX_SIZE - 1}")
        return value

    def size_or_none(self, name: str, default: int | None = None) -> int | None:
        return None if self._value(name, default) is None else self.size(name, default)

    def integer_or_none(self, name: str) -> int | None:
        value = self._value(name, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or abs(value) >= MAX_SIZE):
            raise self.wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def raw(self, name: str, default: Any = None) -> Any:
        return self._value(name, default)

    def finish(self) -> None:
        """Refuse settings that no reader knows."""
        unknown = sorted(set(self._values) - self._read)
        if unknown:
            near = get_close_matches(unknown[0], self._read, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(self._read))}."
            raise ModelError(f"Block {self.block!r} has no setting {unknown[0][:80]!r}: {hint}")

    def wrong(self, name: str, value: object, needed: str) -> ModelError:
        return ModelError(f"Block {self.block!r} has {name} = {repr(value)[:80]}, but it must be {needed}.")

    def _value(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self._values.get(name, default)
        return {"none": None, "true": True, "false": False}.get(value, value) if isinstance(value, str) else value
