"""Of the command line as a whole: help comes at once, and nothing that a user can type ends in a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bankfull
from bankfull.cli.app import COMMANDS
from tests.tiny import speaking_folder

from .conftest import Cli

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "tokenizers", "transformers", "rich", "llguidance", "msgspec", "huggingface_hub")

MODULES = 350
"""All that help may import; reading them is what its time goes into."""


def test_help_imports_nothing_heavy_and_comes_at_once() -> None:
    code = (
        "import sys\nfrom bankfull.cli import main\ntry:\n    main(['--help'])\n"
        f"finally:\n    print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
        "    print(len(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Commands:" in done.stdout
    heavy, modules = done.stderr.split("\n")[:2]
    assert heavy == "[]"
    assert int(modules) < MODULES


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_is_listed(cli: Cli, name: str) -> None:
    done = cli(name, "--help")
    assert done.code == 0 and f"bankfull {name}" in done.out
    assert f"\n  {name} " in cli().out


def test_the_version_is_the_package_s(cli: Cli) -> None:
    assert cli("--version").out == f"bankfull {bankfull.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["rnu"], "rnu"),
        (["run", "--nonsense", "x"], "--nonsense"),
        (["run", "x", "--rows", "many"], "--rows"),
        (["run", "x", "-m"], "-m"),
        (["generate", "-i", "x"], "--output"),
        (["run", "x", "y"], "y"),
    ],
)
def test_a_command_line_that_makes_no_sense_gets_one_sentence(cli: Cli, arguments: list[str], named: str) -> None:
    assert named in cli(*arguments).sentence


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--max-tokens", "5000"], "max_tokens"),
        (["--seed", "99999999999999999999"], "seed"),
        (["--stop", ""], "stop"),
        (["-n", "0"], "n is 0"),
        (["-n", "2", "--temperature", "0"], "temperature 0"),
        (["--device", "abacus"], "abacus"),
        (["--dtype", "int3"], "int3"),
        (["--providers", "magic"], "magic"),
        (["--rows", "0"], "rows"),
        (["--step-tokens", "-5"], "step_tokens"),
        (["--page-tokens", "0"], "page_tokens"),
        (["--memory", "much"], "memory"),
        (["--depth", "7"], "depth"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--raw", "--system", "s"], "--system"),
        (["--naive", "--temperature", "1"], "--temperature"),
        (["--naive", "--top-k", "0"], "--top-k"),
        (["--naive", "-n", "2"], "--n"),
        (["--naive", "--max-tokens", "5000"], "--max-tokens"),
    ],
)
def test_an_option_out_of_range_gets_one_sentence(cli: Cli, model: Path, options: list[str], named: str) -> None:
    assert named in cli("run", "hello", "-m", model, *options).sentence


def test_an_interrupt_while_loading_leaves_without_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("bankfull.weights.locate.locate", interrupted)
    done = cli("pull", "x")
    assert done.code == 130 and done.err == ""


def test_a_reader_that_has_gone_gets_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(0.5)\nfrom bankfull.cli import main; main(['run', '--help'])"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1 and error == b""


def test_an_interrupt_ends_an_answer_with_130_and_keeps_what_was_said(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bankfull", "run", "hello", "-m", str(model), "--ignore-eos", "--no-limit"]
    # A model whose context is 256 tokens ends too soon to be interrupted: it sleeps at every step instead.
    slow = (
        "import sys, time, runpy, bankfull.engine as e\nstep = e.Engine.step\n"
        "def slow(self):\n    time.sleep(0.05)\n    return step(self)\n"
        f"e.Engine.step = slow\nsys.argv = {command[2:]!r}\nrunpy.run_module('bankfull', run_name='__main__')\n"
    )
    environment = {**os.environ, "BANKFULL_CACHE": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", slow], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert first and out.endswith(b"\n") and b"Traceback" not in err


@pytest.mark.parametrize("command", ["run", "explain"])
def test_a_process_that_loaded_a_model_reports_no_leak_at_its_end(command: str) -> None:
    """Native objects that outlive the interpreter would be reported as leaked, on a user's terminal."""
    words = [sys.executable, "-m", "bankfull", command, "Hello", "--max-tokens", "2", "-m", str(speaking_folder())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "nanobind" in line or "leaked" in line]
    assert not said, done.stderr
