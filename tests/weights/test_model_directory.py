"""Hugging Face directories: tensors by name from one file or many, and a clear error for everything else."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from bankfull.errors import ModelError
from bankfull.weights import safetensors as directory
from bankfull.weights.source import open_model
from tests.quick import examples

CONFIG = {"model_type": "llama", "hidden_size": 8, "torch_dtype": "bfloat16", "rope_theta": 10000.0}
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtypes = {"a": torch.float32, "b": torch.float16, "c": torch.bfloat16, "d": torch.float64}
    return {name: torch.randn(3, 8, generator=generator).to(dtype) for name, dtype in dtypes.items()}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = tensors()
    files = {"model-00001-of-00002.safetensors": ("a", "b"), "model-00002-of-00002.safetensors": ("c", "d")}
    for file, names in files.items():
        save_file({name: found[name] for name in names}, tmp_path / file)
    mapping = {name: file for file, names in files.items() for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_come_back_as_saved(layout: str, request: pytest.FixtureRequest) -> None:
    files = open_model(request.getfixturevalue(layout))
    assert files.kind == "hf" and files.metadata == {} and files.generation == {}
    assert files.config["dtype"] == "bfloat16" and "torch_dtype" not in files.config
    source = files.source
    assert sorted(source.names()) == ["a", "b", "c", "d"] and sorted(source.unread()) == ["a", "b", "c", "d"]
    for name, tensor in tensors().items():
        assert source.has(name) and source.shape(name) == (3, 8)
        got = source.get(name)
        assert got.is_dense and got.parts["data"].dtype == tensor.dtype
        assert torch.equal(got.dequantize(tensor.dtype), tensor)
    assert source.unread() == []


def test_a_missing_tensor_is_named_and_the_rest_shows_as_unread(single: Path) -> None:
    source = open_model(single).source
    source.get("b")
    assert not source.has("e")
    for ask in (source.get, source.shape):
        with pytest.raises(ModelError, match="lacks the tensor 'e'"):
            ask("e")
    assert sorted(source.unread()) == ["a", "c", "d"]


def test_shards_open_once_and_only_when_needed(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counting(path: Path, **options: Any) -> Any:
        opened.append(path.name)
        return safetensors.safe_open(path, **options)

    monkeypatch.setattr(directory, "safe_open", counting)
    source = open_model(sharded).source
    assert opened == []
    source.get("a"), source.get("b"), source.shape("a")
    assert opened == ["model-00001-of-00002.safetensors"]
    source.get("d")
    assert opened == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_generation_defaults_are_read(single: Path) -> None:
    (single / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_model(single).generation == {"eos_token_id": [1, 2]}
    (single / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        open_model(single)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool])
def test_other_dtypes_are_refused_by_name(single: Path, dtype: torch.dtype) -> None:
    save_file({"w": torch.zeros(4).to(dtype), "ok": torch.ones(2)}, single / "model.safetensors")
    source = open_model(single).source
    label = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int64: "I64", torch.bool: "BOOL"}[dtype]
    with pytest.raises(ModelError, match=f"'w' as {label}, which is not read"):
        source.get("w")
    assert source.get("ok").shape == (2,)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"quantization_config": {"quant_method": "aqlm", "bits": 4}}, "aqlm"),
        ({"quantization_config": {"quant_method": {"a": 1}}}, "{'a': 1}"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"compression_config": "gptq"}, "compressed-tensors"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "mlx"),
        ({"quantization_config": {"bits": 4}}, "unnamed"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
    ],
)
def test_quantized_checkpoints_are_refused_by_their_method(single: Path, entry: dict[str, Any], name: str) -> None:
    (single / "config.json").write_text(json.dumps(CONFIG | entry))
    with pytest.raises(ModelError, match=f"quantized with '{name}'"):
        open_model(single)


@pytest.mark.parametrize(
    "target",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "x\0.safetensors",
        "..",
        "",
        "config.json",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(sharded: Path, target: Any) -> None:
    save_file({"a": torch.ones(2)}, sharded.parent / "secret.safetensors")
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(ModelError, match="not a safetensors file beside it"):
        open_model(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{", "\xff", "NaN"])
def test_a_broken_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"index\.json"):
        open_model(sharded)


def test_a_shard_that_lacks_what_the_index_promises_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] |= {"c": "model-00001-of-00002.safetensors", "e": "model-00003-of-00003.safetensors"}
    (sharded / INDEX).write_text(json.dumps(index))
    source = open_model(sharded).source
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors lacks the tensor 'c'"):
        source.get("c")
    with pytest.raises(ModelError, match=r"model-00003-of-00003\.safetensors is missing"):
        source.get("e")
    assert torch.equal(source.get("a").dequantize(), tensors()["a"])


def test_links_of_a_download_cache_are_followed(single: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    (single / "model.safetensors").rename(blobs / "0123")
    (single / "model.safetensors").symlink_to(blobs / "0123")
    assert torch.equal(open_model(single).source.get("a").dequantize(), tensors()["a"])


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pth", "consolidated.00.pth"])
def test_pickled_weights_are_refused(single: Path, file: str) -> None:
    (single / "model.safetensors").unlink()
    (single / file).write_bytes(b"never opened")
    with pytest.raises(ModelError, match=f"'{file}', a pickle"):
        open_model(single)
    (single / file).unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        open_model(single)


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("x")
    (tmp_path / "inner.gguf").write_text("x")
    for path, match in (
        (tmp_path, r"'inner\.gguf'"),
        (tmp_path / "some.txt", "neither"),
        (tmp_path / "no", "not exist"),
        ("a\0b", "path"),
        ("x" * 5000, "path"),
    ):
        with pytest.raises(ModelError, match=match):
            open_model(path)


def read_all(path: Path) -> bool:
    """True if rejected with a clear error, False if everything could be read."""
    try:
        source = open_model(path).source
        for name in source.names():
            source.shape(name)
            source.get(name).dequantize()
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return True
    return False


def test_safetensors_truncated_at_every_byte_are_refused(single: Path) -> None:
    file = single / "model.safetensors"
    assert not read_all(single)
    for size in range(file.stat().st_size - 1, -1, -1):
        os.truncate(file, size)
        assert read_all(single)


def test_every_byte_of_a_safetensors_header_may_be_anything(single: Path) -> None:
    file = single / "model.safetensors"
    raw = file.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    refused = 0
    for at in range(end):
        for value in {0, 0x22, 0x39, 0x7F, 0xFF, raw[at] ^ 1}:
            file.write_bytes(raw[:at] + bytes([value]) + raw[at + 1 :])
            refused += read_all(single)
    assert refused > end


@examples(200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_safetensors_header_is_survived(single: Path, data: st.DataObject) -> None:
    whole = st.one_of(st.integers(-(2**65), 2**65), st.sampled_from([0, 8, 16, 32, 2**63, 2**64 - 1]))
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "I4", "X", 7]),
            "shape": st.lists(whole, max_size=5),
            "data_offsets": st.lists(whole, max_size=3),
        }
    )
    header = json.dumps(data.draw(st.dictionaries(st.text(max_size=5), st.one_of(entry, whole, st.none()), max_size=3)))
    length = data.draw(st.one_of(st.just(len(header.encode())), st.integers(0, 2**64 - 1)))
    (single / "model.safetensors").write_bytes(struct.pack("<Q", length) + header.encode() + b"\0" * 64)
    read_all(single)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_opening_reads_no_tensor_data(single: Path) -> None:
    rows, width = 1 << 19, 1024  # 2 GiB of float32 in a file without a single block of data
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}}).encode()
    header += b" " * (-len(header) % 8)
    file = single / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + rows * width * 4)
    before = resident_bytes()
    tensor = open_model(single).source.get("w")
    assert tensor.nbytes == 2 << 30
    assert torch.equal(tensor.rows(slice(rows - 2, rows)).dequantize(), torch.zeros(2, width))
    assert resident_bytes() - before < 32 << 20


BOUNDED = """
import json, resource, struct, sys
from pathlib import Path
from bankfull.errors import ModelError
from bankfull.weights.source import open_model

