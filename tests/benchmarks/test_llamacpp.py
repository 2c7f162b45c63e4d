"""llama.cpp in the harness: its own tools, the best setting, and reported failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bankfull.bench.compare.processes import ProcessGroup
from benchmarks.cpu_peers import fairness, install, llamacpp_build, llamacpp_package, models, tool
from benchmarks.cpu_peers.__main__ import main
from benchmarks.cpu_peers.compare import Measuring
from benchmarks.cpu_peers.fairness import Fairness, fairness_table
from benchmarks.cpu_peers.install import STAMP, CannotInstall
from benchmarks.cpu_peers.llamacpp import ROUNDS, LlamaCpp
from benchmarks.cpu_peers.llamacpp_build import QUANTIZE, TOOLS, Asked, Build, builds
from benchmarks.cpu_peers.peers import Place, Ready, Served
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.vllm_bench import VllmBench
from benchmarks.cpu_peers.works import WORKS, FreshPrompts, Work
from tests.tiny import speaking_folder

FAKE = Path(__file__).with_name("fake_llamacpp.py")
FRESH = FreshPrompts(100)
DECODE, PREFILL = Work("d", "decode", 32, 128, repetitions=3), Work("p", "prefill", 512, 1)
BATCH = Work("b", "output", 128, 128, 8)


def programs(folder: Path, *habits: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOOLS:
        (folder / name).write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
        (folder / name).chmod(0o755)
    for habit in habits:
        (folder / habit).touch()
    return folder


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def engine(tmp_path: Path, *folders: Path) -> LlamaCpp:
    made = [Build("llama.cpp", folder.name, folder) for folder in folders or (programs(tmp_path / "bin"),)]
    return LlamaCpp(made, tmp_path / "m.gguf", 3, tmp_path / "log")


def option(call: list[str], name: str) -> str:
    return call[call.index(name) + 1]


def test_one_stream_is_timed_by_llama_bench_behind_the_same_context(tmp_path: Path) -> None:
    peer = engine(tmp_path)
    peer.get_ready(DECODE, FRESH)
    assert peer.rate(DECODE, DECODE.turn(FRESH)) == 200.0  # the median, not the mean
    call = calls(tmp_path / "bin")[-1]
    assert call[0] == "llama-bench" and option(call, "-t") == "3" and option(call, "-m") == str(tmp_path / "m.gguf")
    # The first of 128 tokens after 32 comes with the prompt.
    assert [option(call, name) for name in ("-p", "-n", "-d", "-r")] == ["0", "127", "32", "3"]
    peer.get_ready(PREFILL, FRESH)
    peer.rate(PREFILL, PREFILL.turn(FRESH))
    call = calls(tmp_path / "bin")[-1]
    assert [option(call, name) for name in ("-p", "-n", "-r")] == ["512", "0", "1"] and "-d" not in call


def test_batches_are_timed_by_llama_batched_bench_as_a_whole(tmp_path: Path) -> None:
    peer = engine(tmp_path)
    peer.get_ready(BATCH, FRESH)
    assert peer.rate(BATCH, BATCH.turn(FRESH)) == 8 * 128 / 1.0  # two seconds, and half of that without flash attention
    call = calls(tmp_path / "bin")[-1]
    assert call[0] == "llama-batched-bench" and option(call, "-c") == str(8 * 256)
    assert [option(call, name) for name in ("-npp", "-ntg", "-npl", "-t", "-tb")] == ["128", "127", "8", "3", "3"]


def test_decoding_of_several_streams_is_timed_without_their_prompts(tmp_path: Path) -> None:
    peer, work = engine(tmp_path), Work("several", "decode", 32, 64, 8)
    peer.get_ready(work, FRESH)
    assert peer.rate(work, work.turn(FRESH)) == 100.0  # of all streams together, without flash attention
    call = calls(tmp_path / "bin")[-1]
    assert call[0] == "llama-batched-bench"
    assert [option(call, name) for name in ("-npp", "-ntg", "-npl")] == ["32", "63", "8"]


def test_attention_and_build_are_whichever_was_faster(tmp_path: Path) -> None:
    slow, fast = programs(tmp_path / "slow"), programs(tmp_path / "quick", "fast")
    peer = engine(tmp_path, slow, fast)
    peer.get_ready(DECODE, FRESH)
    for folder in (slow, fast):
        assert [option(call, "-fa") for call in calls(folder)] == ["on", "off"] * ROUNDS
    assert peer.rate(DECODE, DECODE.turn(FRESH)) == 2000.0
    assert peer.settings == {"d": "flash attention off, quick"}
    assert len(calls(slow)) == 2 * ROUNDS and option(calls(fast)[-1], "-fa") == "off"


def test_nothing_stays_that_could_idle_and_what_it_used_is_counted(tmp_path: Path) -> None:
    peer = engine(tmp_path)
    assert peer.idle_percent(1.0) is None and peer.cpu_seconds() == 0
    assert peer.seconds_to_first_token() > 0 and "--no-warmup" in calls(tmp_path / "bin")[-1]
    assert peer.resident_bytes(FRESH) > 1 << 20
    assert peer.cpu_seconds() > 0


def test_errors_of_a_tool_are_reported_in_one_sentence(tmp_path: Path) -> None:
    peer = engine(tmp_path, programs(tmp_path / "bin", "broken"))
    with pytest.raises(EngineFailed, match=r"llama-bench exited with code 1: the model is not to my taste"):
        peer.get_ready(DECODE, FRESH)
    for name in TOOLS:
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho hello\n")
    for work in (DECODE, BATCH):
        with pytest.raises(EngineFailed, match="printed no figures: 'hello'"):
            peer.get_ready(work, FRESH)
    with pytest.raises(EngineFailed, match="could not be started"):
        engine(tmp_path, tmp_path / "nowhere").get_ready(DECODE, FRESH)


def test_what_this_engine_sets_for_itself_does_not_reach_the_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that sleep at every barrier cost llama.cpp a quarter to a third of its speed."""
    show = [sys.executable, "-c", "import os; print(os.environ.get('OMP_WAIT_POLICY'), os.environ['MARK'])"]

    def seen() -> str:
        return tool.run_to_end(show, tmp_path / "log", 60.0, {"MARK": "1"}).said.strip()

    monkeypatch.setattr("bankfull.bench.compare.processes.SET_HERE", {"OMP_WAIT_POLICY": "passive"})
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert seen() == "None 1"
    with subprocess.Popen(
        [sys.executable, "-c", "import bankfull, os; print(bankfull.SET_HERE)"], stdout=subprocess.PIPE, text=True
    ) as given:
        assert given.communicate()[0].strip() == "{}"  # the user's own settings are kept
    monkeypatch.setattr("bankfull.bench.compare.processes.SET_HERE", {})
    assert seen() == "passive 1"
    group = ProcessGroup(show, variables={"MARK": "2"}, stdout=subprocess.PIPE, text=True)
    assert group.process.communicate()[0].strip() == "passive 2"


