"""A server that is killed and started again finds its prefixes on disk."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import httpx

from bankfull.state.disk_folders import stored
from tests.serve.test_ends import engines_of, eventually, real_server

PROMPT = "The river runs at the full capacity of its channel. " * 6


def ask(url: str) -> tuple[str, int]:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_disk_that_is_gone_when_the_engine_is_started_again_is_no_outage(tmp_path: Path) -> None:
    """The engine crashes after its disk has."""
    folder, name = tmp_path / "kv", "bankfull:optional_part_up{"
    with real_server("--kv-disk", f"8MiB:{folder}") as (url, process):
        text, _ = ask(url)
        assert httpx.get(f"{url}/health").json() == {"status": "ready", "without": {}}
        shutil.rmtree(folder)
        folder.write_text("no folder any longer")
        [engine] = engines_of(process.pid)
        os.kill(engine, signal.SIGKILL)
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 503, "the engine is not missed")
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, "the engine is not started again")
        assert httpx.get(f"{url}/health").json() == {"status": "ready", "without": {"kv_disk": "File exists"}}
        assert ask(url)[0] == text
        [line] = (line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(name))
        assert 'part="kv_disk"' in line and line.endswith(" 0")


def test_a_prefix_survives_the_death_of_the_server(tmp_path: Path) -> None:
    options = ("--kv-disk", f"8MiB:{tmp_path}")
    with real_server(*options) as (url, process):
        text, cached = ask(url)
        assert cached == 0
        eventually(lambda: sum(one.entries for one in stored(tmp_path)) >= 8, "nothing is written")
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        assert "bankfull_kv_tier_bytes_used{model_name=" in metrics or "kv_tier_bytes_used" in metrics
        os.killpg(process.pid, signal.SIGKILL)
    with real_server(*options) as (url, _):
        again, cached = ask(url)
        assert again == text and cached > 0
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        restored = [line for line in metrics.splitlines() if line.startswith("bankfull:kv_restored_tokens_total")]
        assert restored and float(restored[0].split()[-1]) >= cached
