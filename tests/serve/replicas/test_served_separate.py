"""`bankfull serve --separate`: one service over two pools of engine processes, and models that it is not for. State
goes over sockets here; `test_separate` has shared memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from bankfull import LLM, SamplingParams
from tests.models.diffusion import make_speaking
from tests.tiny import speaking_folder

OPTIONS = ["--dtype", "float32", "--memory", "1MiB", "--page-tokens", "4", "--port", "0", "--served-model-name", "tiny"]
PROMPT = "The river runs at the full capacity of its channel, and the engine fills it. " * 2


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "bankfull", "serve", str(folder), *OPTIONS, *more]


def get(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: bytes = answer.read()
    return found.decode()


def test_a_served_pair_answers_like_one_engine_and_counts_what_it_hands_over() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    [expected] = LLM(str(speaking_folder()), dtype="float32", memory="1MiB", page_tokens=4).generate([PROMPT], params)
    pages = len(expected.prompt_token_ids) // 4
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    wanted = command(speaking_folder(), "--separate", "prefill=1,decode=1,exchange=1MiB,link=socket")
    process = subprocess.Popen(wanted, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if "browser" in line).rstrip("/")
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        answer = json.loads(get(url + "/v1/completions", body))
        assert answer["choices"][0]["text"] == expected.outputs[0].text
        assert answer["usage"]["completion_tokens"] == 10
        metrics = dict(re.findall(r"^bankfull:(separate_\w+)\{[^}]*\} (\S+)$", get(url + "/metrics"), re.MULTILINE))
        assert float(metrics["separate_transfers_total"]) == 1
        assert float(metrics["separate_pages_total"]) == pages
        assert float(metrics["separate_bytes_total"]) == 1024 * pages
        assert float(metrics["separate_late_pages_total"]) == float(metrics["separate_incomplete_total"]) == 0
        assert float(metrics["separate_wait_seconds_total"]) >= 0
        names = [replica["name"] for replica in json.loads(get(url + "/console/state"))["replicas"]]
        assert names == ["prefill-0", "decode-0"]
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def test_a_diffusion_model_is_refused_by_one_sentence(tmp_path: Path) -> None:
    folder = make_speaking(tmp_path / "sdar")
    wanted = command(folder, "--separate", "prefill=1,decode=1", "--max-model-len", "128")
    ran = subprocess.run(wanted, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert "--separate has no use for a diffusion model" in last and "Traceback" not in ran.stderr
