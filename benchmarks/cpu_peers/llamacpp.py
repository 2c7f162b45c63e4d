"""llama.cpp with its own tools: llama-bench for one stream, llama-batched-bench for several.

Each turn is a process that loads, warms up, measures and exits, so the harness adds nothing to the tool's timing. Flash
attention (and the build, if there are several) is set to whichever is faster for the work. The tools feed random tokens
and do not sample: the cost of greedy sampling counts on our side only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu_peers.llamacpp_build import BATCHED, BENCH, Build
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.tool import LONGEST_REASON, Ended, run_to_end
from benchmarks.cpu_peers.works import FreshPrompts, Turn, Work

TIMEOUT = 1800.0
ATTENTION = ("on", "off")
ROUNDS = 2
"""Rounds of the search for the best setting."""


@dataclass(frozen=True, slots=True)
class Setting:
    build: Build
    attention: str

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"flash attention {self.attention}", self.build.variant)))


class LlamaCpp:
    def __init__(self, builds: Sequence[Build], model: Path, threads: int, log: Path) -> None:
        self._model, self._threads, self._log = model, threads, log
        self._candidates = [Setting(build, attention) for build in builds for attention in ATTENTION]
        self._best: dict[str, Setting] = {}
        self._cpu_seconds = 0.0

    @property
    def name(self) -> str:
        return self._candidates[0].build.name

    @property
    def settings(self) -> Mapping[str, str]:
        return {work: str(setting) for work, setting in self._best.items()}

    def wake(self) -> None:
        """No process runs between turns."""

    def sleep(self) -> None:
        """No process runs between turns."""

    def cpu_seconds(self) -> float:
        return self._cpu_seconds

    def get_ready(self, work: Work, fresh: FreshPrompts) -> None:
        """Time each setting and keep the fastest for all pairs. The better round counts: noise only slows down."""
        rates = dict.fromkeys(self._candidates, 0.0)
        for _ in range(ROUNDS):
            for setting in rates:
                rates[setting] = max(rates[setting], self._rate(work, setting))
        self._best[work.name] = max(rates, key=lambda setting: rates[setting])

    def rate(self, work: Work, turn: Turn) -> float:
        return self._rate(work, self._best[work.name])

    def rate_by_itself(self, work: Work) -> float:
        """As its users call it: the first build with its default attention and repetitions."""
        return self._rate(work, Setting(self._candidates[0].build, "auto"), by_itself=True)

    def resident_bytes(self, fresh: FreshPrompts) -> float:
        return self._run(self._bench(self._candidates[0], "-p", "0", "-n", "32", "-d", "32", "-r", "1")).peak_bytes

    def idle_percent(self, seconds: float) -> float | None:
        return None

    def seconds_to_first_token(self) -> float:
        """A whole process with one prompt of 32 tokens and no warm-up."""
        once = self._bench(self._candidates[0], "-p", "32", "-n", "0", "-r", "1", "--no-warmup")
        return self._run(once).seconds

    def _rate(self, work: Work, setting: Setting, by_itself: bool = False) -> float:
        if work.measure == "output" or (work.measure == "decode" and work.requests > 1):
            return self._batch_rate(work, setting)
        repeat = () if by_itself else ("-r", str(work.repetitions))
        # The first token comes with the prompt, so `new` tokens take one step less.
        what = {
            "decode": ("-p", "0", "-n", str(work.new - 1), "-d", str(work.prompt_len)),
            "prefill": ("-p", str(work.prompt_len), "-n", "0"),
        }[work.measure]
        said = self._run(self._bench(setting, *what, *repeat)).said
        return median(_found(said, lambda: json.loads(said)[0]["samples_ts"]))

    def _bench(self, setting: Setting, *what: str) -> list[str]:
        tool = setting.build.tool(BENCH)
        return [tool, *self._common(setting), "-o", "json", *what]

    def _batch_rate(self, work: Work, setting: Setting) -> float:
        command = [
            setting.build.tool(BATCHED),
            *self._common(setting),
            "-tb",
            str(self._threads),
            "-npp",
            str(work.prompt_len),
            "-ntg",
            str(work.new - 1),
            "-npl",
            str(work.requests),
            "-c",
            str(work.requests * (work.prompt_len + work.new)),
            "-b",
            "2048",
            "-ub",
            "512",
            "--output-format",
            "jsonl",
        ]
        said = self._run(command).said
        lines = [line for line in said.splitlines() if line.startswith("{")]
        if work.measure == "decode":
            return float(_found(said, lambda: json.loads(lines[0])["speed_tg"]))
        return work.requests * work.new / float(_found(said, lambda: json.loads(lines[0])["t"]))

    def _common(self, setting: Setting) -> list[str]:
        return ["-m", str(self._model), "-t", str(self._threads), "-fa", setting.attention]

    def _run(self, command: Sequence[str]) -> Ended:
        ended = run_to_end(command, self._log, TIMEOUT)
        self._cpu_seconds += ended.cpu_seconds
        return ended


def _found(said: str, look: Any) -> Any:
    try:
        return look()
    except (ValueError, LookupError, TypeError):
        raise EngineFailed(f"llama.cpp's tool printed no figures: {said.strip()[-LONGEST_REASON:]!r}") from None
