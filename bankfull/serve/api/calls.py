"""What the HTTP application and the APIs that it offers know of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bankfull.serve.api.errors import Problem, openai_error
from bankfull.serve.api.sse import EventStream

CALLER = "bankfull.caller"
"""The key of an ASGI scope under which authentication leaves the `Caller`."""

ON_RESERVE = "bankfull.on_reserve"
"""The same for whether there was room for its connection only on the reserve, which is for probes and admins."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and what the service itself adds to a call."""

    key: str | None = None
    """The name of the API key; None for a call that nobody vouches for."""
    salt: str = ""
    """Keeps one key's prefixes apart from another's."""
    priority: int | None = None
    """Overrides what the call asks for: batch work."""

    def salted(self, cache_salt: str | None) -> str:
        """The two salts as one; no pair of them can look like another pair."""
        return f"{len(self.salt)}:{self.salt}{cache_salt or ''}" if self.salt or cache_salt else ""

    def ranked(self, priority: int) -> int:
        return priority if self.priority is None else self.priority


class Api(Protocol):
    """One endpoint: a body in, an answer out."""

    async def answer(self, body: bytes, caller: Caller) -> bytes | EventStream:
        """A whole JSON document, or a stream of events. Whatever is wrong with the call is raised."""
        ...

    def spell(self, problem: Problem) -> bytes:
        """An error in this API's shape, as a JSON document."""
        ...


def spelled_at(apis: Mapping[str, Api], path: str, problem: Problem) -> bytes:
    """In the shape that clients of this path expect: that of its API, or of the nearest one above it."""
    while path and path not in apis:
        path = path.rpartition("/")[0]
    return apis[path].spell(problem) if path else openai_error(problem)
