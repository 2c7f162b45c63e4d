"""An option that does not exist is pointed to by what it means, and by its spelling only where that is nearly right."""

from __future__ import annotations

import re

import pytest
import typer

from bankfull.cli.app import _all_commands, _options_of, make_app
from bankfull.cli.hints import ABSENT, SAME, about_unknown
from tests.cli.conftest import Cli

COMMANDS = {
    name: _options_of(command) for name, command in _all_commands(typer.main.get_command(make_app()), "bankfull")
}
ELSEWHERE: dict[str, list[str]] = {}
for command, options in COMMANDS.items():
    for option in options:
        ELSEWHERE.setdefault(option, []).append(command)


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "--draft", "4", "x"), "use --speculative NAME, such as suffix"),
        (("serve", "--speculative-config={}"), "use --speculative ngram,width=4"),
        (("serve", "--quantization", "awq"), "the format of a quantized checkpoint is detected"),
        (("serve", "--cpu-offload-gb", "4"), "all weights stay on the device"),
        (("run", "--max-new-tokens", "4", "x"), "use --max-tokens."),
        (("run", "--n-predict=4", "x"), "use --max-tokens."),
        (("serve", "--ctx-size", "4096"), "use --max-model-len."),
        (("chat", "-c", "4096"), "use --max-model-len."),
        (("serve", "--gpu-memory-utilization", "0.9"), "use --memory."),
        (("serve", "--tensor-parallel-size", "2"), "use --parallel tp=N"),
        (("serve", "--data-parallel-size", "2"), "one device runs the whole model"),
        (("run", "--n-gpu-layers", "99", "x"), "use --device cuda for all layers on the GPU, --device cpu for none"),
        (("run", "--load-in-8bit", "x"), "use --quantize int8."),
        (("run", "--torch-dtype", "float16", "x"), "use --dtype."),
        (("run", "--host", "0.0.0.0", "x"), "it is an option of `bankfull serve`."),
        (
            ("serve", "--max-new-tokens", "4"),
            "the equivalent --max-tokens is an option of `bankfull run`, `bankfull chat`",
        ),
        (("serve", "--hots", "0.0.0.0"), "did you mean --host?"),
        (("run", "--tempreature", "1", "x"), "did you mean --temperature?"),
        (("run", "--steptokens", "1", "x"), "did you mean --step-tokens?"),
        (("run", "--zebra", "x"), "`bankfull run --help` lists its options."),
        (("bench", "latency", "--draft"), "`bankfull bench latency` has no option --draft"),
    ],
)
def test_what_to_use_instead(cli: Cli, arguments: tuple[str, ...], sentence: str) -> None:
    said = cli(*arguments)
    assert said.code == 2 and sentence in said.sentence


def test_every_hint_names_options_that_exist() -> None:
    for command, own in COMMANDS.items():
        for unknown in (*SAME, *ABSENT):
            if unknown in own:
                continue
            said = about_unknown(unknown, own, ELSEWHERE, command).replace(f"has no option {unknown}", "")
            for name in re.findall(r"(?<![\w-])--[a-z0-9-]+", said):
                assert name in ELSEWHERE or name == "--help", said


def test_a_name_has_one_meaning() -> None:
    assert not ABSENT.keys() & SAME.keys()


@pytest.mark.parametrize("name", ["--rat", "--frog", "--mode-l", "--n-", "--xyz"])
def test_a_short_word_is_not_taken_for_another(name: str) -> None:
    said = about_unknown(name, ["--raw", "--port", "--n", "-n", "--system"], {}, "bankfull run")
    assert ("did you mean" in said) == (name == "--rat")
