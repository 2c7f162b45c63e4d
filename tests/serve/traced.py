"""One streamed chat completion, traced: `python -m tests.serve.traced MODEL` prints what ran for it as JSON.

The process is a whole server: `run_server` with its default options on the main thread, and the engine worker's own
code on another thread instead of in a process of its own, so that one profile function sees both. A third thread is
the client. `tests/serve/test_request_path.py` states what is counted.
"""

from __future__ import annotations

import dataclasses
import gc
import http.client
import json
import math
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

QUIET_SECONDS = 0.3
"""The server is idle when no function of the package has run for this long."""
IDLE_SECONDS = 8.0
"""Longer than the period of any timer of an idle server."""
START_SECONDS = 120.0
QUESTION = "What is a river?"
PACKAGE = f"{Path(__file__).parents[2] / 'bankfull'}{os.sep}"
ENGINE, RUNTIME = f"{PACKAGE}engine.py", f"{PACKAGE}runtime{os.sep}"
LAST_BYTE = "on_response_complete"
"""The method of a connection that runs when the last byte of an answer has been written."""


class Tracer:
    """While it records: the functions that run, by file, and the records that are made, by thread."""

    def __init__(self) -> None:
        self.background: set[tuple[str, str]] = set()
        """Functions that run while the server is idle: timers, such as the watchdog of the engine."""
        self.idle = False
        self.armed = False
        """Whether the server has started: nothing is noted before, because noting makes it slow."""
        self.recording = False
        self.path: defaultdict[str, set[str]] = defaultdict(set)
        self.step: defaultdict[str, set[str]] = defaultdict(set)
        """What runs between a call from the engine to the runner and its return: the step of the whole batch."""
        self.made: defaultdict[tuple[type, int], list[Any]] = defaultdict(list)
        self.last = 0.0
        self._step = threading.local()

    def start(self) -> None:
        """From now on, on this thread and on all that are started later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def keep(self, record: Any) -> None:
        if self.recording and type(record).__module__.startswith("bankfull."):
            self.made[type(record), threading.get_ident()].append(record)

    def _note(self, frame: FrameType, event: str, called: object) -> None:
        if not self.armed:
            return
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self._note_call(frame, code.co_filename)
        elif event == "return":
            if frame is getattr(self._step, "frame", None):
                self._step.frame = None
            elif code.co_name == LAST_BYTE and code.co_filename.startswith(PACKAGE):
                self.recording = False
            elif code.co_name == "__init__" and code.co_filename == "<string>":
                self._note_dataclass(frame)

    def _note_call(self, frame: FrameType, file: str) -> None:
        name = frame.f_code.co_qualname
        if self.idle:
            self.background.add((file, name))
        if (file, name) in self.background:
            return
        self.last = time.monotonic()
        if not self.recording:
            return
        below, caller = getattr(self._step, "frame", None) is not None, frame.f_back
        if not below and file.startswith(RUNTIME) and caller is not None and caller.f_code.co_filename == ENGINE:
            self._step.frame, below = frame, True
        (self.step if below else self.path)[file].add(name)

    def _note_dataclass(self, frame: FrameType) -> None:
        made = frame.f_locals.get("self")
        if dataclasses.is_dataclass(made):
            self.keep(made)


TRACER = Tracer()


class CountedStruct(msgspec.Struct):
    """In the place of `msgspec.Struct`: a hook that runs for what a decoder makes, too."""

    def __post_init__(self) -> None:
        TRACER.keep(self)


def main(model: str) -> None:
    msgspec.Struct = CountedStruct  # type: ignore[misc]  # before the package defines its messages
    TRACER.start()

    from bankfull.serve.api import texts
    from bankfull.serve.engine.process import EngineProcess
    from bankfull.serve.guard.checks import access_policy
    from bankfull.serve.guard.keys import Keyring
    from bankfull.serve.guard.layers import Protection
    from bankfull.serve.run import Deployment, run_server
    from bankfull.serve.settings import Settings

    EngineProcess.start = _start_in_thread  # type: ignore[method-assign]
    texts.SHORT_SECONDS = math.inf  # a short text is rendered on the event loop, however slow this machine is
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threading.Thread(target=_ask, args=(port,), daemon=True).start()
    options = {"dtype": "float32", "memory": "1MiB", "page_tokens": 4}
    protection = Protection(access=access_policy(Keyring(), host="127.0.0.1"))
    settings = Settings(names=("tiny",), port=port)
    run_server(Deployment(model=model, options=options, settings=settings, protection=protection))


async def _start_in_thread(self: Any) -> None:
    import asyncio

    from bankfull.serve.engine.worker import Worker

    ours, theirs = socket.socketpair()
    threading.Thread(target=lambda: Worker(theirs).run(), name="engine", daemon=True).start()
    await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)


def _ask(port: int) -> None:
    """The client. It ends the process, with the engine's thread in it."""
    sys.setprofile(None)
    try:
        _until_ready(port)
        TRACER.armed = True
        _warm_up(port)
        answer = _chat(port, QUESTION, traced=True)
        print(json.dumps(_found(answer)), flush=True)
    except BaseException as error:
        print(f"the client failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _warm_up(port: int) -> None:
    """As after hours of service: every token's text is cached. Then nothing runs but timers."""
    gc.unfreeze()  # what the server has frozen is not listed
    for tokenizer in [known for known in gc.get_objects() if type(known).__name__ == "Tokenizer"]:
        if type(tokenizer).__module__.startswith("bankfull."):
            for token in range(tokenizer.vocab_size):
                tokenizer.token_bytes(token)
    _chat(port, "Warm up, please.")
    TRACER.idle = True
    time.sleep(IDLE_SECONDS)
    TRACER.idle = False


def _until_ready(port: int) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.25)
    raise TimeoutError("the server did not start")


