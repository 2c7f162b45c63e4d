"""Typed access to a model's configuration: a field that is absent, of the wrong type or unsupported is an error."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from bankfull.errors import ModelError
from bankfull.models.registry import Config

MAX_SIZE = 1 << 31
MAX_LAYERS = 1 << 14
"""The most layers: far above any real model. Lists with a value per layer are allocated before a tensor is checked."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class ConfigFields:
    """A configuration over a family's defaults: files leave out fields that the reference implementation defaults.

    An explicit null stays null: it disables a feature that the default enables.
    """

    __slots__ = ("_values",)

    def __init__(self, config: Config, defaults: Config) -> None:
        self._values: dict[str, Any] = {**defaults, **config}

    def size(self, name: str) -> int:
        value = self._demand(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < MAX_SIZE:
            raise self._wrong(name, f"a whole number from 1 to {MAX_SIZE - 1}")
        return value

    def size_or_none(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self.size(name)

    def layers(self) -> int:
        count = self.size("num_hidden_layers")
        if count > MAX_LAYERS:
            raise self._wrong("num_hidden_layers", f"at most {MAX_LAYERS}")
        return count

    def number(self, name: str) -> float:
        value = self._demand(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e300:
            raise self._wrong(name, "a number from 0 up")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        return None if self._values.get(name) is None else self.number(name)

    def limits(self, name: str) -> tuple[float, float]:
        """A lower and an upper bound; the upper one may be infinite."""
        value = self._demand(name)
        if isinstance(value, list | tuple):  # transformers writes an infinite number as an object
            value = [inf if v == {"__float__": "Infinity"} else v for v in value]
        fine = isinstance(value, list) and len(value) == 2
        if not fine or any(not isinstance(v, int | float) or isinstance(v, bool) for v in value):
            raise self._wrong(name, "a list of two numbers")
        low, high = float(value[0]), float(value[1])
        if not 0.0 <= low <= high:
            raise self._wrong(name, "two numbers from 0 up, the second not below the first")
        return low, high

    def numbers(self, name: str, count: int) -> list[float]:
        value = self._demand(name)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self._wrong(name, f"a list of {count} numbers")
        if any(not isinstance(v, int | float) or isinstance(v, bool) or not 0 <= v < 1e300 for v in value):
            raise self._wrong(name, f"a list of {count} numbers from 0 up")
        return [float(v) for v in value]

    def is_text(self, name: str, text: str) -> bool:
        """Whether a field that is usually a number holds this text."""
        value = self._values.get(name)
        return isinstance(value, str) and value == text

    def flag(self, name: str) -> bool:
        value = self._demand(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._demand(name)
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def raw(self, name: str, default: Any) -> Any:
        """A value of any type, for a reader that checks it itself."""
        value = self._values.get(name)
        return default if value is None else value

    def object_or_none(self, name: str) -> dict[str, Any] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object or null")
        return value

    def per_layer(self, name: str, supported: Sequence[Any], default: Sequence[Any]) -> list[Any]:
        """One value for each layer, all of them `supported`; `default` where the file has none."""
        layers = self.layers()
        values = self._values.get(name)
        if values is None:
            values = list(default)
        if not isinstance(values, list) or len(values) < layers:
            raise self._wrong(name, f"a list of {layers} values, one for each layer")
        for value in values:
            if not any(value is s or (type(value) is type(s) and value == s) for s in supported):
                raise self._unsupported(name, value, supported)
        return values[:layers]

    def layer_numbers(self, name: str) -> set[int]:
        """A list of layers, counted from 0; empty where the file has none."""
        values = self._values.get(name) or []
        if not isinstance(values, list) or any(not isinstance(v, int) or isinstance(v, bool) or v < 0 for v in values):
            raise self._wrong(name, "a list of layer numbers, counted from 0")
        return set(values)

    def only(self, name: str, *supported: Any) -> None:
        """Refuse a value whose computation is not implemented. The field may be absent."""
        value = self._values.get(name)
        if value is not None and value not in supported:
            raise self._unsupported(name, value, supported)

    def _demand(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            raise lacking(name)
        return value

    def _wrong(self, name: str, needed: str) -> ModelError:
        value = repr(self._values.get(name))[:80]
        return ModelError(f"The model's configuration has {name} = {value}, but it must be {needed}.")

    def _unsupported(self, name: str, value: Any, supported: Sequence[Any]) -> ModelError:
        kind = self._values.get("model_type")
        known = ", ".join(repr(s) for s in supported) or "none"
        return ModelError(
            f"The model's configuration has {name} = {repr(value)[:80]}, which is not supported for {kind!r} models; "
            f"supported: {known}."
        )


def lacking(name: str) -> ModelError:
    return ModelError(f"The model's configuration lacks {name!r}; use the file that belongs to the model.")
