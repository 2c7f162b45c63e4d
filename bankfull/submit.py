"""One request, as the API states it and the engine's front end reads it.

The record passes unread through everything in between: the guards, the link, the set of replicas and the wire. A new
field needs its writer, its reader and one line here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from bankfull.sample.params import SamplingParams
from bankfull.types import Keep


@dataclass(slots=True)
class Submit:
    prompt: list[int]
    params: SamplingParams
    id: Any = None
    """A hashable name, unique on its engine; None: the link or the front end gives it a number."""
    priority: int = 0
    """Lower runs first; batch work has the highest number."""
    salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    pool: str | None = None
    """None, "last" or "mean": hidden states instead of tokens."""
    deadline: float | None = None
    """When it is aborted, on the monotonic clock of the process that made the record; no other process reads it."""
    explain: bool = False
    """Whether `RequestDone` has an account of the time."""
    tenant: str = ""
    """The owner of the request: tenants share the engine evenly."""
    keeps: list[Keep] = field(default_factory=list)
    """Prefixes of the prompt to pin in the prefix cache, the shortest first."""
    admitted: bool = False
    """Another engine has admitted it: none refuses it for a full queue."""
    generated: list[list[int]] = field(default_factory=list)
    """Tokens that each sample has generated on another engine, by sample number; empty for a new request. The samples
    continue exactly as if this engine had generated them. Deltas and logprobs begin with the first new token."""
    finished: list[int] = field(default_factory=list)
    """Numbers of the samples that have ended on another engine: they are not continued and get no delta."""
    hands_over: bool = False
    """The request leaves the engine as soon as each of its samples has a token; another engine continues it."""
    expected: int = 0
    """The number of the `wire.Expect` whose state it uses; its places are released when the request gets a row."""

    @property
    def generates(self) -> bool:
        """Whether it asks for tokens."""
        return self.pool is None and self.params.max_tokens != 0

    @property
    def begun(self) -> bool:
        """Whether another engine has generated a part of the answer."""
        return bool(self.finished) or any(self.generated)

    def seconds_left(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.monotonic()