def _chat(port: int, text: str, *, traced: bool = False) -> str:
    """The answer's text."""
    # The seed makes the answer long enough to be recognized.
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True, "seed": 1})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    _until_idle()
    TRACER.recording = traced
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    events = connection.getresponse().read().decode().split("\n\n")
    _until_idle()
    assert not TRACER.recording, f"{LAST_BYTE} was never called"
    assert events[-2] == "data: [DONE]", events
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def _until_idle() -> None:
    time.sleep(QUIET_SECONDS)
    while time.monotonic() - TRACER.last < QUIET_SECONDS:
        time.sleep(QUIET_SECONDS / 4)


def _found(answer: str) -> dict[str, Any]:
    made = [(kind, records) for (kind, _), records in TRACER.made.items()]
    submitted = [record for kind, records in made if kind.__name__ == "Submit" for record in records]
    prompt = max((record.prompt for record in submitted), key=len)  # it is empty until the texts are rendered
    outputs = next(records for kind, records in made if _name(kind) == "types.Output")
    generated = [token for output in outputs for token in output.tokens]
    return {
        "answer": answer,
        "path": {_short(file): sorted(names) for file, names in sorted(TRACER.path.items())},
        "step": {_short(f): sorted(names) for f, names in sorted(TRACER.step.items()) if f not in TRACER.path},
        "records": sorted({_name(kind) for kind, _ in made}),
        "carriers": sorted({_name(kind) for kind, records in made if _carries(records, [prompt, generated], answer)}),
    }


def _short(file: str) -> str:
    return file.removeprefix(PACKAGE)


def _name(kind: type) -> str:
    return f"{kind.__module__.removeprefix('bankfull.')}.{kind.__qualname__}"


def _carries(records: list[Any], tokens_of: list[list[int]], answer: str) -> bool:
    """Whether one field of theirs, record after record, holds the question, the sampling parameters, the answer, or
    the tokens of one of them."""
    for name in _fields(records[0]):
        texts, tokens = [], []
        for value in (getattr(record, name) for record in records):
            for leaf in _leaves(value):
                if type(leaf).__name__ == "SamplingParams":
                    return True
                (texts if isinstance(leaf, str) else tokens).append(leaf)
        told = "".join(texts)
        if QUESTION in told or answer in told or any(_contains(tokens, part) for part in tokens_of):
            return True
    return False


def _fields(record: Any) -> tuple[str, ...]:
    if isinstance(record, msgspec.Struct):
        return record.__struct_fields__
    return tuple(field.name for field in dataclasses.fields(record))


def _leaves(value: Any) -> Iterator[Any]:
    """The texts, integers and sampling parameters in plain containers; other records answer for themselves."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    elif isinstance(value, str) or type(value) is int or type(value).__name__ == "SamplingParams":
        yield value


def _contains(tokens: list[int], part: list[int]) -> bool:
    size = len(part)
    return any(tokens[at : at + size] == part for at in range(len(tokens) - size + 1) if tokens[at] == part[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