def test_a_tool_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="took longer than 0 s"):
        tool.run_to_end(["sleep", "60"], tmp_path / "log", 0.1)


def test_a_file_is_stored_in_another_type_by_the_peer_s_own_quantizer(tmp_path: Path) -> None:
    model, folder = tmp_path / "m.gguf", programs(tmp_path / "bin")
    for _ in range(2):
        made = models.requantized(model, tmp_path, str(folder / QUANTIZE), "Q4_0")
        assert made == tmp_path / "models" / "m.Q4_0.gguf" and made.read_text() == "Q4_0"
    assert len(calls(folder)) == 1 and "--allow-requantize" in calls(folder)[0]
    programs(folder, "broken")
    with pytest.raises(CannotInstall, match=r"m.gguf could not be stored as Q8_0: the model is not to my taste"):
        models.requantized(model, tmp_path, str(folder / QUANTIZE), "Q8_0")


def test_given_programs_are_taken_as_they_are(tmp_path: Path) -> None:
    one, other = programs(tmp_path / "one"), programs(tmp_path / "other")
    assert [build.programs for build in builds(Asked((one, other)), tmp_path)] == [one, other]
    assert len({build.variant for build in builds(Asked((one, other)), tmp_path)}) == 2
    (one / "llama-bench").unlink()
    with pytest.raises(CannotInstall, match=r"one has no llama-bench"):
        builds(Asked((one,)), tmp_path)


