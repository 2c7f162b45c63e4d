"""Logs: one line per request, one per batch, and whatever else there is to say, for people or as JSON. A line holds
what a request was and what it cost, never what it said, unless the operator asked for that.

Lines are written by a thread: a log that nobody reads must not stop the service. What does not fit into its queue is
dropped and counted.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
import time
from typing import Any, TextIO

import msgspec

from bankfull.serve.data.ledger import Batch
from bankfull.serve.telemetry.trace import Trace

request_log = logging.getLogger("bankfull.request")

QUEUED_LINES = 10_000
SHOWN_BODY = 16_000
SHOWN_PATH = 200


def fields_of(trace: Trace, seconds: float) -> dict[str, Any]:
    """What a line says of a request; what does not apply is left out."""
    path = trace.path if trace.route == "" else trace.route
    line: dict[str, Any] = {
        "id": trace.id,
        "key": None if trace.key is None else trace.key.name,
        "method": trace.method,
        "route": path[:SHOWN_PATH],
        "status": trace.status,
    }
    if trace.prompt_tokens:
        line |= {
            "prompt_tokens": trace.prompt_tokens,
            "completion_tokens": trace.completion_tokens,
            "cached_tokens": trace.cached_tokens,
        }
    if trace.ttft is not None:
        line["ttft"] = round(trace.ttft, 4)
    line["seconds"] = round(seconds, 4)
    if trace.problem is not None:
        line["problem"] = trace.problem
    if trace.body is not None:
        line["body"] = trace.body[:SHOWN_BODY].decode(errors="replace")
    return {name: value for name, value in line.items() if value is not None}


def log_trace(trace: Trace, seconds: float) -> None:
    if request_log.isEnabledFor(logging.INFO):
        request_log.info("request", extra={"fields": fields_of(trace, seconds)})


def log_batch(batch: Batch, seconds: float) -> None:
    """When it has ended: its lines have no requests of their own."""
    fields = {
        "id": batch.id,
        "key": batch.owner or None,
        "endpoint": batch.endpoint,
        "status": batch.status,
        "total": batch.total,
        "completed": batch.completed,
        "failed": batch.failed,
        "prompt_tokens": batch.input_tokens,
        "completion_tokens": batch.output_tokens,
        "cached_tokens": batch.cached_tokens,
        "seconds": round(seconds, 1),
    }
    request_log.info("batch", extra={"fields": {name: value for name, value in fields.items() if value is not None}})


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.000 info  request id=... status=200`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        said = [_printable(record.getMessage()), *(f"{name}={_word(value)}" for name, value in fields.items())]
        line = f"{_moment(record)} {record.levelname.lower():<7} {' '.join(said)}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _moment(record), "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _DroppingHandler(logging.handlers.QueueHandler):
    def __init__(self, lines: queue.SimpleQueue[Any]) -> None:
        super().__init__(lines)
        self._lines = lines
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # formatted by the thread that writes; nothing in a record changes later

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < QUEUED_LINES:
            self._lines.put_nowait(record)
        else:
            self.dropped += 1


class _Listener(logging.handlers.QueueListener):
    """Its thread outlives any line that cannot be written: without it the log would be silent for good."""

    failed = 0

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except Exception:
            self.failed += 1


class Logs:
    """All logging of the process, from here until `close`."""

    def __init__(self, *, json: bool = False, level: int = logging.INFO, stream: TextIO | None = None) -> None:
        writer = logging.StreamHandler(stream or sys.stderr)
        writer.setFormatter(JsonFormatter() if json else TextFormatter())
        lines: queue.SimpleQueue[Any] = queue.SimpleQueue()  # waking its reader costs a fraction of what Queue takes
        self._handler = _DroppingHandler(lines)
        self._listener = _Listener(lines, writer)
        self._listener.start()
        root, ours = logging.getLogger(), logging.getLogger("bankfull")
        self._before = [(root, root.level), (ours, ours.level)]
        root.addHandler(self._handler)
        root.setLevel(max(level, logging.WARNING))  # of what others have to say, only what is wrong
        ours.setLevel(level)

    @property
    def dropped(self) -> int:
        """Lines that nobody will see."""
        return self._handler.dropped + self._listener.failed

    def close(self) -> None:
        logging.getLogger().removeHandler(self._handler)
        for logger, level in self._before:
            logger.setLevel(level)
        self._listener.stop()


def _moment(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"


def _word(value: object) -> str:
    text = _printable(str(value))
    return f'"{text}"' if " " in text or text == "" else text


def _printable(text: str) -> str:
    """A line break or an escape sequence of a terminal in what a client sent must not look like a line of ours."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
