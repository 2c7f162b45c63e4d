"""python -m benchmarks.cpu_peers.lookup --sets code-edit,quotes --pairs 5

llama.cpp's own prompt lookup beside ours: the same file, the same prompts, greedy decoding, in alternation. Each answer
is as long as ours is without its repetition loops. A rate counts the tokens after the first one of each answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bankfull import LLM, SamplingParams
from bankfull.bench.prompt_sets import SETS, before_loop, prompt_set
from bankfull.cli.terminal import print_table
from bankfull.errors import BankfullError
from bankfull.ops import native
from bankfull.paths import cache_dir
from bankfull.weights.locate import DEFAULT_MODEL, locate
from benchmarks.cpu_peers.contenders import AFTERGLOW
from benchmarks.cpu_peers.install import CannotInstall
from benchmarks.cpu_peers.llamacpp import ATTENTION
from benchmarks.cpu_peers.llamacpp_build import LOOKUP, Asked, Build, lookup_build
from benchmarks.cpu_peers.models import gguf_only
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.tool import run_to_end

TIMEOUT = 600.0
PLAIN, DRAFTED = "plain", "with drafts"
KINDS = (PLAIN, DRAFTED)
WIDTHS = {PLAIN: (0,), DRAFTED: (3, 8, 16)}
"""Draft tokens of llama.cpp's steps: none, or the fastest of these, the first of which is its default."""
SEARCHED = 2
"""Prompts of the search for llama.cpp's fastest setting."""
_ENCODED = re.compile(r"encoded\s+(\d+) tokens in")
_DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
_ACCEPTED = re.compile(r"n_drafted\s*=\s*(\d+).*?n_accept\s*=\s*(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LookupPrompt:
    ids: list[int]
    text: str
    """The same prompt as a text with its special tokens."""
    new: int
    """Tokens of the answer."""


@dataclass(slots=True)
class Pass:
    """One pass over a prompt set."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class LookupRow:
    """Passes of both engines over one prompt set, plain and with drafts."""

    name: str
    ours: dict[str, list[Pass]] = field(default_factory=lambda: {PLAIN: [], DRAFTED: []})
    theirs: dict[str, list[Pass]] = field(default_factory=lambda: {PLAIN: [], DRAFTED: []})

    @staticmethod
    def rate(passes: Sequence[Pass]) -> float:
        return median(one.rate for one in passes)

    @staticmethod
    def gain(side: dict[str, list[Pass]]) -> float:
        return LookupRow.rate(side[DRAFTED]) / LookupRow.rate(side[PLAIN])

    @property
    def gain_ratio(self) -> float:
        return self.gain(self.ours) / self.gain(self.theirs)

    @property
    def rate_ratio(self) -> float:
        """With drafts, in tokens per second."""
        return self.rate(self.ours[DRAFTED]) / self.rate(self.theirs[DRAFTED])

    def as_json(self) -> dict[str, Any]:
        sides = {"ours": self.ours, "theirs": self.theirs}
        return {
            "prompts": self.name,
            **{
                f"{side}_{kind.replace(' ', '_')}": [p.rate for p in of[kind]]
                for side, of in sides.items()
                for kind in of
            },
            **{f"{side}_gain": self.gain(of) for side, of in sides.items()},
            "gain_ratio": self.gain_ratio,
            "rate_ratio": self.rate_ratio,
        }


@dataclass(frozen=True, slots=True)
class LookupSetting:
    width: int
    """Draft tokens of a step."""
    attention: str

    def __str__(self) -> str:
        return f"{self.width} drafts, flash attention {self.attention}"


class LlamaLookup:
    """llama.cpp's prompt lookup: one process for each answer, timed by itself after its own warm-up."""

    def __init__(self, build: Build, model: Path, threads: int, folder: Path) -> None:
        self._build, self._model, self._threads, self._folder = build, model, threads, folder
        self.settings = {kind: LookupSetting(WIDTHS[kind][0], ATTENTION[0]) for kind in KINDS}

    @property
    def name(self) -> str:
        return self._build.name

    def choose_settings(self, prompts: Sequence[LookupPrompt]) -> None:
        """The fastest setting without and with drafts, for a prompt set."""
        for kind in KINDS:
            every = [LookupSetting(width, attention) for width in WIDTHS[kind] for attention in ATTENTION]
            self.settings[kind] = max(every, key=lambda setting: self._pass(setting, prompts[:SEARCHED]).rate)

    def run(self, kind: str, prompts: Sequence[LookupPrompt]) -> Pass:
        return self._pass(self.settings[kind], prompts)

    def _pass(self, setting: LookupSetting, prompts: Sequence[LookupPrompt]) -> Pass:
        whole = Pass()
        for prompt in prompts:
            one = self._answer(setting, prompt)
            whole.tokens += one.tokens
            whole.seconds += one.seconds
            whole.drafted += one.drafted
            whole.accepted += one.accepted
        return whole

    def _answer(self, setting: LookupSetting, prompt: LookupPrompt) -> Pass:
        file, log = self._folder / "lookup-prompt.txt", self._folder / "lookup.err"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(prompt.text + "\n")  # it drops the newline at the end of a file
        # It generates one token more than -n, and its clock starts before the first: both are one token of a step.
        options = {
            "-m": self._model,
            "-f": file,
            "-t": self._threads,
            "-n": max(1, prompt.new - 1),
            "-c": len(prompt.ids) + prompt.new + 64,
            "--temp": 0,
            "-fa": setting.attention,
            "--spec-draft-n-max": setting.width,
        }
        command = [self._build.tool(LOOKUP), "--no-escape", *(str(part) for pair in options.items() for part in pair)]
        said = run_to_end(command, log, TIMEOUT).said + log.read_text(errors="replace")
        return parse_answer(said, len(prompt.ids))


def parse_answer(said: str, prompt_tokens: int) -> Pass:
    """The figures that llama-lookup prints."""
    encoded, decoded, accepted = _ENCODED.search(said), _DECODED.search(said), _ACCEPTED.search(said)
    if encoded is None or decoded is None or accepted is None:
        raise EngineFailed(f"{LOOKUP} printed no figures: {' '.join(said.split())[-200:]}")
    if int(encoded[1]) != prompt_tokens:
        raise EngineFailed(f"{LOOKUP} read the prompt as {encoded[1]} tokens instead of {prompt_tokens}")
    # The first token needs no step of its own: its logits come with the prompt.
    return Pass(int(decoded[1]) - 1, float(decoded[2]), int(accepted[1]), int(accepted[2]))


class OurLookup:
    """This engine twice: without drafts, and with the suffix automaton."""

    def __init__(self, model: Path) -> None:
        self._engines = {PLAIN: LLM(str(model), speculative="off"), DRAFTED: LLM(str(model), speculative="suffix")}

    def prompts(self, texts: Sequence[str], most: int) -> list[LookupPrompt]:
        """Prompts with the length of our answers, up to their end of text or first loop."""
        llm = self._engines[PLAIN]
        asked = [llm.loaded.frontend.encode_chat([{"role": "user", "content": text}]) for text in texts]
        found = []
        for ids in asked:
            (answer,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=most))
            text = llm.tokenizer.decode(ids, skip_special=False)
            found.append(LookupPrompt(ids, text, max(2, before_loop(answer.outputs[0].token_ids))))
        return found

    def run(self, kind: str, prompts: Sequence[LookupPrompt]) -> Pass:
        llm, whole = self._engines[kind], Pass()
        totals = llm.loaded.engine.totals
        before = sum(totals.drafted), sum(totals.accepted)
        for prompt in prompts:
            (answer,) = llm.generate([prompt.ids], SamplingParams(temperature=0.0, max_tokens=prompt.new))
            metrics = answer.metrics
            if metrics.finished is not None and metrics.ttft is not None:
                whole.tokens += metrics.output_tokens - 1
                whole.seconds += metrics.finished - metrics.ttft
        whole.drafted, whole.accepted = sum(totals.drafted) - before[0], sum(totals.accepted) - before[1]
        time.sleep(AFTERGLOW)  # our threads stop spinning before the peer begins
        return whole


