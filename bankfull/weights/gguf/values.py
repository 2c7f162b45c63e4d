"""The key/value section of a GGUF file: indexed once, decoded on access.

The input is untrusted. Every count and length is checked against the remaining bytes before it is used, so a file
cannot make us allocate more than its own size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bankfull.errors import ModelError

STRING, ARRAY, BOOL = 8, 9, 7
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES: dict[int, int] = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()}
_U64 = struct.Struct("<Q")

# Far above any real file (a quarter million tokens with half a million merges; a few hundred keys), and low enough to
# keep the Python objects small.
MAX_KEYS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY = 1 << 20
MAX_ARRAY_ELEMENTS = 1 << 23  # over all arrays of one file

Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[str]


@dataclass(slots=True)
class Cursor:
    """A position in a mapped file that never moves past its end."""

    data: mmap.mmap
    name: str
    at: int = 0
    elements: int = 0  # array elements seen so far

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return the position before them."""
        start = self.at
        if count > len(self.data) - start:
            raise ModelError(f"{self.name} ends in the middle of {what}: the file is damaged or not fully downloaded")
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int.from_bytes(self.data[(start := self.take(4, what)) : start + 4], "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.data[(start := self.take(8, what)) : start + 8], "little")

    def ascii(self, limit: int, what: str) -> str:
        length = self.u64(what)
        if length > limit:
            raise ModelError(f"{self.name} has {what} of {length} bytes, over the limit of {limit}: it is damaged")
        start = self.take(length, what)
        raw = self.data[start : self.at]
        text = raw.decode("latin-1")
        if not (text.isascii() and text.isprintable()):
            raise ModelError(f"{self.name} has {what} that is not plain ASCII: the file is damaged")
        return text


@dataclass(frozen=True, slots=True)
class _Found:
    kind: int
    at: int
    count: int  # elements of an array, bytes of a string, 1 for a scalar
    element: int = -1  # kind of an array's elements


class Metadata(Mapping[str, Value]):
    """GGUF key/values; a value is decoded at each access, an array becomes a list."""

    __slots__ = ("_data", "_found", "_name")

    def __init__(self, data: mmap.mmap, name: str, found: dict[str, _Found]) -> None:
        self._data = data
        self._name = name
        self._found = found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> Value:
        entry = self._found[key]
        if entry.kind == STRING:
            return self._text(key, entry.at, entry.count)
        if entry.kind != ARRAY:
            return self._numbers(key, entry.kind, entry.at, 1)[0]
        if entry.element == STRING:
            return self._texts(key, entry.at, entry.count)
        return self._numbers(key, entry.element, entry.at, entry.count)

    def is_float32(self, key: str) -> bool:
        return self._found[key].kind == 6

    def _numbers(self, key: str, kind: int, at: int, count: int) -> list[int] | list[float] | list[bool]:
        raw = self._data[at : at + count * _SIZES[kind]]
        if kind == BOOL and raw.strip(b"\0\1"):
            raise ModelError(f"{self._name} has a boolean in '{key}' that is neither 0 nor 1: the file is damaged")
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", raw))

    def _text(self, key: str, at: int, length: int) -> str:
        try:
            return self._data[at : at + length].decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self._name} has text in '{key}' that is not UTF-8: the file is damaged") from None

    def _texts(self, key: str, at: int, count: int) -> list[str]:
        texts: list[str] = []
        data, length_at = self._data, _U64.unpack_from
        try:
            for _ in range(count):  # hundreds of thousands of tokens: a tight loop, as in _end_of_texts
                end = at + 8 + length_at(data, at)[0]
                texts.append(str(data[at + 8 : end], "utf-8"))
                at = end
        except UnicodeDecodeError:
            raise ModelError(f"{self._name} has text in '{key}' that is not UTF-8: the file is damaged") from None
        return texts


def find_values(cursor: Cursor, count: int) -> Metadata:
    """Index `count` key/values, checking each, without decoding them."""
    if count > MAX_KEYS:
        raise ModelError(f"{cursor.name} claims {count} metadata keys, over the limit of {MAX_KEYS}: it is damaged")
    entries: dict[str, _Found] = {}
    for _ in range(count):
        key = cursor.ascii(MAX_KEY_BYTES, "a metadata key")
        if key in entries:
            raise ModelError(f"{cursor.name} has the metadata key '{key}' twice: the file is damaged")
        what = f"the value of '{key}'"
        entries[key] = _find(cursor, cursor.u32(what), what)
    return Metadata(cursor.data, cursor.name, entries)


def _find(cursor: Cursor, kind: int, what: str) -> _Found:
    if kind == STRING:
        length = _string_length(cursor, what)
        return _Found(kind, cursor.take(length, what), length)
    if kind == ARRAY:
        element, count = cursor.u32(what), cursor.u64(what)
        return _Found(kind, _skip_array(cursor, element, count, what), count, element)
    return _Found(kind, cursor.take(_size(cursor, kind, what), what), 1)


def _string_length(cursor: Cursor, what: str) -> int:
    length = cursor.u64(what)
    if length > MAX_STRING_BYTES:
        raise ModelError(f"{cursor.name} has {length} bytes of text in {what}, over the limit of {MAX_STRING_BYTES}")
    return length


def _size(cursor: Cursor, kind: int, what: str) -> int:
    size = _SIZES.get(kind)
    if size is None:
        raise ModelError(f"{cursor.name} gives {what} the unknown type {kind}: the file is damaged or too new")
    return size


def _skip_array(cursor: Cursor, element: int, count: int, what: str) -> int:
    if element == ARRAY:
        raise ModelError(f"{cursor.name} nests an array in {what}, which no known model does: the file is damaged")
    cursor.elements += count
    if count > MAX_ARRAY or cursor.elements > MAX_ARRAY_ELEMENTS:
        raise ModelError(f"{cursor.name} claims an array of {count} elements in {what}, over the limit: it is damaged")
    if element != STRING:
        return cursor.take(count * _size(cursor, element, what), what)
    start = cursor.at
    end = _end_of_texts(cursor, count)
    if end is None:
        for _ in range(count):  # find the invalid one, which raises the error
            cursor.take(_string_length(cursor, what), what)
    else:
        cursor.at = end
    return start


def _end_of_texts(cursor: Cursor, count: int) -> int | None:
    """Position after `count` strings; None if they do not fit. There may be hundreds of thousands, so the loop is
    tight."""
    data, at, length_at = cursor.data, cursor.at, _U64.unpack_from
    try:
        for _ in range(count):
            length = length_at(data, at)[0]
            if length > MAX_STRING_BYTES:
                return None
            at += 8 + length
    except struct.error:  # beyond the end of the file
        return None
    return at if at <= len(data) else None
