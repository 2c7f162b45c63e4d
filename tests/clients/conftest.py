"""One server for all clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Server:
    url: str
    folder: str
    """Folder of the model and its tokenizer."""


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    python = os.environ.get("BANKFULL_PYTHON", sys.executable)
    process = subprocess.Popen([python, "-m", "tests.clients.serve_tiny"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        output = ""
        while "to stop it" not in output and (line := process.stdout.readline()):
            output += line
        folder, url = (
            re.search(r"model folder (.+)", output),
            re.search(r"base_url (http://127\.0\.0\.1:\d+)/v1", output),
        )
        assert folder is not None and url is not None, output
        yield Server(url[1], folder[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