Run = Callable[[str, Sequence[LookupPrompt]], Pass]


def compare_set(name: str, prompts: Sequence[LookupPrompt], ours: Run, theirs: Run, pairs: int) -> LookupRow:
    """Both engines in turn, plain and with drafts; the order changes from pair to pair."""
    row = LookupRow(name)
    for pair in range(pairs):
        sides = [(ours, row.ours), (theirs, row.theirs)]
        for run, found in sides if pair % 2 == 0 else sides[::-1]:
            for kind in KINDS:
                found[kind].append(run(kind, prompts))
        say(
            f"{name}, pair {pair + 1} of {pairs}: ours {row.ours[PLAIN][-1].rate:.1f} and "
            f"{row.ours[DRAFTED][-1].rate:.1f}, theirs {row.theirs[PLAIN][-1].rate:.1f} and "
            f"{row.theirs[DRAFTED][-1].rate:.1f} tokens/s"
        )
    return row


def table_of(rows: Sequence[LookupRow], peer: str, threads: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"prompt lookup: bankfull and {peer}, {threads} threads, one stream, decode tokens/s"))
    table.add_column("prompts", no_wrap=True)
    for heading in ("its plain", "its lookup", "its gain", "our plain", "our suffix", "our gain", "gains", "rates"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.rate(row.theirs[PLAIN]):.1f}",
            f"{row.rate(row.theirs[DRAFTED]):.1f}",
            f"{row.gain(row.theirs):.2f}x",
            f"{row.rate(row.ours[PLAIN]):.1f}",
            f"{row.rate(row.ours[DRAFTED]):.1f}",
            f"{row.gain(row.ours):.2f}x",
            f"{row.gain_ratio:.2f}",
            f"{row.rate_ratio:.2f}",
        )
    return table


