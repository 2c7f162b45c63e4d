"""What an engine's process and the harness say to one another: one JSON object per line, a reply for each.

    {"op": "load", "model": PATH, "threads": N}        -> {"ok": true, "name": ..., "seconds": ...}
    {"op": "work", "prompts": [[ids]], "new": N}       -> {"ok": true, "seconds": ..., "counts": [tokens per prompt]}
    {"op": "quit"}                                     -> the process ends

What fails is answered by {"ok": false, "error": SENTENCE}. Greedy, and the end of text does not end anything.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, Protocol

Prompts = list[list[int]]
LONGEST_ERROR = 500


class ServedEngine(Protocol):
    def load(self, model: str, threads: int) -> str:
        """Get ready; the engine's name and version."""
        ...

    def generate(self, prompts: Prompts, new: int) -> list[list[int]]:
        """Exactly `new` tokens behind each prompt, all prompts at once."""
        ...


def serve(engine: ServedEngine) -> None:
    """Answer until told to quit, or until nobody asks any more."""
    _end_with_parent()
    # Libraries print where they like; replies have a stream of their own.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["op"] == "quit":
            return
        try:
            reply = {"ok": True, **_answer(engine, asked)}
        except Exception as error:  # whatever a peer raises is a row of the table, not the end of the run
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
        print(json.dumps(reply), file=replies, flush=True)


def _end_with_parent() -> None:
    """A harness that is killed must not leave a stopped engine behind."""
    parent_death_signal = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def _answer(engine: ServedEngine, asked: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    if asked["op"] == "load":
        name = engine.load(asked["model"], asked["threads"])
        return {"name": name, "seconds": time.perf_counter() - begun}
    if asked["op"] == "work":
        made = engine.generate(asked["prompts"], asked["new"])
        return {"seconds": time.perf_counter() - begun, "counts": [len(tokens) for tokens in made]}
    raise ValueError(f"the operation {asked['op']!r} is unknown")
