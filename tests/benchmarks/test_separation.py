"""The benchmark of prefill and decode apart: it runs on a tiny model, and says what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import separation
from tests.tiny import speaking_folder


def test_three_arrangements_are_measured_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--streams", "2", "--prompt-tokens", "200", "--prompts", "3", "--every", "0.05", "--short-tokens", "9"]
    sizes += ["--answer-tokens", "20", "--stream-tokens", "20", "--quiet", "0.5", "--rates", "20,40", "--requests", "8"]
    sizes += ["--slo", "ttft=60s"]
    options = {"dtype": "float32", "memory": "1MiB", "page_tokens": 4}
    pools = "prefill=1,decode=1,exchange=1MiB,link=socket"
    more = ["--options", json.dumps(options), "--separate", pools, "--json", str(out)]
    assert separation.main(["--model", str(speaking_folder()), *sizes, *more]) == 0
    made = json.loads(out.read_text())
    assert [one["arrangement"] for one in made] == ["one engine", "2 replicas", "separate, 1 + 1, over sockets"]
    for one in made:
        assert one["quiet_itl"] > 0 and one["busy_itl"] > 0 and one["ttft"] > 0
        assert one["ratio"] == pytest.approx(one["busy_itl"] / one["quiet_itl"])
        assert set(one["goodput"]) == {"20.0", "40.0"} and all(
            0 < found <= float(rate) for rate, found in one["goodput"].items()
        )
    assert [bool(one["shipped"]) for one in made] == [False, False, True]
    said = capsys.readouterr().out
    assert "cores for this process" in said and said.count("\n| ") == 4


@pytest.mark.parametrize(
    "bad",
    [
        ["--separate", "prefill=1"],
        ["--slo", "soon"],
        ["--options", "{"],
        ["--rates", "x"],
        ["--link-tls", "nowhere"],
        ["--link-tls", "nowhere", "--separate", "prefill=1,decode=1,link=socket"],
    ],
)
def test_bad_input_is_one_sentence(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert separation.main(bad) == 2
    assert capsys.readouterr().err.count("\n") == 1
