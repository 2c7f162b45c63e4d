"""State that leaves the device: restored prefixes give the same tokens, and no disk can hurt a request."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from bankfull.config import StateConfig
from bankfull.errors import ConfigError
from bankfull.state import disk_files
from bankfull.state.disk import PlaceFile
from bankfull.state.disk_folders import stored
from bankfull.state.tiers import Tiers
from tests.tiny import speaking_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(3, 43))


def made(root: Path, **options: object) -> LLM:
    usual = {"dtype": "float32", "memory": "8MiB", "page_tokens": 4, "kv_disk": f"8MiB:{root}", **options}
    llm = LLM(str(speaking_folder()), **usual)  # type: ignore[arg-type]
    llm.loaded.engine.scheduler.pace.forecast = None  # a model as small as this is computed faster than read
    return llm


def tiers_of(llm: LLM) -> Tiers:
    found = llm.loaded.engine.scheduler.state.tiers
    assert found is not None
    return found


def flush(llm: LLM) -> None:
    """Wait for write-behind, and let go of the files."""
    engine = llm.loaded.engine
    deadline = time.monotonic() + 30
    while engine.busy:
        engine.step()
        assert time.monotonic() < deadline, "write-behind never ends"
    assert engine.runner.mover is not None
    engine.runner.mover.close()


def answer(llm: LLM, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    [found] = llm.generate([prompt], GREEDY)
    return list(found.outputs[0].token_ids), found.metrics.cached_tokens if found.metrics else 0


@pytest.fixture(scope="module")
def expected() -> list[int]:
    llm = LLM(str(speaking_folder()), dtype="float32", memory="8MiB", page_tokens=4)
    return answer(llm)[0]


def test_a_prefix_survives_a_restart(tmp_path: Path, expected: list[int]) -> None:
    first = made(tmp_path)
    assert answer(first) == (expected, 0)
    flush(first)
    again = made(tmp_path)
    tokens, cached = answer(again)
    assert tokens == expected and cached == 36
    assert tiers_of(again).lower[0].traffic.read > 0
    assert answer(again, [*PROMPT, 5])[1] == 40, "the rest of the prompt was computed, and is cached too"
    flush(again)


def test_another_salt_does_not_find_it(tmp_path: Path) -> None:
    first = made(tmp_path)
    first.generate([{"prompt_token_ids": PROMPT}], GREEDY)
    flush(first)
    again = made(tmp_path)
    state = again.loaded.engine.scheduler.state
    from bankfull.state.prefix import Chain

    assert state.reach(Chain(b"", 4), PROMPT, 39) == 36
    assert state.reach(Chain(b"another key", 4), PROMPT, 39) == 0
    flush(again)


@pytest.mark.parametrize("change", [{"page_tokens": 8}, {"kv_dtype": "bfloat16"}, {"dtype": "bfloat16"}])
def test_state_of_another_kind_is_not_found(change: dict[str, object], tmp_path: Path) -> None:
    first = made(tmp_path)
    answer(first)
    flush(first)
    other = made(tmp_path, **change)
    assert answer(other)[1] == 0
    flush(other)
    assert len(list(stored(tmp_path))) == 2


def test_damaged_pages_are_computed_again(tmp_path: Path, expected: list[int]) -> None:
    first = made(tmp_path)
    answer(first)
    flush(first)
    [found] = stored(tmp_path)
    data = found.path / "pages.data"
    raw = bytearray(data.read_bytes())
    raw[3] ^= 0x40  # the first page that was written is the prompt's first
    data.write_bytes(raw)
    again = made(tmp_path)
    tokens, cached = answer(again)
    assert tokens == expected and cached == 0
    assert tiers_of(again).lower[0].traffic.failed == 1
    flush(again)
    third = made(tmp_path)
    assert answer(third) == (expected, 36), "the page was written anew"
    flush(third)


def test_a_full_disk_changes_no_answer(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = made(tmp_path)

    def full(handle: int, content: object, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_files.os, "pwrite", full)
    assert answer(llm)[0] == expected
    engine = llm.loaded.engine
    while engine.scheduler.state.moves:
        engine.step()
    assert tiers_of(llm).lower[0].traffic.failed >= 1
    assert answer(llm) == (expected, 36), "the device's own cache is not concerned"
    said = [record.message for record in caplog.records if "disk tier" in record.message]
    assert len(said) == 1 and "No space left on device" in said[0]


LIMITED = """
import resource, sys
from pathlib import Path
from tests.test_tiers import answer, made, tiers_of
llm = made(Path(sys.argv[1]))
most = 3 * llm.loaded.layout.frame_bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
tokens, _ = answer(llm)
engine = llm.loaded.engine
while engine.scheduler.state.moves:
    engine.step()
