"""guidellm, a load generator: its report and the server's counters agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.clients.conftest import Server

pytest.importorskip("guidellm", reason="guidellm is not installed: make test-clients")

REQUESTS, STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 3, 24, 16


def counted(server: Server) -> dict[str, int]:
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r"^bankfull:(prompt|generation)_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_every_request_of_a_benchmark_succeeds(server: Server, tmp_path: Path, path: str) -> None:
    report, before = tmp_path / "report.json", counted(server)
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "guidellm",
            "run",
            "--disable-console",
            "--backend",
            f"kind=openai_http,target={server.url},model=tiny,request_format={path}",
            "--profile",
            f"kind=concurrent,streams={STREAMS}",
            "--constraint",
            f"kind=max_requests,count={REQUESTS}",
            "--tokenizer",
            f"kind=huggingface_auto,model={server.folder}",
            "--data",
            f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "--output",
            f"kind=json,path={report}",
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert benchmark["metrics"]["request_totals"] == totals, benchmark["requests"]["errored"]
    assert 1 < benchmark["metrics"]["request_concurrency"]["successful"]["max"] <= STREAMS

    requests = benchmark["requests"]["successful"]
    assert [request["output_tokens"] for request in requests] == [OUTPUT_TOKENS] * REQUESTS
    prompts = [request["prompt_tokens"] for request in requests]
    if path == "/v1/completions":
        # guidellm cuts a text to this many tokens; tokenized again, its end may differ.
        assert prompts == pytest.approx([PROMPT_TOKENS] * REQUESTS, abs=2)
    else:
        assert min(prompts) > PROMPT_TOKENS, "the template adds its own"
    assert all(0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"] for request in requests)
    after = counted(server)
    assert after["prompt"] - before["prompt"] == sum(prompts)
    assert after["generation"] - before["generation"] == REQUESTS * OUTPUT_TOKENS
