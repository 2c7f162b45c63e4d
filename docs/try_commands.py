"""Runs every command and program of README.md, CONTRIBUTING.md and docs/*.md, and prints a table: `make test-docs`.

A page is followed from top to bottom in a folder of its own, as a reader would. A command that starts a server runs
beside the commands after it until the page ends or starts another one. Commands that are not run are in NOT_RUN with
the reason; they must still parse, and the options of a `python -m` command must be in its `--help`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from docs.commands import ROOT, Command, commands, fault_of, pages

PORT = 8000
"""The port that the pages' servers listen on."""
COMMAND_SECONDS, START_SECONDS = 600, 180

NOT_RUN = (
    (r"docker ", "needs a Docker engine"),
    (r"LLaDA-8B|SDAR-4B", "needs a checkpoint of several GB"),
    (
        r"make (test|test-multi|bench)-gpu|benchmarks\.gpu (?!--list)|benchmarks\.gpu\.|--device cuda|bankfull tune",
        "needs a GPU",
    ),
    (r"make test(\s|$)", "takes 20 minutes; CI runs it"),
    (r"make bench( |$)|benchmarks\.cpu_peers --shape", "builds llama.cpp and installs vLLM; takes hours"),
    (r"make (soak|test-clients)", "takes half an hour, or installs several GB of clients"),
    (r"benchmarks\.plan_accuracy|--verify", "takes minutes on a machine that does nothing else"),
    (r"bankfull bench compare", "needs another engine's server"),
    (r"OTHER/", "needs a second build"),
    (r"bankfull data adopt", "needs files that a damaged store has set aside"),
)
"""Commands by pattern, with the reason why they are not run."""

SHORTER = (
    (r"--requests \d+", "--requests 4"),
    (r"--seconds \d+", "--seconds 2"),
    (r"--output-len 128", "--output-len 16"),
    (
        r"bankfull bench sweep --slo \"[^\"]+\"",
        'bankfull bench sweep --slo "e2e=600s" --input-len 16 --first-rate 0.5 --highest-rate 1 --least-requests 2',
    ),
    (r"(bankfull bench (?:latency|throughput))", r"\1 --reps 1"),
    (r"(bankfull plan smollm2)", r"\1 --no-calibrate"),
    (r"(bankfull quality \w+)", r"\1 --text text.txt"),
    (
        r"(bankfull train (?:medusa|eagle|streaming|draft) smollm2) (.*) --minutes 10",
        r"\1 \2 --count 4 --answer-tokens 12 --steps 2",
    ),
)
"""The same command with less work: pattern and replacement."""

OPTIONS_OF = {
    "bench": ("BENCH_OPTIONS", "benchmarks.cpu_peers"),
    "bench-gpu": ("GPU_OPTIONS", "benchmarks.gpu"),
    "soak": ("SOAK_OPTIONS", "tests.soak"),
}
"""Make target -> the variable with its options, and the module that gets them."""

VALUES = {"MODEL": "smollm2", "OTHER": "smollm2", "FILE": "text.txt", "CONFIG.json": "config.json", "DIR": "data"}
"""What the words for a reader's own values become."""

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
QUESTION = {"messages": [{"role": "user", "content": "What is a river?"}], "max_tokens": 8}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": QUESTION}


@dataclass
class Outcome:
    command: Command
    result: str
    """`ok`, `failed` or `not run`."""
    detail: str = ""


