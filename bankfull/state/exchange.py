"""The exchange: memory of bounded size through which engines that compute prompts hand state to one that decodes.

It is an unnamed file in memory. The decoding engine owns it: it writes the header and decides what each place is for.
Other engines fill the places that it has granted them: they write to the same memory, or send content over a connection
(`state.socket_carrier`). A place has an entry with the name and the checksum of its content. The entry is cleared
before the content is written and set after it, and the reader compares both. So a writer that dies, or that writes to a
place that was given to someone else since, costs a computation and never a wrong token.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Protocol

from bankfull.state.disk import DamagedPlace

MAGIC = b"bankfull give v1"
HEADER = struct.Struct("<16s32sQQQQ")
"""Magic, identity, pages, slots, bytes of a page and of a slot."""
ENTRY = struct.Struct("<QI48sI")
"""Bytes and checksum of the content, length and bytes of its name, checksum of the entry."""
MOST_NAME = 47
ALIGNED = 4096
KINDS = ("pages", "slots")


def open_exchange() -> int:
    """A new exchange as a file descriptor; its owner divides it. Nobody else can open it, and it ends with the last
    process that has it."""
    try:
        file = os.memfd_create("bankfull-exchange")
    except (AttributeError, OSError):  # not on this system
        with TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.fchmod(file, 0o600)
    return file


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """How an exchange is divided."""

    identity: bytes
    """Names the model, precision and layout that the content belongs to."""
    pages: int
    slots: int
    page_bytes: int
    slot_bytes: int

    @property
    def places(self) -> dict[str, int]:
        return {"pages": self.pages, "slots": self.slots}

    @property
    def place_bytes(self) -> dict[str, int]:
        return {"pages": self.page_bytes, "slots": self.slot_bytes}

    @property
    def overhead(self) -> int:
        """Bytes before the first place."""
        entries = HEADER.size + (self.pages + self.slots) * ENTRY.size
        return -(-entries // ALIGNED) * ALIGNED

    @property
    def nbytes(self) -> int:
        return self.overhead + self.pages * self.page_bytes + self.slots * self.slot_bytes

    def write(self, file: int) -> None:
        """Begin the exchange anew: no place has content."""
        os.ftruncate(file, self.nbytes)
        os.pwrite(file, bytes(self.overhead), 0)
        head = HEADER.pack(MAGIC, self.identity, self.pages, self.slots, self.page_bytes, self.slot_bytes)
        os.pwrite(file, head, 0)


def shape_of(file: int) -> ExchangeShape | None:
    """The shape that the owner has written; None before that."""
    raw = os.pread(file, HEADER.size, 0)
    if len(raw) < HEADER.size:
        return None
    magic, identity, pages, slots, page_bytes, slot_bytes = HEADER.unpack(raw)
    if magic != MAGIC:
        return None
    shape = ExchangeShape(identity, pages, slots, page_bytes, slot_bytes)
    return shape if shape.nbytes <= os.fstat(file).st_size else None


class ExchangePlaces:
    """The places of one kind, from 1 on. Threads and processes may use different places at the same time."""

    def __init__(self, file: int, shape: ExchangeShape, kind: str) -> None:
        self._file = file
        self._places, self._place_bytes = shape.places[kind], shape.place_bytes[kind]
        slots = kind == "slots"
        self._entries = HEADER.size + (shape.pages * ENTRY.size if slots else 0)
        self._data = shape.overhead + (shape.pages * shape.page_bytes if slots else 0)

    def write(self, place: int, key: bytes, content: memoryview) -> None:
        """Raises OSError where there is no memory."""
        if not 1 <= place <= self._places or len(content) != self._place_bytes or len(key) > MOST_NAME:
            raise DamagedPlace(f"Place {place} of the exchange is not for {len(content)} bytes.")
        at = self._entries + (place - 1) * ENTRY.size
        _write_all(self._file, bytes(ENTRY.size), at)
        _write_all(self._file, content, self._data + (place - 1) * self._place_bytes)
        head = ENTRY.pack(len(content), zlib.crc32(content), bytes((len(key),)) + key, 0)[:-4]
        _write_all(self._file, head + zlib.crc32(head).to_bytes(4, "little"), at)

    def read(self, place: int, key: bytes, into: memoryview) -> None:
        """Raises DamagedPlace if the place has other content than `key`."""
        raw = os.pread(self._file, ENTRY.size, self._entries + (place - 1) * ENTRY.size)
        nbytes, checksum, name, entry_crc = ENTRY.unpack(raw)
        if entry_crc != zlib.crc32(raw[:-4]) or name[1 : 1 + name[0]] != key or nbytes != len(into):
            raise DamagedPlace(f"Place {place} of the exchange holds something else.")
        done, start = 0, self._data + (place - 1) * self._place_bytes
        while done < len(into):
            count = os.preadv(self._file, [into[done:]], start + done)
            if not count:
                raise DamagedPlace(f"Place {place} of the exchange ends after {done} bytes.")
            done += count
        if zlib.crc32(into) != checksum:
            raise DamagedPlace(f"Place {place} of the exchange has changed since it was written.")


class ExchangeReader:
    """The owner's end."""

    def __init__(self, file: int, shape: ExchangeShape) -> None:
        self._file = file
        shape.write(file)
        self.files = {kind: ExchangePlaces(file, shape, kind) for kind in KINDS}

    def close(self) -> None:
        os.close(self._file)


class Carrier(Protocol):
    """How content gets from the engine that has computed it to a place of another engine's exchange."""

    def carry(self, exchange: int, kind: str, place: int, key: bytes, content: memoryview) -> None:
        """Returns when the content is in its place. On any thread. Raises OSError or DamagedPlace, within a bound."""
        ...

    def close(self) -> None: ...


class MemoryCarrier:
    """Writes to exchanges in memory that both processes have."""

    def __init__(self, files: Sequence[int], identity: bytes) -> None:
        self._files, self._identity = files, identity

    def carry(self, exchange: int, kind: str, place: int, key: bytes, content: memoryview) -> None:
        file = self._files[exchange]
        shape = shape_of(file)  # as its owner has divided it now: it may have been started again
        if shape is None or shape.identity != self._identity:
            raise DamagedPlace("The engine that decodes keeps its state in another form.")
        ExchangePlaces(file, shape, kind).write(place, key, content)

    def close(self) -> None:
        for file in self._files:
            os.close(file)


NUMBER_SHIFT = 32


def address_of(exchange: int, place: int) -> int:
    """A place of one of a writer's exchanges as a number."""
    return exchange << NUMBER_SHIFT | place


def exchange_of(address: int) -> int:
    return address >> NUMBER_SHIFT


class ExchangeWriter:
    """The other end: the exchanges of several engines, as one range of addresses."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.files = {kind: _WrittenPlaces(carrier, kind) for kind in KINDS}

    def close(self) -> None:
        self._carrier.close()


class _WrittenPlaces:
    def __init__(self, carrier: Carrier, kind: str) -> None:
        self._carrier, self._kind = carrier, kind

    def write(self, place: int, key: bytes, content: memoryview) -> None:
        within = place & ((1 << NUMBER_SHIFT) - 1)
        self._carrier.carry(exchange_of(place), self._kind, within, key, content)

    def read(self, place: int, key: bytes, into: memoryview) -> None:
        raise DamagedPlace("An engine reads only its own exchange.")


def _write_all(file: int, content: bytes | memoryview, at: int) -> None:
    done, view = 0, memoryview(content)
    while done < len(view):
        done += os.pwrite(file, view[done:], at + done)