def say(line: str) -> None:
    print(f"lookup: {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _arguments(arguments)
    try:
        texts = {name: prompt_set(name)[: asked.prompts] for name in asked.sets.split(",")}
        if min(asked.pairs, asked.output_len - 1, asked.threads) < 1:
            raise ValueError("--pairs and --threads must be at least 1, and --output-len at least 2")
        model = gguf_only(locate(asked.model).resolve())
        build = lookup_build(Asked(tuple(asked.llamacpp_bin)), asked.folder.resolve())
        native.set_threads(asked.threads)
        ours, theirs = OurLookup(model), LlamaLookup(build, model, asked.threads, asked.folder.resolve())
        rows = []
        for name, several in texts.items():
            prompts = ours.prompts(several, asked.output_len)
            theirs.choose_settings(prompts)
            say(f"{name}: {theirs.name} is fastest with {theirs.settings[PLAIN]}; {theirs.settings[DRAFTED]}")
            rows.append(compare_set(name, prompts, ours.run, theirs.run, asked.pairs))
    except (ValueError, CannotInstall, EngineFailed, BankfullError, OSError) as error:
        print(f"lookup: {error}", file=sys.stderr)
        return 2
    print_table(table_of(rows, theirs.name, asked.threads))
    print("gains: our gain over its gain. rates: our tokens/s over its, with drafts. Loops are cut off.")
    if asked.json is not None:
        asked.json.write_text(
            json.dumps({"peer": theirs.name, "threads": asked.threads, "sets": [r.as_json() for r in rows]})
        )
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_peers.lookup", description=__doc__)
    parser.add_argument("--sets", default=",".join(SETS), help=f"comma-separated, of {', '.join(SETS)}")
    parser.add_argument("--prompts", type=int, help="prompts of each set; default: all")
    parser.add_argument("--output-len", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--pairs", type=int, default=5, help="alternating passes over each set")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a .gguf file, or a name as for bankfull run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=cache_dir() / "cpu_peers", help="for the build and logs")
    parser.add_argument(
        "--llamacpp-bin",
        type=lambda text: [Path(text)],
        default=[],
        metavar="DIR",
        help="programs of a llama.cpp build, with llama-lookup, instead of building it",
    )
    parser.add_argument("--json", type=Path, help="file for all passes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
