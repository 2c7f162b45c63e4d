"""Prepared layouts on disk: found again byte by byte, never half, never of other weights, never without bounds."""

import errno
import fcntl
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bankfull import LLM, SamplingParams
from bankfull.cli.cache import weights
from bankfull.errors import ConfigError
from bankfull.ops import native
from bankfull.weights import file_digests, store
from bankfull.weights.locate import DEFAULT_MODEL, locate
from bankfull.weights.qtensor import LateParts, QTensor
from bankfull.weights.store import PreparedWeights
from tests.tiny import speaking_folder

KEY = "0" * 32
SIZES = {"a as 3": 200, "b as 3": 64, "c as 4": 1000, "nothing": 0}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(store.VARIABLE, raising=False)
    for module, name in ((store, "LEAST_BYTES"), (store, "PATIENCE_SECONDS"), (store, "TICK_SECONDS")):
        monkeypatch.setattr(module, name, 0)
    monkeypatch.setattr(file_digests, "KEPT_BYTES", 0)
    monkeypatch.setattr(file_digests, "TICK_SECONDS", 0.05)
    yield


def opened(folder: Path, key: str = KEY, allowed: int = 1 << 30) -> PreparedWeights:
    return PreparedWeights(folder, "model", lambda: key, allowed)


def taken(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def numbers(name: str) -> Callable[[Tensor], object]:
    return lambda data: data.random_(generator=torch.Generator().manual_seed(len(name)))


def never(data: Tensor) -> None:
    raise AssertionError("a layout was made again")


def kept(folder: Path, key: str = KEY, allowed: int = 1 << 30) -> dict[str, Tensor]:
    """Layouts that were made and written."""
    made = opened(folder, key, allowed)
    layouts = {name: made.layout(name, size, taken, numbers(name)).clone() for name, size in SIZES.items()}
    made.fact("a in range", lambda: True)
    thread = made.keep()
    assert thread is not None
    thread.join()
    return layouts


def files(folder: Path, key: str = KEY) -> tuple[Path, Path]:
    return folder / f"{key}.json", folder / f"{key}.weights"


@pytest.mark.parametrize("maps", [True, False])
def test_the_next_start_finds_every_layout_and_makes_none(tmp_path: Path, maps: bool) -> None:
    layouts = kept(tmp_path)
    again = opened(tmp_path)
    again.maps = maps
    assert again.find(KEY)
    for name, size in SIZES.items():
        assert torch.equal(again.layout(name, size, taken, never), layouts[name])
    assert again.fact("a in range", lambda: False)
    assert again.keep() is None
    assert not any(path.name.startswith((".new-", f".{KEY}")) for path in tmp_path.iterdir())


def test_a_layout_of_another_size_is_made_again_and_kept_beside_the_others(tmp_path: Path) -> None:
    kept(tmp_path)
    again = opened(tmp_path)
    assert again.find(KEY)
    longer = again.layout("a as 3", 300, taken, numbers("longer"))
    thread = again.keep()
    assert thread is not None
    thread.join()
    last = opened(tmp_path)
    assert last.find(KEY) and torch.equal(last.layout("a as 3", 300, taken, never), longer)
    assert last.layout("c as 4", 1000, taken, never).numel() == 1000


def test_layouts_of_another_key_are_not_found(tmp_path: Path) -> None:
    kept(tmp_path)
    assert not opened(tmp_path).find("1" * 32)


def flip(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, 100)


@pytest.mark.parametrize("damage", [flip, cut])
def test_damaged_layouts_are_not_used_but_made_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    layouts = kept(tmp_path)
    damage(files(tmp_path)[1])
    with caplog.at_level(logging.WARNING, "bankfull"):
        assert not opened(tmp_path).find(KEY)
    assert [record.message for record in caplog.records if "made again" in record.message]
    assert len(caplog.records) == 1
    assert layouts.keys() == kept(tmp_path).keys()
    assert opened(tmp_path).find(KEY)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: b"{",
        lambda about: b"[]",
        lambda about: b"\xff\xfe",
        lambda about: b"[" * 100_000,
        lambda about: json.dumps({**about, "format": 0}),
        lambda about: json.dumps({**about, "digest": "00"}),
        lambda about: json.dumps({**about, "size": about["size"] + 64}),
        lambda about: json.dumps({**about, "size": "64"}),
        lambda about: json.dumps({**about, "entries": {"a as 3": [0, about["size"] + 1]}}),
        lambda about: json.dumps({**about, "entries": {"a as 3": [-64, 64]}}),
        lambda about: json.dumps({**about, "entries": {"a as 3": [1, 2]}}),
        lambda about: json.dumps({**about, "entries": {"a as 3": 1}}),
        lambda about: json.dumps({**about, "entries": [1]}),
        lambda about: json.dumps({**about, "facts": {"a in range": "yes"}}),
    ],
)
def test_an_index_that_is_not_ours_is_ignored(
    tmp_path: Path, change: Callable[[dict[str, object]], str | bytes]
) -> None:
    kept(tmp_path)
    index = files(tmp_path)[0]
    changed = change(json.loads(index.read_bytes()))
    index.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    assert not opened(tmp_path).find(KEY)


def test_a_full_disk_costs_one_line_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING, "bankfull"):
        kept(tmp_path / "full")
    assert ["No space left on device" in record.message for record in caplog.records] == [True]
    assert not list((tmp_path / "full").iterdir())