traffic = tiers_of(llm).lower[0].traffic
print(tokens, traffic.failed > 0, traffic.written > 0)
"""


def test_a_file_that_cannot_grow_changes_no_answer(tmp_path: Path, expected: list[int]) -> None:
    """The operating system itself refuses to write beyond three pages."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == f"{expected} True True", done.stderr
    again = made(tmp_path)
    assert answer(again)[0] == expected
    flush(again)


def test_a_disk_that_hangs_holds_up_no_step(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), PlaceFile.write

    def hanging(file: PlaceFile, place: int, key: bytes, content: memoryview) -> None:
        go.wait(60)
        write(file, place, key, content)

    monkeypatch.setattr(PlaceFile, "write", hanging)
    llm = made(tmp_path)
    for _ in range(3):
        assert answer(llm)[0] == expected
    go.set()
    flush(llm)


def test_a_disk_that_never_answers_is_given_up(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path)
    answer(first)
    flush(first)
    go, read = threading.Event(), PlaceFile.read

    def hanging(file: PlaceFile, place: int, key: bytes, into: memoryview) -> None:
        go.wait(60)
        read(file, place, key, into)

    monkeypatch.setattr(PlaceFile, "read", hanging)
    again = made(tmp_path)
    scheduler = again.loaded.engine.scheduler
    now = [time.monotonic()]
    scheduler.parking._clock = lambda: now.__setitem__(0, now[0] + 0.5) or now[0]  # type: ignore[func-returns-value]
    assert answer(again) == (expected, 0)
    assert scheduler.parking.counts.late == 1
    go.set()
    flush(again)


def test_a_prefix_that_is_computed_faster_than_read_is_not_read(tmp_path: Path, expected: list[int]) -> None:
    first = made(tmp_path)
    answer(first)
    flush(first)
    again = made(tmp_path)

    class Fast:
        def prefill(self, start: int, end: int) -> float:
            return 1e-9

    again.loaded.engine.scheduler.parking.prices = Fast()
    assert answer(again) == (expected, 0)
    assert again.loaded.engine.scheduler.parking.counts.refused == 1
    assert tiers_of(again).lower[0].traffic.read == 0
    flush(again)


def test_a_reset_forgets_the_disk_too(tmp_path: Path) -> None:
    first = made(tmp_path)
    answer(first)
    while first.loaded.engine.busy:
        first.loaded.engine.step()
    first.loaded.engine.scheduler.state.forget(everywhere=True)
    flush(first)
    again = made(tmp_path)
    assert answer(again)[1] == 0
    flush(again)


def test_write_behind_keeps_to_its_rate(tmp_path: Path) -> None:
    llm = made(tmp_path, kv_disk_rate="1MB")
    tier = tiers_of(llm).lower[0]
    page = llm.loaded.layout.frame_bytes
    now = 100.0
    started = 0
    for _ in range(1000):  # one second in steps of a millisecond
        now += 1e-3
        while tier.may_write(page, now, 1e9):
            tier.wrote(page)
            tier.writing = 0
            started += page
    assert 0.8e6 <= started <= 1.2e6
    flush(llm)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_disk": "many"}, "kv_disk='many' is not a size"),
        ({"kv_disk": "0"}, "is not a size"),
        ({"kv_disk": 5}, "must be a text such as '100GiB'"),
        ({"kv_host": "-1GiB"}, "kv_host='-1GiB' is not a size"),
        ({"kv_host": True}, "is not a size"),
        ({"kv_disk_rate": "fast"}, "kv_disk_rate='fast' is not a size"),
        ({"kv_disk_age": 0}, "must be a number of hours above 0"),
        ({"kv_disk": "1GiB", "prefix_cache": False}, "need the prefix cache"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StateConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_host": "1GiB"}, "kv_host has no use here: the state is in host memory already"),
        ({"kv_disk": "100B"}, "kv_disk is too small: a page takes .* give at least"),
    ],
)
def test_a_tier_that_cannot_be_made_is_refused(options: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, **options)
