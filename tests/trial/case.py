"""A case: everything that a run depends on, as text. A failure is printed as one, and replays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Ask:
    """A request. `settings`: values of request dimensions by name; what is left out has its default."""

    prompt: tuple[int, ...]
    settings: Settings = field(default_factory=dict)

    def get(self, name: str, usual: Any = None) -> Any:
        return self.settings.get(name, usual)

    def without(self, name: str) -> Ask:
        return replace(self, settings={key: value for key, value in self.settings.items() if key != name})


@dataclass(frozen=True)
class Case:
    """`seed`: of what the case leaves open: errors of guesses, delays of the late device."""

    seed: int
    model: str
    options: Settings = field(default_factory=dict)
    asks: tuple[Ask, ...] = ()

    def get(self, name: str, usual: Any = None) -> Any:
        return self.options.get(name, usual)

    def without(self, name: str) -> Case:
        return replace(self, options={key: value for key, value in self.options.items() if key != name})

    def to_json(self) -> str:
        asks = [{"prompt": list(ask.prompt), **ask.settings} for ask in self.asks]
        whole = {"seed": self.seed, "model": self.model, "options": dict(self.options), "requests": asks}
        return json.dumps(whole, ensure_ascii=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Case:
        found = json.loads(text)
        asks = []
        for one in found["requests"]:
            prompt = tuple(one.pop("prompt"))
            asks.append(Ask(prompt, one))
        return Case(found["seed"], found["model"], found["options"], tuple(asks))
