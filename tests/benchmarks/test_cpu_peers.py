"""The harness that compares engines: fair turns, honest rows, and nothing left running."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cpu_peers import models
from benchmarks.cpu_peers.__main__ import main
from benchmarks.cpu_peers.install import STAMP, CannotInstall, Recipe, install
from benchmarks.cpu_peers.peers import ROOT, Place, Ready, module
from benchmarks.cpu_peers.process import EngineFailed, EngineProcess
from benchmarks.cpu_peers.protocol import Prompts
from benchmarks.cpu_peers.table import notes, ratio_table
from benchmarks.cpu_peers.turns import Pair, Row
from benchmarks.cpu_peers.works import WORKS, FreshPrompts, Work, chosen
from tests.tiny import speaking_folder

TINY = Work("tiny", "decode", 4, 20)


def fake(*habit: str) -> list[str]:
    return [sys.executable, "-m", "tests.benchmarks.fake_peer", *habit]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    started: list[EngineProcess] = []

    def begin(label: str = "fake", *habit: str) -> EngineProcess:
        started.append(EngineProcess(label, fake(*habit), tmp_path / f"{label}.err", folder=ROOT, timeout=60))
        return started[-1]

    yield begin
    for engine in started:
        engine.quit()
        assert engine._process.returncode is not None


class Recorder:
    """A worker that notes what it is asked, and takes a second per token and per request."""

    def __init__(self) -> None:
        self.asked: list[tuple[Prompts, int]] = []

    def work(self, prompts: Prompts, new: int) -> float:
        self.asked.append((prompts, new))
        return 2.0 + new * len(prompts)


def test_decoding_is_timed_behind_the_first_token_prefill_up_to_it_and_batches_as_a_whole() -> None:
    fresh = FreshPrompts(100)
    worker = Recorder()
    assert TINY.rate(worker, TINY.prompts(fresh)) == 1.0  # 19 tokens in 22 - 3 seconds
    assert [new for _, new in worker.asked] == [20, 1]
    prefill = Work("p", "prefill", 30, 1)
    assert prefill.rate(worker, prefill.prompts(fresh)) == 10.0
    batch = Work("b", "output", 5, 7, 4)
    assert batch.rate(worker, batch.prompts(fresh)) == pytest.approx(28 / 30)
    assert len(worker.asked[-1][0]) == 4


def test_a_machine_too_busy_to_tell_one_token_from_many_is_an_error() -> None:
    class Erratic:
        def work(self, prompts: Prompts, new: int) -> float:
            return 1.0 / new

    with pytest.raises(EngineFailed, match="too busy"):
        TINY.rate(Erratic(), TINY.prompts(FreshPrompts(9)))


def test_no_prompt_comes_twice_and_a_seed_repeats_them_all() -> None:
    fresh, again = FreshPrompts(5000), FreshPrompts(5000)
    prompts = [tuple(p) for _ in range(20) for p in fresh.take(3, 16)]
    assert len(set(prompts)) == 60 and all(0 <= token < 5000 for p in prompts for token in p)
    assert [tuple(p) for _ in range(20) for p in again.take(3, 16)] == prompts


def test_a_ratio_above_one_means_that_we_are_better() -> None:
    assert Row("decode", "p", "tokens/s", (30.0, 20.0), (10.0, 20.0)).ratios == (3.0, 1.0)
    assert Row("memory", "p", "MiB", (100.0,), (300.0,), more_is_better=False).ratios == (3.0,)
    idle = Row("idle CPU", "p", "%", (0.0,), (3.0,), more_is_better=False)
    assert idle.ratios == () and idle.as_json()["ratio"] is None and idle.spreads() is not None
    found = Row("decode", "p", "", (1.0, 2.0, 6.0), (1.0, 1.0, 2.0)).spreads()
    assert found is not None and found[0] is not None
    assert (found[0].median, found[0].lower, found[0].upper) == (2.0, 1.5, 2.5)


def test_engines_get_the_same_prompts_in_turn_and_each_begins_every_other_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Prompts, int]] = []

    class Listening:
        def __init__(self, name: str) -> None:
            self.name, self.awake = name, False

        def wake(self) -> None:
            self.awake = True

        def sleep(self) -> None:
            self.awake = False

        def cpu_seconds(self) -> float:
            return 0.0

        def work(self, prompts: Prompts, new: int) -> float:
            assert self.awake and not other[self.name].awake
            asked.append((self.name, prompts, new))
            return float(new)

    us, them = Listening("us"), Listening("them")
    other = {"us": them, "them": us}
    row = Pair(us, them, FreshPrompts(1000)).compare(Work("b", "output", 8, 32), 4, lambda line: None)  # type: ignore[arg-type]
    assert row.problem is None and row.ours == (1.0,) * 4 == row.theirs
    measured = [(name, prompts) for name, prompts, new in asked if new == 32]
    assert [name for name, _ in measured] == ["us", "them", "them", "us"] * 2
    for first, second in zip(measured[::2], measured[1::2], strict=True):
        assert first[1] == second[1]
    assert len({str(prompts) for _, prompts, _ in asked}) == 4 + 2  # four pairs, and a warm-up of each


def test_a_peer_s_own_output_does_not_disturb_the_conversation(start) -> None:  # type: ignore[no-untyped-def]
    engine = start("chatty", "chatty")
    engine.load("any", 3)
    assert engine.name == "fake 1.0 with 3 threads"
    assert engine.work([[1, 2], [3]], 5) >= 0.005


@pytest.mark.parametrize(
    ("habit", "says"), [("broken", "not to my taste"), ("dies", "ended with code 7"), ("short", "instead of 1 x 4")]
)
def test_what_a_peer_does_wrong_is_said_in_one_sentence(start, habit: str, says: str) -> None:  # type: ignore[no-untyped-def]
    engine = start(habit, habit)
    with pytest.raises(EngineFailed, match=says):
        engine.load("m", 1)
        engine.work([[1]], 4)


def test_a_sleeping_engine_computes_nothing_and_wakes_where_it_was(start) -> None:  # type: ignore[no-untyped-def]
    engine = start()
    engine.load("m", 1)
    engine.sleep()
    before = engine.cpu_seconds()
    time.sleep(0.2)
    assert engine.cpu_seconds() == before
    assert engine.resident_bytes() > 1 << 20
    engine.wake()
    assert engine.work([[1]], 2) > 0


def test_a_stopped_engine_can_be_told_to_quit(start) -> None:  # type: ignore[no-untyped-def]
    engine = start()
    engine.load("m", 1)
    engine.sleep()
    engine.quit()
    assert engine._process.returncode == 0


def test_an_engine_that_answers_too_late_is_not_asked_again(tmp_path: Path) -> None:
    engine = EngineProcess("slow", fake(), tmp_path / "slow.err", folder=ROOT, timeout=30)
    try:
        engine.load("m", 1)
        engine._timeout = 0.05
        with pytest.raises(EngineFailed, match="no answer"):
            engine.work([[1]], 1000)
        engine._timeout = 30
        with pytest.raises(EngineFailed, match="ended with code -9"):
            engine.work([[1]], 1)
    finally:
        engine.quit()


def test_a_stopped_engine_ends_with_the_harness(tmp_path: Path) -> None:
    harness = (
        "import os, pathlib\n"
        "from benchmarks.cpu_peers.process import EngineProcess\n"
        f"engine = EngineProcess('fake', {fake()!r}, pathlib.Path({str(tmp_path / 'e')!r}))\n"
        "engine.load('m', 1)\n"
        "engine.sleep()\n"
        "print(engine._group, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", harness], cwd=ROOT, capture_output=True, text=True, check=False)
    engine = Path("/proc") / done.stdout.strip()
    assert done.returncode == -9 and done.stdout.strip()
    for _ in range(100):
        if not engine.exists() or (engine / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"{engine} is still there")


def test_what_cannot_be_installed_says_why_and_is_not_taken_for_installed_later(tmp_path: Path) -> None:
    recipe = Recipe("nothing", (str(tmp_path / "no-such-package"),), ("--no-index",))
    with pytest.raises(CannotInstall, match=r"nothing could not be installed: .*no-such-package"):
        install(recipe, tmp_path)
    assert (tmp_path / "envs" / "nothing" / "bin" / "python").exists()
    assert not (tmp_path / "envs" / "nothing" / STAMP).exists()


def test_works_are_chosen_by_name() -> None:
    assert [work.name for work in chosen("decode,batch64")] == ["decode", "batch64"]
    with pytest.raises(ValueError, match="prefill2048"):
        list(chosen("decode,sleep"))


def test_one_command_compares_us_with_every_peer_and_drops_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKS, "tiny", Work("tiny", "decode", 8, 12))
    monkeypatch.setattr("benchmarks.cpu_peers.__main__.STARTS", 1)
    monkeypatch.setattr(Pair.side_rows, "__defaults__", (0.1,))

    def missing(place: Place) -> Ready:
        raise CannotInstall("the compiler is on holiday")

    def there(place: Place) -> Ready:
        return Ready(fake(), place.model, place.model)

    def dying(place: Place) -> Ready:
        return Ready(fake("dies"), place.model, place.model)

    raw = tmp_path / "raw.json"
    code = main(
        ["--model", str(speaking_folder()), "--peers", "there,missing,dying", "--work", "tiny", "--pairs", "2",
         "--threads", "1", "--folder", str(tmp_path), "--no-ceilings", "--json", str(raw)],
        {"there": there, "missing": missing, "dying": dying},
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert code == 0, shown
    rows = {(row["peer"], row["work"]): row for row in json.loads(raw.read_text())["rows"]}
    works = ("tiny", "start to first token", "resident memory", "idle CPU")
    assert set(rows) == {(p, w) for p in ("fake 1.0 with 1 threads", "missing", "dying") for w in works}
    tiny = rows["fake 1.0 with 1 threads", "tiny"]
    assert len(tiny["ours"]) == len(tiny["theirs"]) == 2 and all(rate > 0 for rate in tiny["ours"])
    assert tiny["theirs"][0] < 1100  # a millisecond per token, at the least
    assert "on holiday" in rows["missing", "tiny"]["problem"] and "not measured: the compiler is on holiday" in shown
    assert "code 7" in rows["dying", "idle CPU"]["problem"]
    assert rows["fake 1.0 with 1 threads", "start to first token"]["ours"][0] > 0


@pytest.mark.parametrize("bad", [["--peers", "nobody"], ["--work", "sleep"], ["--pairs", "0"], ["--model", "/no/such"]])
def test_bad_input_is_refused_in_one_line(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bad) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("cpu_peers: ") and err.count("\n") == 1


def test_a_busy_machine_is_admitted_below_the_table() -> None:
    quiet = Row("decode", "p", "tokens/s", (1.0,), (1.0,), others=0.01)
    busy = Row("decode", "p", "tokens/s", (1.0,), (1.0,), others=0.9)
    assert not any("rough" in line for line in notes([quiet], None))
    assert any("0.90 cores" in line and "rough" in line for line in notes([quiet, busy], None))
    assert ratio_table([quiet, busy], "t").row_count == 2


def test_llama_cpp_is_told_apart_from_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(CannotInstall, match=r"\.gguf files only"):
        models.gguf_only(tmp_path)
    assert module("py", "engine_x") == ["py", "-m", "benchmarks.cpu_peers.engine_x"]
