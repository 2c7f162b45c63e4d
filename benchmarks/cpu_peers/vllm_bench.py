"""vLLM's own tool: `vllm bench latency`, a process that loads, warms up, times whole calls of one batch, and exits."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.cpu_peers.engine_vllm import OPTIONS, variables
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.tool import run_to_end
from benchmarks.cpu_peers.works import Work

TIMEOUT = 1800.0
CALLS = 5


@dataclass(frozen=True, slots=True)
class VllmBench:
    program: Path
    model: Path
    threads: int
    log: Path
    preloaded: Mapping[str, str] = field(default_factory=dict)

    def rate(self, work: Work) -> float:
        """Output tokens per second of a whole call."""
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "latency.json"
            run_to_end(self.command(work, found), self.log, TIMEOUT, {**variables(self.threads), **self.preloaded})
            try:
                seconds = median(json.loads(found.read_text())["latencies"])
            except (OSError, ValueError, LookupError, TypeError):
                raise EngineFailed(f"vllm bench wrote no latencies (log: {self.log})") from None
        return work.requests * work.new / float(seconds)

    def command(self, work: Work, found: Path) -> list[str]:
        lengths = {"input-len": work.prompt_len, "output-len": work.new, "batch-size": work.requests}
        how = {"num-iters-warmup": 1, "num-iters": CALLS, "output-json": found, "model": self.model}
        same = {name.replace("_", "-"): value for name, value in OPTIONS.items()}
        options = [
            part
            for name, value in {**lengths, **how, **same}.items()
            for part in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        ]
        return [str(self.program), "bench", "latency", "--disable-detokenize", *options]
