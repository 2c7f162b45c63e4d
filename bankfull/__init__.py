"""bankfull: an inference engine for language models that shows how far it is from the hardware's limits."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bankfull.aio import AsyncEngine
    from bankfull.llm import LLM
    from bankfull.sample.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "SamplingParams", "__version__"]

# torch's own threads would spin for milliseconds after each of its operations, on the cores that the kernels need. Read
# when torch is loaded; whoever has loaded it before, or has set it, keeps what they have. It is for this program alone:
# llama.cpp loses a quarter to a third of its speed by it, so `bench/compare/processes.py` takes it back for peers.
SET_HERE = {} if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "passive"}
os.environ |= SET_HERE

# Resolved on first use, so that `import bankfull` and the command line's help do not wait for torch.
_HOMES = {"LLM": "bankfull.llm", "AsyncEngine": "bankfull.aio", "SamplingParams": "bankfull.sample.params"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bankfull' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def prepare(llm: LLM) -> None:
    """What a new engine gets from layers above it. They are imported only if it asks for something of theirs."""
    if llm.loaded.engine.scheduler.predicts:
        import_module("bankfull.limits.meter.foresight").foresee(llm)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
