"""The protocol between the harness and an engine's process: one JSON object per line, one reply for each.

    {"op": "load", "model": PATH, "threads": N}        -> {"ok": true, "name": ..., "seconds": ...}
    {"op": "work", "prompts": [[ids]], "new": N}       -> {"ok": true, "seconds": ..., "counts": [tokens per prompt]}
    {"op": "quit"}                                     -> the process exits

The reply to a failure is {"ok": false, "error": SENTENCE}. Decoding is greedy and ignores the end of text.
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
        """Load the model; returns the engine's name and version."""
        ...

    def generate(self, prompts: Prompts, new: int) -> list[list[int]]:
        """Exactly `new` tokens for each prompt, all prompts in one batch."""
        ...


def serve(engine: ServedEngine) -> None:
    """Reply until asked to quit, or until stdin closes."""
    _end_with_parent()
    # Libraries may print to stdout, so replies use a duplicate of it.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["op"] == "quit":
            return
        try:
            reply = {"ok": True, **_answer(engine, asked)}
        except Exception as error:  # an error of a peer becomes a row of the table
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
        print(json.dumps(reply), file=replies, flush=True)


def _end_with_parent() -> None:
    """Die with the harness: a killed harness must not leave a paused engine behind."""
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