@dataclass
class Page:
    """One page's folder, environment and running server."""

    folder: Path
    environment: dict[str, str]
    server: subprocess.Popen[bytes] | None = None
    batch: str = ""
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "server.log"

    def run(self, command: Command) -> Outcome:
        fault = fault_of(command)
        if fault is not None:
            return Outcome(command, "failed", fault)
        for pattern, reason in NOT_RUN:
            if command.language == "sh" and re.search(pattern, command.text):
                fault = self._unknown_options(command)
                return Outcome(command, "failed" if fault else "not run", fault or reason)
        if command.language == "python":
            return self._finish(command, [sys.executable, "-c", command.text])
        text = self._filled(command.text)
        if re.match(r"bankfull data repair\b", text):
            self.stop()
        if re.match(r"(bankfull|make) serve\b", text):
            return self._serve(command, text)
        return self._finish(command, ["bash", "-euo", "pipefail", "-c", text])

    def _filled(self, text: str) -> str:
        for pattern, replacement in SHORTER:
            text = re.sub(pattern, replacement, text)
        for word, value in {**VALUES, "ID": self.batch or "ID"}.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(word)}(?![\w=-])", value, text)
        return re.sub(r"^curl ", "curl --fail-with-body ", text)

    def _folder_of(self, text: str) -> Path:
        """The checkout for what exists only there."""
        return ROOT if re.match(r"make |python -m (benchmarks|docs|tests)\b", text) else self.folder

    def _finish(self, command: Command, program: list[str]) -> Outcome:
        """Waits for its end, and ends all of its processes when it takes too long."""
        running = self._start(program, command.text, subprocess.PIPE)
        try:
            output = running.communicate(timeout=COMMAND_SECONDS)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
            return Outcome(command, "failed", f"still ran after {COMMAND_SECONDS} s")
        if running.returncode:
            return Outcome(command, "failed", f"exit code {running.returncode}: {output.strip()[-600:]}")
        self.batch = "".join(re.findall(r"\bbatch_\w+", output)[:1]) or self.batch
        return Outcome(command, "ok")

    def _start(self, program: list[str], text: str, output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            program,
            cwd=self._folder_of(text),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _serve(self, command: Command, text: str) -> Outcome:
        """Starts the server and waits until it is ready."""
        self.stop()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", PORT)) == 0:
                return Outcome(command, "failed", f"port {PORT} is taken by another program; stop that first")
        with self.log.open("wb") as log:
            self.server = self._start(["bash", "-c", f"exec {text}"], text, log)
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=5):
                    return Outcome(command, "ok", "ready")
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        return Outcome(command, "failed", f"never ready: {self.log.read_text(errors='replace')[-600:]}")

    def stop(self) -> None:
        """Ends the server as Ctrl-C would: the signal goes to all of its processes."""
        if self.server is None:
            return
        if self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGINT)
            try:
                self.server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.server.pid, signal.SIGKILL)
                self.server.wait()
        self.server = None

    def _unknown_options(self, command: Command) -> str | None:
        """What `--help` of a module does not have, also where make passes the options on."""
        words = command.words
        if words[0] == "make" and words[1] in OPTIONS_OF:
            variable, module = OPTIONS_OF[words[1]]
            given = [word.partition("=")[2] for word in words[2:] if word.startswith(f"{variable}=")]
            words = ["python", "-m", module, *shlex.split(" ".join(given))]
        if words[:2] != ["python", "-m"]:
            return None
        help_of = [*words[:3], "--help"]
        done = subprocess.run(help_of, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            return f"`{' '.join(help_of)}` fails: {done.stderr.strip()[-300:]}"
        unknown = [word for word in words[3:] if word.startswith("--") and word.partition("=")[0] not in done.stdout]
        return f"there is no option {unknown[0]}" if unknown else None


def environment(scratch: Path) -> dict[str, str]:
    """This environment's programs first, and folders of our own for all that commands keep, but the models."""
    from bankfull.paths import cache_dir

    cache = scratch / "cache"
    cache.mkdir()
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (cache / "models").symlink_to(models)
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "BANKFULL_CACHE": str(cache),
        "BANKFULL_DATA": str(scratch / "data"),
        "BANKFULL_CONFIG": str(scratch / "config"),
        "NO_COLOR": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BANKFULL_")}
    return {**kept, **own}


def prepare(folder: Path) -> None:
    """The files that pages take for granted."""
    folder.mkdir()
    (folder / "requests.jsonl").write_text(json.dumps(LINE) + "\n")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    (folder / "text.txt").write_text("A river runs to the sea, and its channel is as wide as the water needs. " * 4)
    (folder / "in.jsonl").write_text(json.dumps({"prompt": "The river"}) + "\n")


def follow(page: Path, scratch: Path, variables: dict[str, str], only: str) -> list[Outcome]:
    folder = scratch / page.stem
    prepare(folder)
    reader = Page(folder, variables)
    outcomes = []
    try:
        for command in commands(page):
            if only and not (re.search(only, command.text) or re.match("(bankfull|make) serve", command.text)):
                continue
            outcome = reader.run(command)
            outcomes.append(outcome)
            print(row(outcome), flush=True)
    finally:
        reader.stop()
    return outcomes


def row(outcome: Outcome) -> str:
    shown = " ".join(outcome.command.text.split())
    shown = shown if len(shown) <= 90 else f"{shown[:87]}..."
    result = outcome.result + (f": {' '.join(outcome.detail.split())}" if outcome.detail else "")
    return f"| {outcome.command.place} | `{shown}` | {result} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.try_commands", description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages to follow; all of them unless given")
    parser.add_argument("--only", default="", help="a pattern: run only the commands that match, and the servers")
    options = parser.parse_args()
    chosen = [page.resolve() for page in options.pages] or pages()
    scratch = Path(tempfile.mkdtemp(prefix="bankfull-docs-"))
    print("| place | command | result |\n|---|---|---|")
    try:
        variables = environment(scratch)
        outcomes = [one for page in chosen for one in follow(page, scratch, variables, options.only)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    counts = {name: sum(one.result == name for one in outcomes) for name in ("ok", "failed", "not run")}
    print("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()))
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
