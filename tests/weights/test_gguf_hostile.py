"""A damaged or malicious GGUF file raises one clear error: no other exception, no large allocation, no stray read."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bankfull.errors import ModelError
from bankfull.weights.gguf.file import open_container
from bankfull.weights.source import open_model
from tests.quick import examples

SLACK = 64 << 20
FULL = pytest.mark.full


@contextmanager
def bounded(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= size + SLACK
    finally:
        tracemalloc.stop()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def survives(path: Path) -> bool:
    """True if the file was rejected with a clear error, False if all of it could be read."""
    try:
        files = open_model(path)
        for key in files.metadata:
            files.metadata[key]
        for name in files.source.names():
            files.source.get(name).dequantize()
    except ModelError as error:
        message = str(error)
        assert path.name in message and "\n" not in message and len(message) < 600
        return True
    return False


def end_of_data(path: Path) -> int:
    return max(info.offset + info.nbytes for info in open_container(path).tensors.values())


def header_size(path: Path) -> int:
    return min(info.offset for info in open_container(path).tensors.values())


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=FULL)])
def test_truncation_at_every_byte_is_refused(tiny_gguf: Path, step: int) -> None:
    """A quick run truncates at every byte of the header, and at some of the tensors."""
    assert not survives(tiny_gguf)
    raw, end = tiny_gguf.read_bytes(), end_of_data(tiny_gguf)
    copy = tiny_gguf.with_name("copy.gguf")
    copy.write_bytes(raw)
    with bounded(len(raw)):
        for size in [*range(end - 1, header_size(tiny_gguf), -step), *range(header_size(tiny_gguf), -1, -1)]:
            os.truncate(copy, size)
            with pytest.raises(ModelError, match=r"copy\.gguf"):
                open_model(copy)


@pytest.mark.parametrize("value", [0x00, 0xFF, None, *(pytest.param(v, marks=FULL) for v in (0x01, 0x7F, 0x80))])
def test_every_header_byte_may_be_anything(tiny_gguf: Path, value: int | None) -> None:
    """None flips its lowest bit."""
    raw = tiny_gguf.read_bytes()
    copy = tiny_gguf.with_name("copy.gguf")
    copy.write_bytes(raw)
    refused = 0
    with bounded(len(raw)), copy.open("r+b") as file:
        for at in range(header_size(tiny_gguf)):
            file.seek(at)
            file.write(bytes([raw[at] ^ 1 if value is None else value]))
            file.flush()
            refused += survives(copy)
            file.seek(at)
            file.write(raw[at : at + 1])
            file.flush()
    assert refused > 500 / 6
    assert not survives(copy)


@pytest.mark.parametrize(
    "value",
    [2**64 - 1, 2**63 - 1, 2**32, *(pytest.param(v, marks=FULL) for v in (2**63, 2**62, 2**61 + 1, 2**32 - 1))],
)
def test_every_header_word_may_be_huge(tiny_gguf: Path, value: int) -> None:
    raw = tiny_gguf.read_bytes()
    copy = tiny_gguf.with_name("copy.gguf")
    copy.write_bytes(raw)
    with bounded(len(raw)), copy.open("r+b") as file:
        for at in range(header_size(tiny_gguf) - 8):
            file.seek(at)
            file.write(struct.pack("<Q", value))
            file.flush()
            survives(copy)
            file.seek(at)
            file.write(raw[at : at + 8])
            file.flush()


@examples(300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_survived(tiny_gguf: Path, data: st.DataObject) -> None:
    raw = bytearray(tiny_gguf.read_bytes())
    copy = tiny_gguf.with_name("copy.gguf")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_size(tiny_gguf)))
        patch = data.draw(st.binary(min_size=0, max_size=16))
        raw[at : at + data.draw(st.integers(0, 16))] = patch
    copy.write_bytes(raw)
    with bounded(len(raw)):
        survives(copy)


@examples(200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=200), version=st.sampled_from([2, 3]))
def test_any_bytes_after_the_magic_are_survived(tmp_path: Path, tail: bytes, version: int) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + tail)
    with bounded(len(tail)):
        assert survives(path)


def refuse(path: Path, content: bytes, match: str) -> None:
    path.write_bytes(content)
    with bounded(len(content)), pytest.raises(ModelError, match=match) as caught:
        open_container(path)
    assert path.name in str(caught.value)


def test_absurd_structures_are_refused_by_what_is_wrong(tmp_path: Path, make: Any) -> None:
    path, text, made = tmp_path / "bad.gguf", make.text, make.gguf_bytes
    u32, u64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
    zeros = b"\0" * 256

    refuse(path, b"", "empty")
    refuse(path, b"GGML" + zeros, "not a GGUF file")
    refuse(path, made(version=1), "version 1")
    refuse(path, made(version=4), "version 4")
    refuse(path, b"GGUF" + struct.pack(">I", 3) + zeros, "big-endian")
    refuse(path, made(value_count=2**63), "metadata keys")
    refuse(path, made(value_count=60000), "ends in the middle")
    refuse(path, made(tensor_count=2**64 - 1), "claims")
    refuse(path, made([(b"a" * 70000, 0, b"\1")]), "70000 bytes")
    refuse(path, made([("ключ", 0, b"\1")]), "ASCII")
    refuse(path, made([("a", 0, b"\1"), ("a", 0, b"\1")]), "'a' twice")
    refuse(path, made([("a", 13, zeros)]), "unknown type 13")
    refuse(path, made([("a", 8, u64(2**40))]), "bytes of text")
    refuse(path, made([("a", 8, u64(1000))]), "ends in the middle")
    refuse(path, made([("a", 9, u32(9) + u64(1) + u32(9) + u64(1))]), "nests an array")
    refuse(path, made([("a", 9, u32(0) + u64(2**62))]), "elements")
    refuse(path, made([("a", 9, u32(12) + u64(1000))]), "ends in the middle")
    refuse(path, made([("a", 9, u32(77) + u64(1))]), "unknown type 77")
    refuse(path, made([("a", 9, u32(8) + u64(3) + text("x") + u64(2**64 - 1))]), "bytes of text")
    for alignment in (0, 1, 3, 24, 33, 2**31):
        refuse(path, made([("general.alignment", 4, u32(alignment))]), f"alignment {alignment}")
    refuse(path, made([("general.alignment", 8, text("32"))]), "not a whole number")
    refuse(path, made([("split.count", 7, b"\1")]), "not a whole number")


def test_absurd_tensors_are_refused_by_what_is_wrong(tmp_path: Path, make: Any) -> None:
    path, made = tmp_path / "bad.gguf", make.gguf_bytes
    data = b"\0" * 256

    refuse(path, made([], [("t" * 300, (8,), 0, 0)], data), "300 bytes")
    refuse(path, made([], [("t", (8,), 0, 0), ("t", (8,), 0, 32)], data), "'t' twice")
    refuse(path, made([], [("t", (), 0, 0)], data), "0 dimensions")
    refuse(path, made([], [("t", (1,) * 5, 0, 0)], data), "5 dimensions")
    refuse(path, made([], [("t", (0, 8), 0, 0)], data), "impossible")
    refuse(path, made([], [("t", (8, 33), 2, 0)], data), "impossible for q4_0")
    refuse(path, made([], [("t", (65,), 0, 0)], data), "ends before the data of 't'")
    refuse(path, made([], [("t", (8,), 0, 256)], data), "ends before the data of 't'")
    refuse(path, made([], [("t", (8,), 0, 2**64 - 32)], data), "ends before the data of 't'")
    refuse(path, made([], [("t", (2**32, 2**32), 0, 0)], data), "ends before the data of 't'")
    refuse(path, made([], [("t", (2**62, 4), 0, 0)], data), "ends before the data of 't'")
    refuse(path, made([], [("t", (2**63, 2**63, 2**63, 2**63), 1, 0)], data), "ends before the data of 't'")
    refuse(path, made([], [("t", (8,), 0, 5)], data), "not a multiple of 32")
    refuse(path, made([], [("a", (16,), 0, 0), ("b", (8,), 0, 32)], data), "'b' over the data of 'a'")
    path.write_bytes(made([], [("a", (8,), 0, 0), ("b", (8,), 0, 32)], data))
    assert list(open_container(path).tensors) == ["a", "b"]


READ = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"}
READ |= {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_each_type_is_read_or_refused_by_its_name(tmp_path: Path, make: Any, kind: gguf.GGMLQuantizationType) -> None:
    path = tmp_path / "typed.gguf"
    content = make.gguf_bytes([], [("t", (1, 256), kind.value, 0)], b"\0" * 4096)
    if kind.name in READ:
        path.write_bytes(content)
        assert open_container(path).tensors["t"].load().dequantize().shape == (1, 256)
    else:
        refuse(path, content, f"'t' as type {kind.name},")


def test_metadata_that_lie_about_the_model_are_refused(tmp_path: Path, make: Any) -> None:
    def lie(key: str, value: int) -> None:
        path = tmp_path / "lie.gguf"

        def metadata(writer: gguf.GGUFWriter) -> None:
            make.tiny_llama_metadata(writer)
            writer.kv_data[0].pop(key, None)
            writer.add_uint32(key, value)

        make.write_gguf(path, "llama", make.tiny_llama_tensors(), 1, metadata)
        with bounded(path.stat().st_size), pytest.raises(ModelError, match=r"lie\.gguf"):
            open_model(path)

    for key, value in (
        ("block_count", 2**32 - 1),
        ("block_count", 0),
        ("embedding_length", 31),
        ("context_length", 0),
        ("attention.head_count", 0),
        ("attention.head_count", 3),
        ("attention.head_count", 2**32 - 1),
        ("attention.head_count_kv", 0),
        ("attention.key_length", 7),
        ("attention.value_length", 99),
        ("rope.dimension_count", 15),
        ("feed_forward_length", 0),
        ("rope.freq_base", 0),
    ):
        lie(f"llama.{key}", value)


def test_text_that_is_not_utf8_and_truths_beyond_0_and_1_are_refused_when_asked_for(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(make.gguf_bytes([("text", 8, make.text(b"\xff\xfe")), ("truth", 7, b"\2")]))
    metadata = open_container(path).metadata
    with pytest.raises(ModelError, match="'text' that is not UTF-8"):
        metadata["text"]
    with pytest.raises(ModelError, match="'truth' that is neither 0 nor 1"):
        metadata["truth"]


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name, match in (
        ("pipe.gguf", "not a regular file"),
        ("folder.gguf", "no config.json"),
        ("none.gguf", "cannot be opened"),
        ("nul\0.gguf", "path"),
    ):
        with pytest.raises(ModelError, match=match):
            open_model(tmp_path / name)


def test_the_most_entries_that_are_allowed_stay_within_the_bound(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "full.gguf"
    count = 1 << 16
    keys = [(f"{n:04x}", 0, b"\1") for n in range(count - 1)]
    listed = struct.pack("<IQ", 8, 1 << 20) + make.text("ab") * (1 << 20)
    content = make.gguf_bytes([*keys, ("words", 9, listed)], [(f"{n:04x}", (2,), 0, 32 * n) for n in range(count)])
    path.write_bytes(content)
    size = len(content) + 32 * count
    os.truncate(path, size)
    before = resident_bytes()  # tracing a few million small objects would take a minute
    container = open_container(path)
    assert len(container.tensors) == len(container.metadata) == count
    assert resident_bytes() - before <= size + SLACK
    words = container.metadata["words"]
    assert isinstance(words, list) and len(words) == 1 << 20
    assert resident_bytes() - before <= size + 2 * SLACK  # and the longest list that a file may hold
