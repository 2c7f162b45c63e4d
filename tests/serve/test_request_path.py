"""The files and records that a streamed chat completion passes: `python -m tests.serve.test_request_path`.

A whole server answers one streamed chat completion with default options on a tiny model (`tests/serve/traced.py`),
after another one has warmed it up. Counted from the first byte of the HTTP request to the last byte of the last event:

- path: files under bankfull/ in which a Python function ran, in the API's code and in the engine process's code, but
  for what the engine calls the runner for;
- step: files of which functions ran only between a call from the engine to the runner and its return. That is the step
  of the whole batch (model, operations, kernels), whatever the number of requests in it;
- carriers: dataclasses and msgspec Structs of the package of which an instance was made meanwhile, and of which a
  field, instance after instance, holds the question, the prompt's tokens, the sampling parameters, the generated
  tokens or the answer's text, in plain lists, tuples, dicts and strings (tensors belong to the batch). Of a record
  inside of another one only the inner one counts.

The records in which the engine's front end collects the whole result are carriers too, but hand nothing on: COLLECTED.
The counts are results: they are printed, and no test bounds them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.tiny import speaking_folder

COLLECTED = {"frontend.Pending", "outputs.CompletionOutput", "outputs.RequestOutput"}
SECONDS = 300


@lru_cache
def traced() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.serve.traced", str(speaking_folder())]
    with TemporaryDirectory() as cache:  # on a machine that was never measured: a meter is not part of the path
        ran = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "BANKFULL_CACHE": cache},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert len(found["answer"]) > 20, "an answer that short may stand anywhere"
    return found


def report() -> None:
    path, step, carriers = traced()["path"], traced()["step"], set(traced()["carriers"])
    print(f"{len(path)} files on the request's path:", *path, sep="\n  ")
    print(f"{len(step)} files of the step alone:", *step, sep="\n  ")
    print(f"{len(carriers - COLLECTED)} records carry the request:", *sorted(carriers - COLLECTED), sep="\n  ")
    print("the result is collected in:", *sorted(carriers & COLLECTED), sep="\n  ")


def test_the_trace_of_a_streamed_chat_sees_both_processes_and_what_carries_the_request() -> None:
    report()
    path, carriers = traced()["path"], set(traced()["carriers"])
    assert {"serve/guard/listen.py", "serve/api/sse.py", "serve/engine/worker.py", "engine.py"} <= path.keys()
    assert {"submit.Submit", "types.Request", "types.Output", "outputs.Delta"} <= carriers


if __name__ == "__main__":
    report()
