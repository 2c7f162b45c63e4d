"""The examples of docs/api.md do what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bankfull.serve.openai_chat import ChatCall
from bankfull.serve.openai_completions import CompletionCall
from tests.serve.scripted import Scripted
from tests.serve.server import shared

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_answered(example: str) -> None:
    assert example.startswith("curl -s")
    url = shared(Scripted(["yes"]))
    command = example.replace("http://127.0.0.1:8000", url).replace("curl ", "curl --fail-with-body ", 1)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    if '"stream": true' in example:
        assert result.stdout.endswith("data: [DONE]\n\n")
    else:
        assert "error" not in json.loads(result.stdout)


def test_every_parameter_in_the_table_exists() -> None:
    table = PAGE.partition("completions take:")[2].partition("What is left out")[0]
    names = set(re.findall(r"`([a-z_]+)(?:`|: false`)", table)) - {"json", "regex", "choice", "grammar"}
    names -= {"reasoning", "reasoning_content"}
    known = {*ChatCall.__struct_fields__, *CompletionCall.__struct_fields__}
    assert len(names) > 15 and names <= known
