"""Read the records of an SQLite database page by page, for one whose B-trees can no longer be followed.

The reader uses only the layout of leaf pages, never the links between pages, so a damaged page costs its own records
and no others. It skips free pages as far as the free list can be read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZE = 4096
"""Bytes of a page; the service always uses this size."""
HEADER = 100
"""Bytes of the database header, in the first page."""
TABLE_LEAF, INDEX_LEAF, INDEX_INTERIOR = 0x0D, 0x0A, 0x02
MOST_IN_TABLE, MOST_IN_INDEX, LEAST_OF_CHAIN = SIZE - 35, (SIZE - 12) * 64 // 255 - 23, (SIZE - 12) * 32 // 255 - 23
"""Most bytes of a record in a table page and in an index page before it overflows, and the fewest that stay in the page
then."""
WAL_HEADER, FRAME_HEADER = struct.Struct(">8I"), struct.Struct(">6I")
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Record = tuple[int | None, list[Any]]
"""The rowid, in tables that have one, and the columns."""


class Pages:
    """The pages of a database and its write-ahead log; neither is changed."""

    def __init__(self, path: Path, log: Path) -> None:
        self._file = path.open("rb")
        size = self._file.seek(0, 2)
        self._data: mmap.mmap | bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._newer = _committed(log.read_bytes()) if log.exists() else {}
        self.count = max([size // SIZE, *self._newer])
        self._free = self._freed()

    def close(self) -> None:
        if isinstance(self._data, mmap.mmap):
            self._data.close()
        self._file.close()

    def records(self) -> Iterator[Record]:
        """Every readable record, in no order; some may appear twice or belong to deleted rows."""
        for number in range(1, self.count + 1):
            if number not in self._free:
                yield from self._of_page(number)

    def page(self, number: int) -> bytes:
        newer = self._newer.get(number)
        return bytes(self._data[(number - 1) * SIZE : number * SIZE]) if newer is None else newer

    def _of_page(self, number: int) -> Iterator[Record]:
        page = self.page(number)
        start = HEADER if number == 1 else 0
        kind = page[start] if len(page) == SIZE else 0
        if kind not in (TABLE_LEAF, INDEX_LEAF, INDEX_INTERIOR):
            return
        cells = int.from_bytes(page[start + 3 : start + 5], "big")
        first = start + (12 if kind == INDEX_INTERIOR else 8)
        for at in range(first, min(first + 2 * cells, SIZE - 1), 2):
            try:
                record = self._cell(page, int.from_bytes(page[at : at + 2], "big"), kind)
            except (IndexError, ValueError, struct.error):
                continue
            yield record

    def _cell(self, page: bytes, at: int, kind: int) -> Record:
        if kind == INDEX_INTERIOR:
            at += 4  # skip the pointer to the left child
        length, at = _varint(page, at)
        row, most = None, MOST_IN_INDEX
        if kind == TABLE_LEAF:
            (row, at), most = _varint(page, at), MOST_IN_TABLE
        return row, _columns(self._payload(page, at, length, most))

    def _payload(self, page: bytes, at: int, length: int, most: int) -> bytes:
        """The whole record; bytes that do not fit into the page continue in a chain of overflow pages."""
        if length <= most:
            return _exactly(page, at, length)
        here = LEAST_OF_CHAIN + (length - LEAST_OF_CHAIN) % (SIZE - 4)
        here = here if here <= most else LEAST_OF_CHAIN
        parts, left = [_exactly(page, at, here)], length - here
        after = int.from_bytes(_exactly(page, at + here, 4), "big")
        for _ in range(-(-left // (SIZE - 4))):
            if not 1 < after <= self.count:
                raise ValueError("broken overflow chain")
            page = self.page(after)
            after = int.from_bytes(_exactly(page, 0, 4), "big")
            parts.append(_exactly(page, 4, min(left, SIZE - 4)))
            left -= len(parts[-1])
        return b"".join(parts)

    def _freed(self) -> set[int]:
        """Free pages according to the first page; an inconsistent list is ignored."""
        first = self.page(1)
        if not first.startswith(b"SQLite format 3\0"):
            return set()
        trunk, count = struct.unpack_from(">2I", first, 32)
        free: set[int] = set()
        while trunk:
            if not 1 < trunk <= self.count or trunk in free:
                return set()
            page = self.page(trunk)
            after, leaves = struct.unpack_from(">2I", page)
            if leaves > SIZE // 4 - 2:
                return set()
            free |= {trunk, *struct.unpack_from(f">{leaves}I", page, 8)}
            trunk = after
        return free if len(free) == count else set()


def _columns(record: bytes) -> list[Any]:
    """The columns of a record, which is the length of its header, a type per column, and the values."""
    head, at = _varint(record, 0)
    if head > len(record):
        raise ValueError("the header is longer than the record")
    kinds = []
    while at < head:
        kind, at = _varint(record, at)
        kinds.append(kind)
    values = []
    for kind in kinds:
        value, size = _value(record, at, kind)
        values.append(value)
        at += size
    if at != len(record):
        raise ValueError("the columns do not fill the record")
    return values


def _value(record: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == 0:
        return None, 0
    if kind in _INTEGERS:
        size = _INTEGERS[kind]
        return int.from_bytes(_exactly(record, at, size), "big", signed=True), size
    if kind == 7:
        return struct.unpack(">d", _exactly(record, at, 8))[0], 8
    if kind in (8, 9):
        return kind - 8, 0
    if kind < 12:
        raise ValueError("unknown column type")
    size = (kind - 12) // 2
    data = _exactly(record, at, size)
    return (data.decode() if kind % 2 else data), size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for number in range(9):
        byte = data[at]
        at += 1
        if number == 8:
            return (value << 8) | byte, at
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:
            break
    return value, at


def _exactly(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise ValueError("the data ends early")
    return data[at : at + size]


def _committed(log: bytes) -> dict[int, bytes]:
    """The newest version of each page in the write-ahead log, up to the last complete transaction. Checksums are
    chained from frame to frame, so the first frame that does not match ends the valid part."""
    if len(log) < WAL_HEADER.size:
        return {}
    magic, _, size, _, *salts, first, second = WAL_HEADER.unpack_from(log)
    if magic & ~1 != 0x377F0682 or size != SIZE:
        return {}
    order = ">" if magic & 1 else "<"
    sums = _checksum(log[:24], order, (0, 0))
    if sums != (first, second):
        return {}
    safe: dict[int, bytes] = {}
    fresh: dict[int, bytes] = {}
    for at in range(WAL_HEADER.size, len(log) - FRAME_HEADER.size - SIZE + 1, FRAME_HEADER.size + SIZE):
        number, pages, *frame_salts, first, second = FRAME_HEADER.unpack_from(log, at)
        page = log[at + FRAME_HEADER.size : at + FRAME_HEADER.size + SIZE]
        sums = _checksum(page, order, _checksum(log[at : at + 8], order, sums))
        if frame_salts != salts or sums != (first, second):
            break
        fresh[number] = page
        if pages:  # a commit frame, which gives the size of the database in pages
            safe |= fresh
            fresh = {}
    return safe


def _checksum(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second