def test_a_given_source_is_built_once_and_again_when_the_options_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run_steps(name: str, steps: list[list[str]], log: Path) -> None:
        ran.extend(steps)

    monkeypatch.setattr(llamacpp_build, "run_steps", run_steps)
    source, kernels = tmp_path / "source", tmp_path / "kleidiai"
    with pytest.raises(CannotInstall, match=r"is not a source tree of llama\.cpp"):
        builds(Asked(source=source), tmp_path)
    (source / "tools" / "llama-bench").mkdir(parents=True)
    for _ in range(2):
        assert [build.programs for build in builds(Asked(source=source), tmp_path)] == [tmp_path / "llamacpp/build/bin"]
    assert len(ran) == 2 and "-DGGML_NATIVE=ON" in ran[0] and set(TOOLS) <= set(ran[1])
    with pytest.raises(CannotInstall, match="is not a source tree of KleidiAI"):
        builds(Asked(source=source, kleidiai=kernels), tmp_path)
    kernels.mkdir()
    (kernels / "CMakeLists.txt").touch()
    both = builds(Asked(source=source, kleidiai=kernels), tmp_path)
    assert [build.variant for build in both] == ["without KleidiAI", "with KleidiAI"]
    assert len(ran) == 4 and f"-DFETCHCONTENT_SOURCE_DIR_KLEIDIAI={kernels}" in ran[2]
    monkeypatch.setattr(llamacpp_build, "OPTIONS", ("-DGGML_NATIVE=OFF",))
    builds(Asked(source=source), tmp_path)
    assert len(ran) == 6


def test_a_build_that_fails_says_why_and_is_not_taken_for_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    (source / "tools" / "llama-bench").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(programs(tmp_path / "empty")))
    with pytest.raises(CannotInstall, match="cmake is not on this machine"):
        builds(Asked(source=source), tmp_path)
    (tmp_path / "empty" / "cmake").write_text("#!/bin/sh\necho 'error: no such compiler'\nexit 1\n")
    (tmp_path / "empty" / "cmake").chmod(0o755)
    with pytest.raises(CannotInstall, match="no such compiler"):
        builds(Asked(source=source), tmp_path)
    assert not (tmp_path / "llamacpp" / "build" / STAMP).exists()


def test_the_package_of_the_tests_is_the_release_of_the_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path))
    ran: list[list[str]] = []

    def run_steps(name: str, steps: list[list[str]], log: Path, variables: dict[str, str]) -> None:
        ran.extend(steps)
        assert log == tmp_path / "cpu_peers" / "llamacpp-package.log" and "-DGGML_NATIVE=ON" in variables["CMAKE_ARGS"]
        python = llamacpp_package.environment(llamacpp_package.recipe(), tmp_path / "cpu_peers")
        python.parent.mkdir(parents=True)
        python.touch()

    monkeypatch.setattr(install, "run_steps", run_steps)
    assert llamacpp_package.installed() is None
    for _ in range(2):  # once is enough
        assert llamacpp_package.main() == 0
    said = capsys.readouterr()
    python = llamacpp_package.installed()
    assert said.out.split() == [str(python)] * 2 and said.err.count("compiling") == 1 and len(ran) == 2
    assert f"{llamacpp_build.PACKAGE}=={llamacpp_build.VERSION}" in ran[1] and "--no-binary" in ran[1]

    def fails(*arguments: object) -> None:
        raise CannotInstall("llamacpp-package could not be installed: no compiler")

    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(install, "run_steps", fails)
    assert llamacpp_package.main() == 1 and "no compiler" in capsys.readouterr().err


