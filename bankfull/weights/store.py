"""Prepared layouts of weights, kept on disk and mapped by every process of the machine.

A provider lays a matrix out for its kernels once. What it wrote is kept in the cache directory, under the digest of the
model's files, the instruction set, the options that change the numbers and this build. Later starts map it: nothing is
read that no kernel reads, and processes share the memory.

`<key>.weights` holds the layouts, each at an address of its own; `<key>.json` says where each one lies, and the digest
of the whole. The index is written last, so that half a file is never found. Files are read-only once they are written,
and hold numbers only: nothing in them is executed or unpacked. What is damaged, foreign or of another build is not used
but made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkstemp
from typing import Any, cast

import torch
from torch import Tensor

from bankfull.config import parse_bytes
from bankfull.errors import ConfigError, ModelError
from bankfull.paths import cache_dir
from bankfull.weights.file_digests import TICK_SECONDS, file_digest, known_digest
from bankfull.weights.qtensor import QTensor

log = logging.getLogger("bankfull")

VARIABLE = "BANKFULL_PREPARED"
FORMAT = 1
ALIGN = 64
LEAST_BYTES = 16 << 20
"""Less is laid out faster than it is found."""
MOST_BYTES = 64 << 30
"""What all models may take by default, if a quarter of the disk is not less."""
LEAST_FREE = 0.1
"""The fraction of a disk that stays free."""
PATIENCE_SECONDS = 2.0
"""Nothing is written earlier: the first tokens come first."""
WAITED_FOR = 2 << 30
"""So much is written before a process ends; a larger file is given up then, and the next start writes it."""
MOST_INDEX = 64 << 20
PIECE = 8 << 20
LEFT_OVER_SECONDS = 3600.0
"""The age from which an unfinished file belongs to a process that has ended."""
_NAMES = re.compile(r"[0-9a-f]{32}\.(json|weights)")


def wanted_bytes() -> int | None:
    """BANKFULL_PREPARED: a size, or `off` (0). None: as much as the disk allows."""
    wanted = os.environ.get(VARIABLE, "").strip()
    if wanted.lower() == "off":
        return 0
    try:
        return parse_bytes(VARIABLE, wanted or None)
    except ConfigError as error:
        raise ConfigError(f"{str(error).removesuffix('.')}, or 'off'.") from None


def prepared_dir() -> Path:
    return cache_dir() / "prepared"


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


@dataclass(slots=True)
class PreparedWeights:
    """The layouts of one model's matrices for one build: those that were found, and those that are made meanwhile."""

    folder: Path
    model: str
    """Its name, for people."""
    key: Callable[[], str | None]
    """Names the files; it may have to read all of the model. None: what is made cannot be kept."""
    allowed: int
    maps: bool = True
    """Whether processes may read a layout where the file is mapped; else each one copies it to memory of its own."""
    _found: dict[str, Tensor] = field(default_factory=dict)
    _facts: dict[str, bool] = field(default_factory=dict)
    _made: dict[str, Tensor] = field(default_factory=dict)
    _given_up: bool = False

    def find(self, key: str) -> bool:
        """Map the files of this key, if they are whole. Then layouts lie where the file holds them."""
        index, weights = self._files(key)
        try:
            with index.open("rb") as file:
                text = file.read(MOST_INDEX + 1)
            entries, facts, digest, size = _checked(text)
            if (found := known_digest(weights)) is None:
                found = file_digest(weights)
                _forget(weights)
            if found.hex() != digest:
                raise ValueError("its digest is another one")
            whole = _mapped(weights, size)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError, RecursionError, ModelError) as error:
            log.warning("the prepared weights in %s cannot be used (%s); they are made again.", weights.name, error)
            return False
        with suppress(OSError):
            os.utime(index)  # what was used last is removed last
        # Without large pages each step would wait for address translation.
        self.maps = self.maps and _in_large_pages(whole)
        self._facts = facts
        self._found = {name: whole[first : first + count] for name, (first, count) in entries.items()}
        return True

    def layout(self, name: str, size: int, take: Take, fill: Fill) -> Tensor:
        """The layout of this name, as it was found, or written into memory that is taken for it."""
        found = self._found.get(name)
        if found is not None and found.numel() == size:
            return found if self.maps else take(size).copy_(found)
        made = self._made.get(name)
        if made is None or made.numel() != size:
            self._made[name] = made = take(size)
            fill(made)
        return made

    def fact(self, name: str, find: Callable[[], bool]) -> bool:
        """What follows from all numbers of a matrix: whoever knows it need not read them."""
        if name not in self._facts:
            self._facts[name] = find()
        return self._facts[name]

    @property
    def nbytes(self) -> int:
        return sum(data.numel() for data in self._found.values())

    def keep(self) -> threading.Thread | None:
        """Write what was made, beside the work. The thread that does it, if there is anything to write."""
        layouts = self._found | self._made
        size = sum(-(-data.numel() // ALIGN) * ALIGN for data in layouts.values())
        made = bool(self._made)
        self._made = {}
        if not made or size < LEAST_BYTES or size > self.allowed:
            return None
        daemon = size > WAITED_FOR
        _unwritten.append(self)
        thread = threading.Thread(target=self._keep, args=(layouts, size), name="bankfull-store", daemon=daemon)
        thread.start()
        return thread

    def _keep(self, layouts: dict[str, Tensor], size: int) -> None:
        try:
            _wait(PATIENCE_SECONDS)
            key = None if self._given_up else self.key()
            if key is None:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            with _alone(self.folder / f".{key}.lock") as alone:
                if alone:
                    self._write(key, layouts, size)
        except (OSError, ModelError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            log.warning(
                "the prepared weights cannot be kept in %s (%s); they are made at each start.", self.folder, reason
            )
        finally:
            _unwritten.remove(self)

    def _write(self, key: str, layouts: dict[str, Tensor], size: int) -> None:
        self._make_room(key, size)
        index, weights = self._files(key)
        handle, unnamed = mkstemp(dir=self.folder, prefix=".new-")
        try:
            with os.fdopen(handle, "r+b", buffering=0) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows here
                entries, at = {}, 0
                for name, data in layouts.items():
                    entries[name] = (at, data.numel())
                    _write_all(file.fileno(), data, at)
                    at += -(-data.numel() // ALIGN) * ALIGN
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o400)
            os.replace(unnamed, weights)
        except BaseException:
            with suppress(OSError):
                os.unlink(unnamed)
            raise
        _wait(TICK_SECONDS + 0.1)  # from then on a change would show, so that the digest is computed once
        about = {
            "format": FORMAT,
            "model": self.model,
            "size": size,
            "digest": file_digest(weights).hex(),
            "facts": self._facts,
        }
        handle, unnamed = mkstemp(dir=self.folder, prefix=".new-")
        with os.fdopen(handle, "w") as text:
            json.dump({**about, "entries": entries}, text)
            text.flush()
            os.fsync(text.fileno())
        if self._given_up:  # some of the layouts may have been read later
            for path in (unnamed, weights):
                os.unlink(path)
            return
        os.replace(unnamed, index)
        _forget(weights)
        log.info("kept %d bytes of prepared weights as %s.", size, weights)

    def _make_room(self, key: str, size: int) -> None:
        """Remove what was used longest ago, so that all files together take what is allowed. Raises OSError."""
        for left in self.folder.glob(".new-*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFT_OVER_SECONDS:
                    left.unlink()
        others = [path for path in self.folder.iterdir() if _NAMES.fullmatch(path.name) and path.stem != key]
        indices = sorted((path for path in others if path.suffix == ".json"), key=lambda path: path.stat().st_mtime)
        taken = sum(path.stat().st_size for path in others)
        while indices and taken + size > self.allowed:
            oldest = indices.pop(0)
            for path in (oldest, oldest.with_suffix(".weights")):
                with suppress(FileNotFoundError):
                    taken -= path.stat().st_size
                    path.unlink()
        disk = shutil.disk_usage(self.folder)
        if disk.free - size < LEAST_FREE * disk.total:
            raise OSError(28, f"{size} bytes would leave less than a tenth of the disk free")

    def _files(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.json", self.folder / f"{key}.weights"


_unwritten: list[PreparedWeights] = []
"""Stores whose layouts are not written yet."""


def give_up_writing() -> None:
    """Layouts in memory are about to change: those that are not written yet will not be."""
    for store in list(_unwritten):
        store._given_up = True
        log.info("the prepared weights of %s are not kept: they change before they are written.", store.model)


Take = Callable[[int], Tensor]
Fill = Callable[[Tensor], object]
_current: ContextVar[PreparedWeights | None] = ContextVar("prepared weights", default=None)


@contextmanager
def in_use(store: PreparedWeights | None) -> Iterator[None]:
    """Layouts that are made meanwhile are found in, or added to, this store."""
    token = _current.set(store)
    try:
        yield
    finally:
        _current.reset(token)


def prepared(weight: QTensor, layout: str, size: int, take: Take, fill: Fill) -> Tensor:
    """A weight's layout of `size` bytes: from the store in use, or in memory that `take` gives and `fill` writes. What
    has no name or is not all of a weight is not kept."""
    store = _current.get()
    if store is not None and weight.name and weight.is_plain:
        return store.layout(f"{weight.name} as {layout}", size, take, fill)
    data = take(size)
    fill(data)
    return data


def known(weight: QTensor, fact: str, find: Callable[[], bool]) -> bool:
    """A fact about all numbers of a weight: from the store in use, or as `find` finds it."""
    store = _current.get()
    return store.fact(f"{weight.name} {fact}", find) if store is not None and weight.name else find()


def store_for(
    model: str, key: Callable[[], str | None], known_key: str | None, maps: bool = True
) -> PreparedWeights | None:
    """The store of a model. `known_key`: its key, if that is known without reading the model; else nothing is found,
    and `key` makes it when everything is written. None: the user wants none, or it has no place here."""
    wanted = wanted_bytes()
    if wanted == 0:
        return None
    try:
        folder = prepared_dir()
        allowed = wanted or min(MOST_BYTES, shutil.disk_usage(_existing(folder)).total // 4)
    except (ConfigError, OSError) as error:
        log.warning("prepared weights cannot be kept (%s); they are made at each start.", error)
        return None
    store = PreparedWeights(folder, model, key, allowed, maps)
    if known_key is not None:
        store.find(known_key)
    return store


@dataclass(frozen=True, slots=True)
class Prepared:
    """The files of one model for one build, for people to see."""

    index: Path
    model: str
    nbytes: int
    used: float
    """When a process last began with it, in seconds since the epoch."""

    def remove(self) -> None:
        """Processes that have mapped it keep it until they end."""
        for path in (self.index, self.index.with_suffix(".weights")):
            with suppress(FileNotFoundError):
                path.unlink()


def all_prepared() -> list[Prepared]:
    """What is kept of all models, used last first."""
    found = []
    for index in prepared_dir().glob("*.json"):
        with suppress(OSError, ValueError, TypeError, RecursionError):
            status, weights = index.stat(), index.with_suffix(".weights").stat()
            if _NAMES.fullmatch(index.name) and status.st_size <= MOST_INDEX:
                model = str(json.loads(index.read_bytes()).get("model", ""))[:200]
                found.append(Prepared(index, model, weights.st_size + status.st_size, status.st_mtime))
    return sorted(found, key=lambda one: one.used, reverse=True)


def key_of(*facts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *map(str, facts)]).encode()).hexdigest()[:32]


Entries = dict[str, tuple[int, int]]


def _checked(text: bytes) -> tuple[Entries, dict[str, bool], str, int]:
    """The entries, facts, digest and size of an index. Raises ValueError or TypeError."""
    if len(text) > MOST_INDEX:
        raise ValueError("its index is too large")
    about = json.loads(text)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError("its index has another format")
    size, digest, entries, facts = about.get("size"), about.get("digest"), about.get("entries"), about.get("facts")
    if not isinstance(size, int) or not isinstance(digest, str):
        raise ValueError("its index is incomplete")
    if not isinstance(entries, dict) or not isinstance(facts, dict):
        raise ValueError("its index is incomplete")
    if not all(isinstance(fact, bool) for fact in facts.values()):
        raise ValueError("its index has facts of another type")
    places = {}
    for name, (first, count) in entries.items():
        if not (isinstance(first, int) and isinstance(count, int)):
            raise ValueError("its index has places of another type")
        if first < 0 or first % ALIGN or count < 0 or first + count > size:
            raise ValueError("its index names places outside of the file")
        places[name] = (first, count)
    return places, facts, digest, size


def _mapped(path: Path, size: int) -> Tensor:
    """The bytes of the file, read-only, shared with all processes that map it. Raises OSError or ValueError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if status.st_size != size:
            raise ValueError("it has another size")
        if status.st_uid != os.getuid():
            raise ValueError("it belongs to another user")
        data = mmap.mmap(handle, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(handle)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none
            data.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch would rather have memory that it may write to
        return torch.frombuffer(data, dtype=torch.uint8)


def _forget(path: Path) -> None:
    """Drop the file from the page cache: read again from disk by a mapping, it may lie in large pages."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _in_large_pages(mapped: Tensor) -> bool:
    """Whether the system maps this memory in large pages; false where it does not tell."""
    _ = mapped[0].item()
    inside = False
    with suppress(OSError, ValueError), open("/proc/self/smaps", "rb") as lines:
        for line in lines:
            words = line.split()
            if words[0].endswith(b":"):
                if inside and words[0] == b"FilePmdMapped:":
                    return int(words[1]) > 0
            else:
                begin, end = (int(part, 16) for part in words[0].split(b"-"))
                inside = begin <= mapped.data_ptr() < end
    return False


def _wait(seconds: float) -> None:
    """Less if the process ends meanwhile: it does not wait for this thread's sake."""
    end = time.monotonic() + seconds
    while threading.main_thread().is_alive() and time.monotonic() < end:
        time.sleep(0.05)


def _write_all(handle: int, data: Tensor, at: int) -> None:
    view = memoryview(cast(Any, data.numpy()))
    for first in range(0, len(view), PIECE):
        piece = view[first : first + PIECE]
        while piece:
            count = os.pwrite(handle, piece, at + first)
            piece, first = piece[count:], first + count


@contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Whether no other process writes the same files."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            with suppress(OSError):
                lock.unlink()
    finally:
        os.close(handle)