def test_what_was_used_longest_ago_makes_room_and_nothing_else_goes(tmp_path: Path) -> None:
    others = [tmp_path / "mine.weights", tmp_path / "notes.json"]
    for path in others:
        path.write_bytes(b"x" * 5000)
    for age, key in enumerate(("1" * 32, "2" * 32, "3" * 32)):
        kept(tmp_path, key)
        os.utime(files(tmp_path, key)[0], (age, age))
    size = sum(path.stat().st_size for path in files(tmp_path, "1" * 32))
    assert opened(tmp_path, "1" * 32).find("1" * 32)  # used just now
    kept(tmp_path, "4" * 32, allowed=3 * size + size // 2)
    left = {key: files(tmp_path, key * 32)[1].exists() for key in "1234"}
    assert left == {"1": True, "2": False, "3": True, "4": True}
    assert all(path.exists() for path in others)


def test_more_than_is_allowed_is_not_written(tmp_path: Path) -> None:
    made = opened(tmp_path, allowed=1000)
    made.layout("large", 2000, taken, numbers("large"))
    assert made.keep() is None


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    lock = os.open(tmp_path / f".{KEY}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    kept(tmp_path)
    assert not any(path.exists() for path in files(tmp_path))
    os.close(lock)


@pytest.mark.parametrize(("wanted", "allowed"), [("off", 0), ("OFF", 0), ("3MiB", 3 << 20)])
def test_the_user_says_how_much_is_kept(monkeypatch: pytest.MonkeyPatch, wanted: str, allowed: int) -> None:
    monkeypatch.setenv(store.VARIABLE, wanted)
    opened = store.store_for("model", lambda: KEY, None)
    assert (0 if opened is None else opened.allowed) == allowed


def test_people_see_what_is_kept_and_may_delete_it(capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("1" * 32, KEY):
        kept(store.prepared_dir(), key)
        os.utime(files(store.prepared_dir(), key)[0], (int(key[0] == "0"), int(key[0] == "0")))
    foreign = store.prepared_dir() / "notes.json"
    foreign.write_text("[")
    weights(json=True)
    rows = json.loads(capsys.readouterr().out)["weights"]
    assert [(row["model"], Path(row["path"]).stem) for row in rows] == [("model", KEY), ("model", "1" * 32)]
    weights()
    assert "model: " in capsys.readouterr().out
    weights(clear=True)
    assert capsys.readouterr().out.startswith("Deleted ")
    assert list(store.prepared_dir().iterdir()) == [foreign]


def test_a_size_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.VARIABLE, "much")
    with pytest.raises(ConfigError, match=r"BANKFULL_PREPARED='much' is not a size; .*, or 'off'\."):
        store.store_for("model", lambda: KEY, None)


def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError

    for variable in ("BANKFULL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", unknown)


def of_unknown_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(shutil, "disk_usage", refused)


@pytest.mark.parametrize("without", [homeless, of_unknown_size])
def test_a_model_is_loaded_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, without: Callable[[pytest.MonkeyPatch], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = str(speaking_folder())
    without(monkeypatch)
    with caplog.at_level(logging.WARNING, "bankfull"):
        assert LLM(model).generate("one two", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    assert len([record for record in caplog.records if "made at each start" in record.message]) == 1


def tensor(rows: int = 6) -> QTensor:
    data = torch.randn(rows, 32)
    return QTensor(QTensor.dense(data).scheme, {"data": data}, (rows, 32), name="one")


def test_late_parts_are_made_once_and_hold_what_the_copy_would() -> None:
    whole, order = tensor(), torch.tensor([3, 1, 0, 5, 4, 2])
    cube = QTensor.stacked([tensor(), tensor()]).reshape_leading(2, 6)
    found = [
        (whole.reordered(order), whole.parts["data"][order], "one"),
        (QTensor.stacked([whole, whole]), whole.parts["data"].repeat(2, 1), "one to one"),
        (cube.of_each(slice(1, 3)), cube.parts["data"][:, 1:3], "one to one[:, 1:3]"),
    ]
    for late, values, name in found:
        assert isinstance(late.parts, LateParts) and late.parts._made is None
        assert (late.shape, late.nbytes, late.name) == (tuple(values.shape), values.nbytes, name)
        assert late.device.type == "cpu" and late.to("cpu") is late and late.parts._made is None
        assert torch.equal(late.dequantize(), values)
        assert late.parts["data"] is late.parts["data"]


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
@pytest.mark.parametrize(("real", "options"), [(False, {"activations": "bf16"}), (True, {})])
def test_a_second_start_packs_nothing_and_says_the_same(
    monkeypatch: pytest.MonkeyPatch, real: bool, options: dict[str, Any]
) -> None:
    with monkeypatch.context() as usual:
        usual.delenv("BANKFULL_CACHE")
        model = str(locate(DEFAULT_MODEL) if real else speaking_folder())

    def answer() -> list[int]:
        [output] = LLM(model, **options).generate("one two", SamplingParams(max_tokens=12, temperature=0.0))
        return list(output.outputs[0].token_ids)

    first = answer()
    for thread in threading.enumerate():
        if thread.name == "bankfull-store":
            thread.join()
    assert [path for path in (store.cache_dir() / "prepared").iterdir() if path.suffix == ".weights"]
    monkeypatch.setattr("bankfull.ops.products.native.packed.pack_into", lambda *_: never(torch.empty(0)))
    assert answer() == first