folder = Path(sys.argv[1])
file = folder / "model.safetensors"
entry = lambda shape, end: {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
hostile = [
    (2**63, b"{}"), (2**64 - 1, b"{}"), (99 << 20, b"{}"), (1 << 40, b"{}" * 50),
    *((None, json.dumps({"w": entry(shape, end)}).encode()) for shape, end in (
        ([2**40, 2**40], 64), ([2**62, 4], 64), ([2**31, 2**31, 2**31], 0), ([16], 2**63), ([2**40], 2**42),
        ([0, 2**60], 64),
    )),
    (None, b'{"__metadata__": {"a": "' + b"x" * (1 << 20) + b'"}, "w": ' + b"[" * 1000),
    (None, b"[" * (1 << 20)),
]
pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
refused = 0
for length, header in hostile:
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + bytes(64))
    limit = pages + file.stat().st_size + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        source = open_model(folder).source
        [source.get(name).dequantize() for name in source.names()]
    except ModelError as error:
        assert "\\n" not in str(error), error
        refused += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(refused, len(hostile))
"""


def test_a_hostile_header_cannot_make_us_allocate(single: Path) -> None:
    """The process may not grow by more than the file's size and 64 MiB: an attempt would kill it without an error
    message."""
    warm = "from safetensors import safe_open\nimport bankfull.weights.safetensors\n"
    done = subprocess.run(
        [sys.executable, "-c", warm + BOUNDED, str(single)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    refused, tried = map(int, done.stdout.split())
    assert refused == tried