def test_fairness_is_the_ratio_of_a_turn_here_to_the_peer_s_own_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A prefill: a difference of two times, as for decoding, can be negative for a tiny model on a busy machine.
    monkeypatch.setitem(WORKS, "tiny", Work("tiny", "prefill", 8, 1))
    folder, raw = programs(tmp_path / "bin"), tmp_path / "raw.json"

    def peer(place: Place) -> Ready:
        tools = LlamaCpp(builds(place.llamacpp, tmp_path), place.model, place.threads, tmp_path / "e")
        return Ready(tools, place.model, place.model)

    code = main(
        [
            "--check-fairness",
            "--model",
            str(speaking_folder()),
            "--peers",
            "fake",
            "--work",
            "tiny",
            "--pairs",
            "2",
            "--threads",
            "1",
            "--folder",
            str(tmp_path),
            "--json",
            str(raw),
            "--llamacpp-bin",
            str(folder),
        ],
        {"fake": peer},
    )
    row = json.loads(raw.read_text())["runs"][0]["fairness"][0]
    # In the harness with the faster attention; by itself with the tool's default.
    assert code == 0 and row["fair"] and (row["harness"], row["own_tool"]) == ([200.0] * 2, [100.0] * 2)
    assert row["ratios"] == [2.0, 2.0] and "2.00x" in capsys.readouterr().out
    assert "-r" not in next(call for call in calls(folder) if option(call, "-fa") == "auto")


def test_a_peer_that_gets_less_than_its_own_tool_gives_is_unfair() -> None:
    short = Fairness("p", 2, "decode", (94.0, 90.0, 99.0), (100.0, 100.0, 100.0))
    enough = Fairness("p", 2, "decode", (96.0, 90.0, 99.0), (100.0, 100.0, 100.0))
    failed = Fairness("p", 2, "decode", problem="it ended")
    assert [row.fair for row in (short, enough, failed)] == [False, True, False]
    cells = list(fairness_table([short, enough, failed]).columns[3].cells)
    assert cells == ["0.94x, below 0.95x", "0.96x", "not measured"]


def test_an_unavailable_peer_is_a_row_of_the_check() -> None:
    def missing(place: Place) -> Ready:
        raise CannotInstall("the compiler is on holiday")

    how = Measuring([DECODE, BATCH], 1, lambda model: 1.0, None, lambda line: None)
    rows = fairness.check("missing", missing, Place(Path("m"), Path("f"), 1), how)
    assert [(row.work, row.problem) for row in rows] == [(n, "the compiler is on holiday") for n in ("d", "b")]


def test_vllm_s_own_tool_is_asked_for_the_same_lengths(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "found = sys.argv[sys.argv.index('--output-json') + 1]\n"
        "assert os.environ['VLLM_CPU_OMP_THREADS_BIND'] and os.environ['MARK'] == '1'\n"
        "json.dump({'latencies': [4.0, 2.0, 9.0]}, open(found, 'w'))\n"
    )
    program.chmod(0o755)
    bench = VllmBench(program, tmp_path / "m", 1, tmp_path / "log", {"MARK": "1"})
    assert bench.rate(BATCH) == 8 * 128 / 4.0
    command = bench.command(BATCH, tmp_path / "found")
    assert command[1:3] == ["bench", "latency"] and option(command, "--dtype") == "bfloat16"
    assert [option(command, f"--{n}") for n in ("input-len", "output-len", "batch-size")] == ["128", "128", "8"]
    program.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(EngineFailed, match="wrote no latencies"):
        bench.rate(BATCH)


def test_an_engine_without_a_tool_of_its_own_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="no tool of its own"):
        fairness._own_tool(Ready(Served(["none"]), tmp_path, tmp_path), DECODE)
