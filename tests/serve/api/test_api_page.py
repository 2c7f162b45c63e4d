"""The examples of docs/api.md do what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from bankfull.serve.api.openai.chat_completions import ChatCall
from bankfull.serve.api.openai.completions import CompletionCall
from bankfull.serve.api.switches import Effort
from tests.serve.scripted import Scripted
from tests.serve.server import shared

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"```sh\n(curl -s.*?)```", PAGE, re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_answered(example: str) -> None:
    url = shared(Scripted(["yes"]))
    command = example.replace("http://127.0.0.1:8000", url).replace("curl ", "curl --fail-with-body ", 1)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    if '"stream": true' in example:
        last = "event: response.completed\n" if "/v1/responses" in example else "data: [DONE]\n"
        assert last in result.stdout.split("\n\n")[-2] + "\n"
    else:
        assert json.loads(result.stdout).get("error") is None


TABLES = PAGE.partition("completions take:")[2].partition("What is left out")[0]


def test_every_parameter_in_the_tables_exists() -> None:
    names = set(re.findall(r"`([a-z_]+)(?:`|: false`)", TABLES)) - {"json", "regex", "choice", "grammar"}
    names -= {"reasoning", "reasoning_content"}
    assert names <= {*ChatCall.__struct_fields__, *CompletionCall.__struct_fields__}


@pytest.mark.parametrize("call", [ChatCall, CompletionCall])
def test_every_parameter_of_a_call_is_in_the_tables(call: type[ChatCall | CompletionCall]) -> None:
    other = "completions" if call is ChatCall else "chat completions"
    rows = [row for row in TABLES.splitlines() if not row.startswith(f"| {other} |")]
    named = set(re.findall(r"`([a-z_]+)", "".join(rows)))
    assert [name for name in call.__struct_fields__ if name not in named] == []


def test_the_values_of_reasoning_effort_are_told() -> None:
    told = re.search(r"`reasoning_effort` is (.+?), and", PAGE, re.DOTALL)
    assert told is not None and tuple(re.findall(r"`([a-z]+)`", told[1])) == get_args(Effort)
