"""The two files of an offline batch: requests and results, one JSON object per line, in the same order.

Every result has the index and a digest of its request, so that an interrupted run resumes where it stopped, and never
appends to the results of other requests.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bankfull.errors import ConfigError, RequestError

LONGEST_LINE = 16 << 20
KEYS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of input. `problem` is the reason why it cannot be served, if there is one."""

    index: int
    digest: str
    id: Any = None
    prompt: Any = None
    messages: Any = None
    params: dict[str, Any] | None = None
    problem: str | None = None

    def result(self, **fields: Any) -> dict[str, Any]:
        named = {} if self.id is None else {"id": self.id}
        return {"index": self.index, **named, "input": self.digest, **fields}


def read_records(path: Path, setting: str) -> Iterator[Record]:
    """Blank lines are skipped. `setting` holds the other options that change results; it is part of every digest."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"The input {path} cannot be read: {error.strerror or error}.") from None
    with file:
        index = 0
        for line in _lines(file, path):
            if line is None or line.strip():
                yield _record(index, line, setting)
                index += 1


def count_records(path: Path) -> int | None:
    """None for an input that can be read only once."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(line is None or bool(line.strip()) for line in _lines(file, path))


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes | None]:
    """None stands for a line that is too long."""
    try:
        while line := file.readline(LONGEST_LINE + 1):
            whole = len(line) <= LONGEST_LINE
            yield line if whole else None
            while not whole and line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
    except OSError as error:
        raise ConfigError(f"The input {path} cannot be read: {error.strerror or error}.") from None


def _record(index: int, line: bytes | None, setting: str) -> Record:
    if line is None:
        return Record(index, "", problem=f"The line is longer than {LONGEST_LINE >> 20} MiB; shorten it.")
    digest = hashlib.sha256(line.strip() + b"\n" + setting.encode()).hexdigest()[:16]
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Record(index, digest, problem=f"The line is not JSON ({' '.join(str(error).split())[:200]}).")
    try:
        return _checked(index, digest, value)
    except RequestError as error:
        return Record(index, digest, value.get("id") if isinstance(value, dict) else None, problem=str(error))


def _checked(index: int, digest: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise RequestError(f"The line holds a {type(value).__name__}, not an object with one of {', '.join(KEYS)}.")
    unknown = sorted(set(value) - {*KEYS, "id", "params"})
    if unknown:
        raise RequestError(f"The line has a key {unknown[0][:80]!r}; known are {', '.join(KEYS)}, id and params.")
    given = [key for key in KEYS if key in value]
    if len(given) != 1:
        raise RequestError(f"The line needs exactly one of {', '.join(KEYS)}, but has {len(given)} of them.")
    key = given[0]
    kind, called = (str, "text") if key == "prompt" else (list, "list")
    if not isinstance(value[key], kind):
        raise RequestError(f"{key!r} must be a {called}, not {type(value[key]).__name__}.")
    params = value.get("params") or {}
    if not isinstance(params, dict):
        raise RequestError(f"'params' must be an object of sampling parameters, not {type(params).__name__}.")
    messages = value.get("messages")
    return Record(index, digest, value.get("id"), None if messages is not None else value[key], messages, params)


class Results:
    """The output file: locked by one process, checked against the input, and resumed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab+")
        except OSError as error:
            raise ConfigError(f"The output {path} cannot be written: {error.strerror or error}.") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"Another run is writing to {path}; wait for it, or choose another output.") from None

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *how: object) -> None:
        self._file.close()

    def resume(self, records: Iterator[Record]) -> tuple[int, int]:
        """Skip the records that have results; return their number and the number of errors among them.

        An incomplete last line, left by a run that was killed, is removed.
        """
        done = errors = end = 0
        self._file.seek(0)
        while line := self._file.readline(2 * LONGEST_LINE):
            result = _result(line)
            if result is None:
                if line.endswith(b"\n") or self._file.read(1):
                    raise ConfigError(f"Line {done + 1} of {self._path} is not a result; choose another output.")
                break
            record = next(records, None)
            if record is None or (result.get("index"), result.get("input")) != (record.index, record.digest):
                raise ConfigError(
                    f"Line {done + 1} of {self._path} is not the result of request {done + 1} of the input with these "
                    "options; restore the input and the options, or choose another output."
                )
            done, errors, end = done + 1, errors + ("error" in result), end + len(line)
        os.ftruncate(self._file.fileno(), end)
        return done, errors

    def append(self, result: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(result, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"The output {self._path} cannot be written: {error.strerror or error}; run again to go on from here."
            ) from None


def _result(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
