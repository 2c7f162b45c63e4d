"""`chat`, driven through a pipe: what is remembered, what is refused, what the commands do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from bankfull.cli.lines import joined

from .conftest import Cli, Done

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SHORT = ("--max-tokens", 8, "--ignore-eos", "--temperature", 0)


def talk(llm: LLM, *said: str, system: str | None = None) -> list[str]:
    """The same conversation through the offline API."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for text in said:
        messages.append({"role": "user", "content": text})
        [output] = llm.chat(messages, GREEDY)
        answers.append(output.outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def ended(answers: list[str]) -> str:
    return "".join(text if text.endswith("\n") else text + "\n" for text in answers)


def speeds(done: Done) -> list[str]:
    """The lines that tell how fast an answer came."""
    return [line for line in done.err.splitlines() if "first after" in line]


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model))


def test_each_answer_sees_the_whole_conversation_and_reuses_its_state(cli: Cli, model: Path, llm: LLM) -> None:
    done = cli("chat", "-m", model, *SHORT, stdin="The river runs\nand then\nat last\n")
    assert done.code == 0
    assert done.out == ended(talk(llm, "The river runs", "and then", "at last"))
    cached = [int(m[1]) if (m := re.search(r"\((\d+) cached\)", line)) else 0 for line in speeds(done)]
    assert len(cached) == 3 and cached[0] == 0 < cached[1] < cached[2]


def test_a_backslash_joins_lines(cli: Cli, model: Path, llm: LLM) -> None:
    assert list(joined(iter(["a\\", "b\\", "c", "d", "e\\"]))) == ["a\nb\nc", "d", "e"]
    assert cli("chat", "-m", model, *SHORT, stdin="a\\\nb\n").out == ended(talk(llm, "a\nb"))


def test_two_slashes_begin_a_message(cli: Cli, model: Path, llm: LLM) -> None:
    assert cli("chat", "-m", model, *SHORT, stdin="//path\n").out == ended(talk(llm, "/path"))


def test_reset_forgets_and_system_stays(cli: Cli, model: Path, llm: LLM) -> None:
    stdin = "/system Be brief.\none\n/reset\ntwo\n/system\n/reset\nthree\n"
    done = cli("chat", "-m", model, "--system", "Be long.", *SHORT, stdin=stdin)
    brief = [*talk(llm, "one", system="Be brief."), *talk(llm, "two", system="Be brief.")]
    assert done.out == ended([*brief, *talk(llm, "three")])


def test_params_change_and_show_the_sampling(cli: Cli, model: Path) -> None:
    done = cli("chat", "-m", model, *SHORT, stdin="/params max_tokens=3\none\n/params temperature=0.5 seed=1\n")
    assert "max_tokens=3" in done.err and "bankfull: 3 tokens" in done.err
    assert "temperature=0.5" in done.err and "seed=1" in done.err


def test_an_answer_that_was_cut_off_says_how_to_get_more(cli: Cli, model: Path) -> None:
    options = ("chat", "-m", model, "--temperature", 0, "--ignore-eos")
    done = cli(*options, "--max-tokens", 8, stdin="one\n/params max_tokens=9\ntwo\n/params max_tokens=none\nthree\n")
    cuts = [line for line in done.err.splitlines() if "cut off" in line or "is full" in line]
    assert [("after 8" in c, "after 9" in c, "context of 256" in c) for c in cuts] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert "/params max_tokens=N" in cuts[0] and "/reset" in cuts[2]
    # The default of 1024 is more than this model's context holds.
    assert "max_tokens=1024" in cli(*options, stdin="/params\n").err
    assert "context of 256 tokens is full" in cli(*options, stdin="one\n").err


def test_a_conversation_survives_in_a_file(cli: Cli, model: Path, llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    cli("chat", "-m", model, "--system", "Be brief.", *SHORT, stdin=f"one\n/save {file}\n/save {file}\n")
    assert [m["role"] for m in json.loads(file.read_text())["messages"]] == ["system", "user", "assistant"]
    done = cli("chat", "-m", model, *SHORT, stdin=f"/load {file}\ntwo\n")
    assert done.out == ended(talk(llm, "one", "two", system="Be brief.")[1:])


def test_a_full_context_says_so_and_reset_helps(cli: Cli, model: Path) -> None:
    done = cli("chat", "-m", model, *SHORT, stdin="word " * 100 + "\n" + "word " * 100 + "\n/reset\nshort\n")
    assert done.code == 2 and "/reset" in done.err and "256" in done.err
    assert "bankfull: 8 tokens" in done.err.splitlines()[-1]


def test_an_answer_that_fills_the_context_says_so(cli: Cli, model: Path) -> None:
    done = cli("chat", "-m", model, "--ignore-eos", "--max-model-len", 64, stdin="hi\n")
    assert done.code == 0 and "context of 64 tokens is full" in done.err


def test_quit_ends_the_program_at_once(cli: Cli, model: Path) -> None:
    done = cli("chat", "-m", model, stdin="/quit\nhello\n")
    assert (done.code, done.out) == (0, "")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("/nonsense", "/nonsense"),
        ("/params temperature", "NAME=VALUE"),
        ("/params temperature=hot", "temperature"),
        ("/params warmth=1", "warmth"),
        ("/params n=2", "n must be 1"),
        ("/save", "/save"),
        ("/save /nowhere/at/all.json", "/nowhere"),
        ("/load", "/load"),
        ("/load /nowhere/at/all.json", "/nowhere"),
        ("/load {junk}", "not a conversation"),
        ("/save {junk}", "not a conversation"),
    ],
)
def test_a_command_that_cannot_be_obeyed_gets_a_sentence_and_the_talk_goes_on(
    cli: Cli, model: Path, llm: LLM, tmp_path: Path, line: str, named: str
) -> None:
    junk = tmp_path / "junk.json"
    junk.write_text('{"messages": [{"role": "user", "content": 3}]}')
    done = cli("chat", "-m", model, *SHORT, stdin=line.format(junk=junk) + "\none\n")
    first, *rest = done.err.splitlines()
    assert named in first and len(rest) == 2 == 1 + len(speeds(done)) and done.code == 2
    assert done.out == ended(talk(llm, "one"))
    assert "content" in junk.read_text()


def test_a_model_without_template_is_refused(cli: Cli, mute: Path) -> None:
    assert "chat template" in cli("chat", "-m", mute, stdin="hello\n").sentence
