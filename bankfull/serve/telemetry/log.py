"""Logs: one line per request, one per batch, and all other messages, as text or as JSON. A line has metadata and costs
of a request; its body is logged only if the operator turns that on.

A separate thread writes the lines, so that a blocked log reader does not stop the service. Lines that do not fit into
the queue are dropped and counted.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
import time
from typing import Any, TextIO

import msgspec

from bankfull.serve.data.batch_store import BatchRecord
from bankfull.serve.telemetry.trace import Trace

request_log = logging.getLogger("bankfull.request")

QUEUED_LINES = 10_000
SHOWN_BODY = 16_000
SHOWN_PATH = 200


def fields_of(trace: Trace, seconds: float) -> dict[str, Any]:
    """The fields of a request's log line; fields that do not apply are left out."""
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


def log_batch(batch: BatchRecord, seconds: float) -> None:
    """Log a finished batch; its lines have no HTTP requests of their own."""
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
        parts = [_printable(record.getMessage()), *(f"{name}={_quoted(value)}" for name, value in fields.items())]
        line = f"{_timestamp(record)} {record.levelname.lower():<7} {' '.join(parts)}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _timestamp(record), "level": record.levelname.lower(), "message": record.getMessage()}
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
        return record  # formatted by the writer thread; a record never changes later

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < QUEUED_LINES:
            self._lines.put_nowait(record)
        else:
            self.dropped += 1


class _Listener(logging.handlers.QueueListener):
    """A listener whose thread survives any error of one line; otherwise one bad line would silence the log."""

    failed = 0

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except Exception:
            self.failed += 1


class Logs:
    """Handles all logging of the process until `close`."""

    def __init__(self, *, json: bool = False, level: int = logging.INFO, stream: TextIO | None = None) -> None:
        writer = logging.StreamHandler(stream or sys.stderr)
        writer.setFormatter(JsonFormatter() if json else TextFormatter())
        lines: queue.SimpleQueue[Any] = queue.SimpleQueue()  # waking its reader is much cheaper than with queue.Queue
        self._handler = _DroppingHandler(lines)
        self._listener = _Listener(lines, writer)
        self._listener.start()
        root, ours = logging.getLogger(), logging.getLogger("bankfull")
        self._before = [(root, root.level), (ours, ours.level)]
        root.addHandler(self._handler)
        root.setLevel(max(level, logging.WARNING))  # only warnings and errors of other libraries
        ours.setLevel(level)

    @property
    def dropped(self) -> int:
        """Lines that were dropped or could not be written."""
        return self._handler.dropped + self._listener.failed

    def close(self) -> None:
        logging.getLogger().removeHandler(self._handler)
        for logger, level in self._before:
            logger.setLevel(level)
        self._listener.stop()


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"


def _quoted(value: object) -> str:
    text = _printable(str(value))
    return f'"{text}"' if " " in text or text == "" else text


def _printable(text: str) -> str:
    """Escape line breaks and terminal control sequences, so that no client can forge a log line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
