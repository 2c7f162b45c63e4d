"""Whole and split GGUF files are read as the format's writer defines them, and only as far as needed."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from bankfull.errors import ModelError
from bankfull.weights.gguf.file import open_container
from bankfull.weights.source import open_model


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_metadata_of_every_type_come_back_as_written(tmp_path: Path, make: Any) -> None:
    written: dict[str, Any] = {}

    def metadata(writer: gguf.GGUFWriter) -> None:
        make.tiny_llama_metadata(writer)
        for kind, value in (
            ("uint8", 200),
            ("int8", -3),
            ("uint16", 60000),
            ("int16", -9),
            ("uint32", 2**32 - 1),
            ("int32", -(2**31)),
            ("uint64", 2**64 - 1),
            ("int64", -(2**63)),
            ("float32", 0.5),
            ("float64", 1e300),
            ("bool", True),
            ("string", "größe 🌊"),
        ):
            getattr(writer, f"add_{kind}")(f"test.{kind}", value)
            written[f"test.{kind}"] = value
        for name, values in (
            ("ints", [1, -2, 3]),
            ("floats", [0.5, 2.0]),
            ("texts", ["a", "", "ß"]),
            ("truths", [True, False]),
        ):
            writer.add_array(f"test.{name}", values)
            written[f"test.{name}"] = values

    path = make.write_gguf(tmp_path / "m.gguf", "llama", make.tiny_llama_tensors(), 1, metadata)
    found = open_model(path).metadata
    for key, value in written.items():
        assert found[key] == value and type(found[key]) is type(value), key
    assert found["tokenizer.ggml.tokens"] == ["a", "b", "ü"]
    assert len(found) == len(list(found)) and "test.int8" in found and "test.none" not in found
    assert found.get("test.none") is None


def test_version_2_is_read_like_version_3(tiny_gguf: Path) -> None:
    raw = bytearray(tiny_gguf.read_bytes())
    third = open_container(tiny_gguf)
    raw[4:8] = struct.pack("<I", 2)
    older = tiny_gguf.with_name("older.gguf")
    older.write_bytes(raw)
    second = open_container(older)
    assert dict(second.metadata) == dict(third.metadata)
    for name, info in third.tensors.items():
        assert torch.equal(second.tensors[name].load().dequantize(), info.load().dequantize())


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_another_alignment_is_followed(tmp_path: Path, make: Any, alignment: int) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        make.tiny_llama_metadata(writer)
        writer.add_custom_alignment(alignment)

    tensors = make.tiny_llama_tensors()
    path = make.write_gguf(tmp_path / "m.gguf", "llama", tensors, 1, metadata)
    source = open_model(path).source
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight"):
        assert torch.equal(source.get(name).dequantize(), tensors[name])


def split(make: Any, folder: Path) -> list[Path]:
    folder.mkdir()
    make.write_gguf(
        folder / "m.gguf", "llama", make.tiny_llama_tensors(), 1, make.tiny_llama_metadata, split_max_tensors=3
    )
    return sorted(folder.iterdir())


def test_a_split_model_is_one_model(tmp_path: Path, make: Any) -> None:
    parts = split(make, tmp_path / "s")
    assert [part.name for part in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = make.write_gguf(tmp_path / "w.gguf", "llama", make.tiny_llama_tensors(), 1, make.tiny_llama_metadata)
    one, many = open_model(whole), open_model(parts[0])
    assert one.config == many.config
    assert sorted(one.source.names()) == sorted(many.source.names())
    for name in one.source.names():
        assert torch.equal(one.source.get(name).dequantize(), many.source.get(name).dequantize())


def test_a_split_model_with_a_wrong_part_is_refused(tmp_path: Path, make: Any) -> None:
    first, second, third = split(make, tmp_path / "s")
    with pytest.raises(ModelError, match="not the first of 3 parts"):
        open_model(second)
    original = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match="part 2 of 3"):
        open_model(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match="part 2 of 3"):
        open_model(first)
    second.unlink()
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf cannot be opened"):
        open_model(first)
    second.write_bytes(original[: len(original) // 2])
    with pytest.raises(ModelError, match="00002-of-00003"):
        open_model(first)
    renamed = first.rename(first.with_name("renamed.gguf"))
    with pytest.raises(ModelError, match=r"-00001-of-00003\.gguf"):
        open_model(renamed)


def test_parts_that_repeat_or_lack_tensors_are_refused(tmp_path: Path, make: Any) -> None:
    def part(number: int, count: int, tensors: list[str]) -> None:
        values = [
            ("split.no", 2, struct.pack("<H", number)),
            ("split.count", 2, struct.pack("<H", 2)),
            ("split.tensors.count", 5, struct.pack("<i", count)),
        ]
        described = [(name, (8,), 0, 32 * at) for at, name in enumerate(tensors)]
        made = make.gguf_bytes(values, described, b"\0" * 32 * len(tensors))
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(made)

    part(0, 2, ["a"])
    part(1, 2, ["a"])
    with pytest.raises(ModelError, match="repeats the tensor 'a'"):
        open_container(tmp_path / "m-00001-of-00002.gguf")
    part(0, 3, ["a"])
    part(1, 3, ["b"])
    with pytest.raises(ModelError, match="declares 3 tensors but its 2 parts hold 2"):
        open_container(tmp_path / "m-00001-of-00002.gguf")


def test_opening_reads_no_tensor_data(tmp_path: Path, make: Any) -> None:
    rows, width = 1 << 19, 1024  # 2 GiB of float32 in a file without a single block of data
    path = tmp_path / "big.gguf"
    path.write_bytes(make.gguf_bytes([], [("token_embd.weight", (rows, width), 0, 0)]))
    os.truncate(path, path.stat().st_size + rows * width * 4)
    before = resident_bytes()
    tensor = open_container(path).tensors["token_embd.weight"].load()
    assert tensor.nbytes == 2 << 30
    assert torch.equal(tensor.rows(slice(rows - 2, rows)).dequantize(), torch.zeros(2, width))
    assert resident_bytes() - before < 32 << 20


def test_tensors_are_views_that_never_write_to_the_file(tiny_gguf: Path) -> None:
    raw = tiny_gguf.read_bytes()
    container = open_container(tiny_gguf)
    first = container.tensors["token_embd.weight"].load().parts["blocks"]
    assert first.data_ptr() == container.tensors["token_embd.weight"].load().parts["blocks"].data_ptr()
    first.zero_()
    assert tiny_gguf.read_bytes() == raw
