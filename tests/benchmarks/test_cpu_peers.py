"""The harness that compares engines: alternating turns, failures as rows, and no process left running."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bankfull.bench.compare.rows import Bandwidth, Comparison, Reach, Row, Side
from bankfull.bench.compare.tables import notes, problems, ratio_table
from bankfull.limits.machine.ceilings import Ceilings
from benchmarks.cpu_peers import models, peers
from benchmarks.cpu_peers.__main__ import main
from benchmarks.cpu_peers.contenders import LoadedEngine
from benchmarks.cpu_peers.install import STAMP, CannotInstall, Recipe, install
from benchmarks.cpu_peers.llamacpp_build import Build
from benchmarks.cpu_peers.peers import ROOT, Place, Ready, Served, module
from benchmarks.cpu_peers.process import EngineFailed, EngineProcess
from benchmarks.cpu_peers.protocol import Prompts
from benchmarks.cpu_peers.reach import bandwidth_now, bytes_per_token
from benchmarks.cpu_peers.turns import Around, Pair
from benchmarks.cpu_peers.works import FOR_MODELS, FOR_SHAPES, WARM_UP_TOKENS, WORKS, FreshPrompts, Work, chosen
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
    """A worker that records its calls, and takes a second per token and per request."""

    def __init__(self) -> None:
        self.asked: list[tuple[Prompts, int]] = []

    def work(self, prompts: Prompts, new: int) -> float:
        self.asked.append((prompts, new))
        return 2.0 + new * len(prompts)


def test_decoding_is_timed_behind_the_first_token_prefill_up_to_it_and_batches_as_a_whole() -> None:
    fresh = FreshPrompts(100)
    worker = Recorder()
    assert TINY.rate(worker, TINY.turn(fresh).measured[0]) == 1.0  # 19 tokens in 22 - 3 seconds
    assert [new for _, new in worker.asked] == [20, 1]
    prefill = Work("p", "prefill", 30, 1)
    assert prefill.rate(worker, prefill.turn(fresh).measured[0]) == 10.0
    batch = Work("b", "output", 5, 7, 4)
    assert batch.rate(worker, batch.turn(fresh).measured[0]) == pytest.approx(28 / 30)
    assert len(worker.asked[-1][0]) == 4


def test_a_machine_too_busy_to_tell_one_token_from_many_is_an_error() -> None:
    class Erratic:
        def work(self, prompts: Prompts, new: int) -> float:
            return 1.0 / new

    with pytest.raises(EngineFailed, match="too busy"):
        TINY.rate(Erratic(), TINY.turn(FreshPrompts(9)).measured[0])


def test_no_prompt_comes_twice_and_a_seed_repeats_them_all() -> None:
    fresh, again = FreshPrompts(5000), FreshPrompts(5000)
    prompts = [tuple(p) for _ in range(20) for p in fresh.take(3, 16)]
    assert len(set(prompts)) == 60 and all(0 <= token < 5000 for p in prompts for token in p)
    assert [tuple(p) for _ in range(20) for p in again.take(3, 16)] == prompts


def test_a_ratio_above_one_means_that_we_are_better() -> None:
    assert Row("decode", "tokens/s", (30.0, 20.0), (10.0, 20.0)).ratios == (3.0, 1.0)
    assert Row("memory", "MiB", (100.0,), (300.0,), more_is_better=False).ratios == (3.0,)
    idle = Row("idle CPU", "%", (0.0,), (3.0,), more_is_better=False)
    assert idle.ratios == () and idle.as_json()["ratio"] is None and idle.spreads() is not None
    found = Row("decode", "", (1.0, 2.0, 6.0), (1.0, 1.0, 2.0)).spreads()
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
    pair = Pair(LoadedEngine(us), LoadedEngine(them), FreshPrompts(1000))  # type: ignore[arg-type]
    row = pair.compare(Work("b", "output", 8, 32, repetitions=2), 4, lambda line: None)
    assert row.problem is None and row.ours == (1.0,) * 4 == row.theirs
    measured = [(name, prompts) for name, prompts, new in asked if new == 32]
    assert [name for name, _ in measured] == ["us", "us", "them", "them", "them", "them", "us", "us"] * 2
    assert [new for _, _, new in asked[:2]] == [WARM_UP_TOKENS] * 2
    assert [new for _, _, new in asked[2:]] == [1, 32, 32] * 8  # every turn begins with a warm-up that is not timed
    turns = [asked[at : at + 3] for at in range(2, len(asked), 3)]
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        assert [prompts for _, prompts, _ in first] == [prompts for _, prompts, _ in second]
    assert len({str(prompts) for _, prompts, _ in asked}) == 4 * 3 + 2  # four pairs, and a warm-up of each engine


def test_a_turn_s_figure_is_the_median_of_its_repetitions() -> None:
    seconds = iter([9.0, 1.0, 4.0, 2.0])  # the first is the warm-up

    class Uneven:
        def work(self, prompts: Prompts, new: int) -> float:
            return next(seconds)

    work = Work("p", "prefill", 8, 1, repetitions=3)
    assert LoadedEngine(Uneven()).rate(work, work.turn(FreshPrompts(50))) == 8 / 2  # type: ignore[arg-type]


def test_a_peer_s_own_output_does_not_disturb_the_conversation(start) -> None:  # type: ignore[no-untyped-def]
    engine = start("chatty", "chatty")
    engine.load("any", 3)
    assert engine.name == "fake 1.0 with 3 threads"
    assert engine.work([[1, 2], [3]], 5) >= 0.005


@pytest.mark.parametrize(
    ("habit", "says"), [("broken", "not to my taste"), ("dies", "exited with code 7"), ("short", "instead of 1 x 4")]
)
def test_errors_of_a_peer_are_reported_in_one_sentence(start, habit: str, says: str) -> None:  # type: ignore[no-untyped-def]
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


def test_a_helper_that_left_the_process_group_sleeps_and_wakes_with_its_engine(start) -> None:  # type: ignore[no-untyped-def]
    engine = start("helped", "helped")
    engine.load("m", 1)
    groups = {member.group for member in engine.family()}
    assert len(groups) == 2
    engine.sleep()
    assert _settles(lambda: {member.state for member in engine.family()} == {"T"})
    before = engine.cpu_seconds()
    time.sleep(0.2)
    assert engine.cpu_seconds() == before
    engine.wake()
    assert _settles(lambda: engine.cpu_seconds() > before)  # the helper spins


def _settles(true: Callable[[], bool]) -> bool:
    """Waits for a condition: signals are delivered asynchronously."""
    for _ in range(100):
        if true():
            return True
        time.sleep(0.05)
    return False


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
        with pytest.raises(EngineFailed, match="did not reply"):
            engine.work([[1]], 1000)
        engine._timeout = 30
        with pytest.raises(EngineFailed, match="exited with code -9"):
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


def test_a_failed_installation_is_reported_and_retried(tmp_path: Path) -> None:
    recipe = Recipe("nothing", (str(tmp_path / "no-such-package"),), ("--no-index",))
    with pytest.raises(CannotInstall, match=r"nothing could not be installed: .*no-such-package"):
        install(recipe, tmp_path)
    assert (tmp_path / "envs" / "nothing" / "bin" / "python").exists()
    assert not (tmp_path / "envs" / "nothing" / STAMP).exists()


def test_works_are_chosen_by_name() -> None:
    assert [work.name for work in chosen("decode,batch64")] == ["decode", "batch64"]
    with pytest.raises(ValueError, match="prefill2048"):
        list(chosen("decode,sleep"))
    assert {work.name for work in (*chosen(FOR_MODELS), *chosen(FOR_SHAPES))} == set(WORKS)


def test_one_command_compares_us_with_every_peer_and_drops_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKS, "tiny", Work("tiny", "decode", 8, 200))  # longer than the noise of a busy machine
    monkeypatch.setattr("benchmarks.cpu_peers.__main__.STARTS", 1)
    monkeypatch.setattr("benchmarks.cpu_peers.__main__.bandwidth_now", lambda working_set: Bandwidth(5e9, 6e9))
    monkeypatch.setattr("benchmarks.cpu_peers.__main__.measure", _ceilings)
    monkeypatch.setattr(Pair.side_rows, "__defaults__", (0.1,))
    monkeypatch.setattr("benchmarks.cpu_peers.contenders.AFTERGLOW", 0.0)
    narrow = tmp_path / "narrow"

    def missing(place: Place) -> Ready:
        raise CannotInstall("the compiler is on holiday")

    def there(place: Place) -> Ready:
        return Ready(Served(fake()), narrow, place.model)

    def dying(place: Place) -> Ready:
        return Ready(Served(fake("dies")), place.model, place.model)

    raw, model = tmp_path / "raw.json", speaking_folder()
    code = main(
        [
            "--model",
            str(model),
            "--peers",
            "there,missing,dying",
            "--work",
            "tiny",
            "--pairs",
            "2",
            "--threads",
            "1,2",
            "--folder",
            str(tmp_path),
            "--json",
            str(raw),
        ],
        {"there": there, "missing": missing, "dying": dying},
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert code == 0, shown
    runs = json.loads(raw.read_text())["runs"]
    assert [run["threads"] for run in runs] == [1, 2]
    assert "fake 1.0 with 2 threads" in runs[1]["comparisons"][0]["theirs"]["engine"]
    found = {made["peer"]: made for made in runs[0]["comparisons"]}
    assert set(found) == {"there", "missing", "dying"}
    rows = {(peer, row["work"]): row for peer, made in found.items() for row in made["rows"]}
    assert set(rows) == {(p, w) for p in found for w in ("tiny", "start to first token", "resident memory", "idle CPU")}
    assert found["there"]["theirs"] == {"engine": "fake 1.0 with 1 threads", "file": "narrow"}
    assert found["there"]["ours"]["file"] == model.name and found["there"]["ours"]["engine"].startswith("bankfull ")
    assert f"on {model.name} against fake 1.0 with 1 threads on narrow, 1 threads" in shown
    tiny = rows["there", "tiny"]
    assert len(tiny["ours"]) == len(tiny["theirs"]) == len(tiny["ratios"]) == 2
    assert all(rate > 0 for rate in tiny["ours"])
    assert tiny["theirs"][0] < 1100  # at least a millisecond per token
    needed, percent = tiny["reach"]["bytes_per_token"], tiny["reach"]["percent"]
    assert needed > 0 and percent == pytest.approx([100 * needed * rate / 5e9 for rate in tiny["ours"]])
    assert "on holiday" in rows["missing", "tiny"]["problem"]
    reason = "not measured: tiny, start to first token, resident memory, idle CPU: the compiler is on holiday"
    assert shown.count("on holiday") == len(runs) and reason in shown
    assert "code 7" in rows["dying", "idle CPU"]["problem"]
    assert rows["there", "start to first token"]["ours"][0] > 0


def _ceilings(refresh: bool) -> Ceilings:
    return Ceilings(5e9, 9e9, {"float32": 1e11}, 1, "any", "now", 1 << 30, 1 << 26, 0)


@pytest.mark.parametrize(
    "bad",
    [
        ["--peers", "unknown"],
        ["--work", "sleep"],
        ["--pairs", "0"],
        ["--model", "/no/such"],
        ["--shape", "square"],
        ["--threads", "0"],
        ["--threads", "1,two"],
    ],
)
def test_bad_input_is_refused_in_one_line(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bad) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("cpu_peers: ") and err.count("\n") == 1


def test_a_busy_machine_is_reported_below_the_table() -> None:
    quiet = Row("decode", "tokens/s", (1.0,), (1.0,), others=0.01)
    busy = Row("decode", "tokens/s", (1.0,), (1.0,), others=0.9)
    assert not any("approximate" in line for line in notes([quiet], None))
    assert any("0.90 cores" in line and "approximate" in line for line in notes([quiet, busy], None))


def test_a_table_names_both_files_and_shows_the_share_of_bandwidth_where_it_is_known() -> None:
    us, them = Side("bankfull 1", "a.gguf"), Side("peer 2", "a.gguf")
    plain = Row("prefill512", "tokens/s", (1.0, 3.0), (1.0, 1.0))
    assert ratio_table(Comparison("peer", us, them, [plain]), 2).columns[-1].header == "busy elsewhere"
    reach = Reach(1e9, (Bandwidth(40e9, 50e9), Bandwidth(20e9, 40e9), Bandwidth(40e9, 48e9)))
    decode = Row("decode", "tokens/s", (20.0, 16.0, 24.0), (10.0, 8.0, 12.0), reach=reach)
    failed = Row("batch8", "tokens/s", problem="it ended", reach=reach)
    both = Comparison("peer", us, them, [plain, decode, failed])
    table = ratio_table(both, 2)
    assert str(table.title) == "bankfull 1 against peer 2, both on a.gguf, 2 threads"
    cells = [list(column.cells) for column in table.columns]
    headings = [column.header for column in table.columns]
    assert headings[-4:] == ["we read", "read bandwidth", "% of it", "% of its best moment"]
    shares = [["", "60% (55 .. 70)", ""], ["", "40% (40 .. 45)", ""]]
    assert cells[-4:] == [["", "20 GB/s", ""], ["", "40 GB/s", ""], *shares]
    assert cells[1] == ["2.00x", "2.00x", "not measured"]
    assert problems(both) == ["not measured: batch8: it ended"]
    other = Comparison("peer", us, Side("peer 2", "b"), [plain])
    assert other.title == "bankfull 1 on a.gguf against peer 2 on b"


def test_bandwidth_is_looked_at_before_a_turn_of_ours_and_after() -> None:
    looks = iter([Bandwidth(3.0, 4.0), Bandwidth(5.0, 8.0), Bandwidth(7.0, 9.0), Bandwidth(2.0, 3.0)])
    found = list[Bandwidth]()
    around = Around(lambda: next(looks), found)
    for _ in range(2):
        with around:
            pass
    assert found == [Bandwidth(4.0, 8.0), Bandwidth(4.5, 9.0)]


def test_sustained_bandwidth_is_at_most_the_best() -> None:
    found = bandwidth_now(8e6)
    assert 0 < found.kept_up <= found.best


def test_a_token_s_bytes_are_those_of_the_weights_and_the_cache_at_mid_work() -> None:
    model = speaking_folder()
    short, long = (bytes_per_token(model, Work("d", "decode", length, 20)) for length in (10, 110))
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert 0.5 * weights < short < long


def test_llama_cpp_is_told_apart_from_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(CannotInstall, match=r"\.gguf files only"):
        models.gguf_only(tmp_path)
    assert module("py", "engine_x") == ["py", "-m", "benchmarks.cpu_peers.engine_x"]


def test_both_engines_run_the_same_file_but_where_the_peer_cannot_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "env" / "bin" / "python"
    monkeypatch.setattr(peers, "install", lambda recipe, folder: python)
    monkeypatch.setattr(peers.llamacpp_build, "builds", lambda asked, folder: [Build("llama.cpp", "", tmp_path)])
    stored, place = tmp_path / "models" / "m.Q4_0.gguf", Place(tmp_path / "m.gguf", tmp_path, 2)
    wide = tmp_path / "models" / "m.bf16"
    wide.mkdir(parents=True)
    stored.touch()  # written earlier
    as_it_is, requantized, widened = peers.llamacpp(place), peers.llamacpp_q4_0(place), peers.vllm(place)
    assert as_it_is.model == as_it_is.our_model == place.model
    assert requantized.model == requantized.our_model == stored
    assert (widened.model, widened.our_model) == (wide, place.model)
    assert isinstance(widened.peer, Served) and widened.peer.variables == {}
    library = tmp_path / "env" / "lib"
    for better in ("python3.11/site-packages/torch/lib/libgomp.so.1", "libiomp5.so"):
        (library / better).parent.mkdir(parents=True, exist_ok=True)
        (library / better).touch()
        found = peers.vllm(place).peer
        assert isinstance(found, Served) and found.variables == {"LD_PRELOAD": str(library / better)}
        assert found.own_tool is not None and found.own_tool.preloaded == found.variables
