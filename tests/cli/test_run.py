"""`run`: the text of one answer, the object that tells all about it, and the line on its speed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bankfull import LLM, SamplingParams
from bankfull.cli.terminal import write_text
from bankfull.ops.cost import Rates

from .conftest import Cli

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
UNSET = ("--max-tokens", 12, "--ignore-eos")
SHORT = (*UNSET, "--temperature", 0)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model))


def advised(model: Path, tmp_path: Path, generation: dict[str, object]) -> Path:
    """The same model with a generation_config.json."""
    folder = tmp_path / "advised"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_the_answer_to_a_prompt_is_the_chat_s(cli: Cli, model: Path, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The river runs"}]
    [expected] = llm.chat(messages, GREEDY)
    done = cli("run", "The river runs", "--system", "Be brief.", "-m", model, *SHORT)
    assert done.code == 0 and done.out.rstrip("\n") == expected.outputs[0].text.rstrip("\n")
    assert done.out.endswith("\n")


def test_raw_gives_the_prompt_as_it_is(cli: Cli, model: Path, llm: LLM) -> None:
    [expected] = llm.generate("The river runs", GREEDY)
    done = cli("run", "The river runs", "--raw", "-m", model, *SHORT, "--json")
    assert done.json["token_ids"] == expected.outputs[0].token_ids


def test_a_model_without_template_gets_the_prompt_as_it_is(cli: Cli, mute: Path, llm: LLM) -> None:
    [expected] = llm.generate("The river runs", GREEDY)
    assert cli("run", "The river runs", "-m", mute, *SHORT, "--json").json["text"] == expected.outputs[0].text
    assert "--system" in cli("run", "x", "--system", "y", "-m", mute).sentence


@pytest.mark.parametrize("dash", [[], ["-"]])
def test_a_prompt_may_come_from_stdin(cli: Cli, model: Path, dash: list[str]) -> None:
    piped = cli("run", *dash, "-m", model, *SHORT, "--json", stdin="The river runs\n").json
    given = cli("run", "The river runs", "-m", model, *SHORT, "--json").json
    assert piped["token_ids"] == given["token_ids"] and piped["usage"] == given["usage"]


def test_one_line_tells_the_speed_and_its_share_of_the_limit(cli: Cli, model: Path) -> None:
    done = cli("run", "The river", "-m", model, *SHORT)
    pattern = (
        r"bankfull: the answer was cut off after 12 tokens; [^\n]*--max-tokens none[^\n]*\n"
        r"bankfull: 12 tokens, [\d.]+ tokens/s \([\d.]+% of this machine's limit\), "
        r"first after [\d.]+ s, prompt \d+ tokens\n"
    )
    assert re.fullmatch(pattern, done.err), done.err
    assert "limit" not in cli("run", "The river", "-m", model, *SHORT, "--no-limit").err


@pytest.fixture
def endless(model: Path, tmp_path: Path) -> Path:
    """The same model with a context that its limit of tokens does not fill."""
    folder = tmp_path / "endless"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 640}))
    return folder


def test_an_answer_has_a_limit_of_its_own_that_can_be_raised_and_left_out(cli: Cli, endless: Path) -> None:
    def ask(*options: object) -> Any:
        return cli("run", "The river", "-m", endless, "--temperature", 0, "--ignore-eos", *options)

    found = ask("--json").json
    assert (len(found["token_ids"]), found["finish_reason"]) == (512, "length")
    assert "cut off after 512 tokens" in ask().err
    assert "cut off after 515 tokens" in ask("--max-tokens", 515).err
    found = ask("--max-tokens", "none", "--json").json
    assert found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"] == 640
    assert "context of 640 tokens is full" in ask("--max-tokens", "none").err
    full = ask("--max-model-len", 100)  # the limit is at most what the context has left
    assert full.code == 0 and "context of 100 tokens is full" in full.err


@pytest.mark.parametrize("most", ["0", "-1", "many", "1.5", ""])
def test_a_limit_that_is_no_number_gets_one_sentence(cli: Cli, model: Path, most: str) -> None:
    assert "--max-tokens" in cli("run", "x", "-m", model, "--max-tokens", most).sentence


def test_an_answer_that_ends_by_itself_is_not_called_cut_off(cli: Cli, model: Path) -> None:
    text = cli("run", "The river", "-m", model, *SHORT, "--json").json["text"]
    assert "cut off" not in cli("run", "The river", "-m", model, *SHORT, "--stop", text[3:5]).err


def test_json_is_one_object_that_tells_all(cli: Cli, model: Path) -> None:
    done = cli("run", "The river", "-m", model, *SHORT, "--json")
    assert done.code == 0 and done.out.count("\n") == 1 and done.err == ""
    found = done.json
    assert len(found["token_ids"]) == 12 == found["usage"]["completion_tokens"]
    assert found["finish_reason"] == "length"
    metrics = found["metrics"]
    assert metrics["decode_tokens_per_s"] > 0 and 0 < metrics["time_to_first_token_s"] < metrics["total_s"]
    # The two rates and the percentage must tell the same story.
    share = 100 * metrics["decode_tokens_per_s"] / metrics["limit_tokens_per_s"]
    assert metrics["percent_of_limit"] == pytest.approx(share)


def test_the_limit_is_the_cost_of_the_decode_steps_on_the_ceilings(cli: Cli, model: Path) -> None:
    from bankfull.limits.meter.metered import MeteredModel
    from bankfull.limits.meter.step import StepShape
    from bankfull.weights.source import open_model

    found = cli("run", "The river", "-m", model, *SHORT, "--json").json
    metered = MeteredModel(open_model(model), dtype="float32")
    prompt = found["usage"]["prompt_tokens"]
    steps = [StepShape.decode(1, prompt + done) for done in range(1, 12)]
    seconds = sum(metered.cost(step).sum().seconds(Rates.flat(1e11), 1e10) for step in steps)
    assert found["metrics"]["limit_tokens_per_s"] == pytest.approx(11 / seconds, rel=1e-4)


def test_several_answers_differ_and_are_all_shown(cli: Cli, model: Path) -> None:
    options = ("run", "The river", "-m", model, *UNSET, "-n", 3, "--seed", 4)
    samples = cli(*options, "--json").json["samples"]
    assert len(samples) == 3 and len({tuple(s["token_ids"]) for s in samples}) > 1
    shown = cli(*options).out
    assert [f"--- {i} of 3" in shown for i in (1, 2, 3)] == [True] * 3
    assert all(sample["text"] in shown for sample in samples)


def test_a_model_without_advice_gets_the_general_sampling_and_temperature_0_is_greedy(
    cli: Cli, model: Path, llm: LLM
) -> None:
    def tokens(*options: object) -> list[int]:
        return cli("run", "The river", "-m", model, *UNSET, *options, "--json").json["token_ids"]  # type: ignore[no-any-return]

    messages = [{"role": "user", "content": "The river"}]
    seeded = replace(GREEDY, temperature=0.7, top_p=0.9, seed=3)
    assert llm.default_params() == SamplingParams(temperature=0.7, top_p=0.9)
    assert tokens("--seed", 3) == tokens("--seed", 3, "--temperature", 0.7, "--top-p", 0.9)
    assert tokens("--seed", 3) == llm.chat(messages, seeded)[0].outputs[0].token_ids
    assert tokens("--temperature", 0) == llm.chat(messages, GREEDY)[0].outputs[0].token_ids


def test_asking_for_a_truncation_means_sampling_where_the_model_s_advice_is_greedy(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    folder = advised(model, tmp_path, {"do_sample": False})
    runs = {
        tuple(cli("run", "The river", "-m", folder, *UNSET, *options, "--seed", s, "--json").json["token_ids"])
        for s in range(3)
        for options in ((), ("--top-k", 0))
    }
    assert len(runs) > 2


def test_the_model_s_own_advice_is_followed(cli: Cli, model: Path, tmp_path: Path) -> None:
    folder = advised(model, tmp_path, {"do_sample": True, "temperature": 5.0})
    runs = [cli("run", "x", "-m", folder, *UNSET, "--seed", s, "--json").json["token_ids"] for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_stop_text_ends_the_answer_before_it(cli: Cli, model: Path) -> None:
    text = cli("run", "The river", "-m", model, *SHORT, "--json").json["text"]
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    found = cli("run", "The river", "-m", model, *SHORT, "--stop", middle, "--json").json
    assert found["text"] == text[: text.index(middle)]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", middle)


def test_the_naive_baseline_says_the_same(cli: Cli, model: Path) -> None:
    options = ("run", "The river", "-m", model, *SHORT, "--json")
    fast, slow = cli(*options).json, cli(*options, "--naive").json
    assert slow["token_ids"] == fast["token_ids"] and slow["text"] == fast["text"]
    assert slow["finish_reason"] == "length"
    assert slow["metrics"]["limit_tokens_per_s"] == pytest.approx(fast["metrics"]["limit_tokens_per_s"], rel=1e-6)
    assert cli(*options[:-1], "--naive").out.rstrip("\n") == slow["text"].rstrip("\n")


def test_a_terminal_never_obeys_what_a_model_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_text("a\x1b[2Jb\x9b31m\ttab\nline\x7f")
    assert capsys.readouterr().out == "a\u241b[2Jb\ufffd31m\ttab\nline\u2421"


@pytest.mark.parametrize(
    ("arguments", "stdin", "named"),
    [
        (["run", ""], "", "empty"),
        (["run"], "", "empty"),
        (["run", "-"], "\n", "empty"),
        (["run", "-"], b"\xff\xfe", "UTF-8"),
        (["run", "--raw", "word " * 2000], "", "256"),
        (["run", "word " * 2000], "", "256"),
        (["run", "\udc80"], "", "surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_served_gets_one_sentence(
    cli: Cli, model: Path, arguments: list[str], stdin: str | bytes, named: str
) -> None:
    assert named in cli(*arguments, "-m", model, stdin=stdin).sentence


@pytest.mark.parametrize("name", ["smolm2", "/nowhere/at/all", "no-such-model.gguf", "", "a\0b"])
def test_a_model_that_does_not_exist_gets_one_sentence(cli: Cli, name: str) -> None:
    assert "model" in cli("run", "hello", "-m", name).sentence


def test_a_directory_that_holds_no_model_gets_one_sentence(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "config.json" in cli("run", "hello", "-m", tmp_path / "empty").sentence
