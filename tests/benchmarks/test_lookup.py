"""llama.cpp's prompt lookup beside ours: figures, settings, alternation and reported failures."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.cpu_peers import lookup
from benchmarks.cpu_peers.install import CannotInstall
from benchmarks.cpu_peers.llamacpp_build import LOOKUP, Asked, Build, lookup_build
from benchmarks.cpu_peers.lookup import DRAFTED, PLAIN, LlamaLookup, LookupPrompt, Pass, compare_set, parse_answer
from benchmarks.cpu_peers.process import EngineFailed
from tests.benchmarks.test_llamacpp import programs

SAID = """0.06.267.947 I encoded  149 tokens in    4.410 seconds, speed:   37.188 t/s
0.06.267.985 I decoded   17 tokens in    0.500 seconds, speed:   27.068 t/s
n_draft      = 8
n_predict    = 17
n_drafted    = 24
t_draft      = 0.10 ms, inf us per token, 0.00 tokens per second
n_accept     = 9
"""
FAKE = f"""#!{sys.executable}
import json, pathlib, sys
given = sys.argv[1:]
here = pathlib.Path(sys.argv[0]).parent
option = dict(zip(given, given[1:]))
text = pathlib.Path(option["-f"]).read_text()
with (here / "calls").open("a") as calls:
    print(json.dumps([*given, text]), file=calls)
width = int(option["--spec-draft-n-max"])
seconds = (1.0 if option["-fa"] == "off" else 2.0) / (1 + (width == 8))
print(f"encoded {{len(text) - 1}} tokens in 1.0 seconds", file=sys.stderr)
print(f"decoded {{int(option['-n']) + 1}} tokens in {{seconds}} seconds", file=sys.stderr)
print(f"n_drafted = {{width}}", file=sys.stderr)
print("n_accept = 1", file=sys.stderr)
"""


def peer(folder: Path) -> LlamaLookup:
    (folder / LOOKUP).write_text(FAKE)
    (folder / LOOKUP).chmod(0o755)
    return LlamaLookup(Build("llama.cpp", "", folder), Path("m.gguf"), 3, folder / "work")


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_its_figures_are_read() -> None:
    found = parse_answer(SAID, 149)
    # The first token's logits come with the prompt: 16 tokens in half a second.
    assert (found.tokens, found.seconds, found.drafted, found.accepted) == (16, 0.5, 24, 9) and found.rate == 32
    with pytest.raises(EngineFailed, match="149 tokens instead of 150"):
        parse_answer(SAID, 150)
    with pytest.raises(EngineFailed, match="printed no figures: unknown model"):
        parse_answer("unknown model", 3)


def test_it_runs_with_its_fastest_setting_on_the_same_prompt(tmp_path: Path) -> None:
    prompts = [LookupPrompt([1, 2, 3], "ab\n", 21), LookupPrompt([1, 2, 3, 4, 5], "abcd\n", 11)]
    made = peer(tmp_path)
    made.choose_settings(prompts)
    assert made.settings[PLAIN].attention == "off" and made.settings[DRAFTED].width == 8
    found = made.run(DRAFTED, prompts)
    assert found.tokens == 20 + 10 and found.seconds == 1.0 and found.accepted == 2
    last = calls(tmp_path)[-1]
    option = dict(itertools.pairwise(last))
    assert option["-m"] == "m.gguf" and option["-t"] == "3" and option["--temp"] == "0" and "--no-escape" in last
    assert last[-1] == "abcd\n\n", "it drops the last newline of a file"
    made.run(PLAIN, prompts)
    assert dict(itertools.pairwise(calls(tmp_path)[-1]))["--spec-draft-n-max"] == "0"


def test_both_run_in_turn_and_gains_are_over_their_own_plain_speed() -> None:
    order: list[str] = []

    def side(name: str, rates: dict[str, float]) -> lookup.Run:
        def run(kind: str, prompts: Sequence[LookupPrompt]) -> Pass:
            order.append(f"{name} {kind}")
            return Pass(int(rates[kind]), 1.0)

        return run

    ours, theirs = side("ours", {PLAIN: 100, DRAFTED: 300}), side("theirs", {PLAIN: 50, DRAFTED: 100})
    row = compare_set("quotes", [], ours, theirs, 2)
    first = ["ours plain", "ours with drafts", "theirs plain", "theirs with drafts"]
    assert order == [*first, *first[2:], *first[:2]]
    assert row.gain(row.ours) == 3 and row.gain(row.theirs) == 2
    assert row.gain_ratio == 1.5 and row.rate_ratio == 3
    told = row.as_json()
    assert told["ours_with_drafts"] == [300, 300] and told["gain_ratio"] == 1.5
    assert lookup.table_of([row], "llama.cpp", 2).row_count == 1


def test_what_is_missing_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotInstall, match="has no llama-lookup"):
        lookup_build(Asked((programs(tmp_path / "bin"),)), tmp_path)
    for wrong, reason in (
        (["--sets", "poems"], "prompt set 'poems' is unknown"),
        (["--pairs", "0"], "at least 1"),
        (["--llamacpp-bin", str(tmp_path / "none")], "has no llama-bench"),
    ):
        assert lookup.main(wrong) == 2
        assert reason in capsys.readouterr().err
