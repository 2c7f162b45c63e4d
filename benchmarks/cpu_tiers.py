"""python -m benchmarks.cpu_tiers: what tiers of KV state are worth on a CPU.

- restart: the time to the first token of a long prompt, cold, and by a new process that finds it on disk;
- turns: conversations whose contexts exceed the pool four times take turns, with a disk tier of four times the pool
  (state is in host memory already). Cached prompt tokens as a share of what an unbounded cache gives.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic, perf_counter
from typing import Any

from bankfull import LLM, SamplingParams

PAGE = 16
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
ANSWER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def prompt_of(length: int, seed: int) -> list[int]:
    numbers = Random(seed)
    return [numbers.randrange(100, 20000) for _ in range(length)]


def settle(llm: LLM) -> None:
    """Wait for write-behind."""
    engine, until = llm.loaded.engine, monotonic() + 60
    while engine.busy and monotonic() < until:
        engine.step()


def first_token(model: str, tokens: int, seed: int, folder: str) -> dict[str, float]:
    """Seconds to the first token of a prompt in this process, after another prompt has warmed it up."""
    llm = LLM(model, kv_disk=f"2GiB:{folder}", speculative="off")
    llm.generate([prompt_of(64, 10**6)], FIRST)
    begun = perf_counter()
    [found] = llm.generate([prompt_of(tokens, seed)], FIRST)
    taken = perf_counter() - begun
    settle(llm)
    assert llm.loaded.engine.runner.mover is not None
    llm.loaded.engine.runner.mover.close()
    assert found.metrics is not None
    return {"seconds": taken, "cached": found.metrics.cached_tokens}


def restart(model: str, tokens: int, pairs: int) -> dict[str, Any]:
    cold, warm = [], []
    for seed in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            for times in (cold, warm):
                command = [sys.executable, "-m", "benchmarks.cpu_tiers", "--child", folder, "--model", model]
                command += ["--tokens", str(tokens), "--seed", str(seed)]
                ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                times.append(json.loads(ran.stdout.splitlines()[-1]))
    assert not any(one["cached"] for one in cold) and all(one["cached"] for one in warm)
    first, again = (median(one["seconds"] for one in times) for times in (cold, warm))
    return {
        "prompt tokens": tokens,
        "cached after the restart": warm[0]["cached"],
        "cold first token, s": first,
        "first token after the restart, s": again,
        "ratio": again / first,
    }


def hits(model: str, conversations: int, rounds: int, growth: int, **options: Any) -> float:
    """Cached prompt tokens as a share of all."""
    llm = LLM(model, page_tokens=PAGE, rows=4, speculative="off", dtype="float32", **options)
    known = [prompt_of(growth, seed) for seed in range(conversations)]
    cached = total = 0
    for turn in range(rounds):
        for number in range(conversations):
            [found] = llm.generate([known[number]], ANSWER)
            assert found.metrics is not None
            cached, total = cached + found.metrics.cached_tokens, total + len(known[number])
            known[number] += [*found.outputs[0].token_ids, *prompt_of(growth, 1000 * turn + number)]
    return cached / total


def turns(model: str, conversations: int, rounds: int, growth: int) -> dict[str, Any]:
    tokens = conversations * rounds * (growth + ANSWER.max_tokens)
    sample = LLM(model, page_tokens=PAGE, dtype="float32")
    nbytes = tokens * sample.loaded.engine.scheduler.state.layout.token_bytes
    pool = nbytes // 4
    unbounded = hits(model, conversations, rounds, growth, memory=str(2 * nbytes))
    device = hits(model, conversations, rounds, growth, memory=str(pool))
    with tempfile.TemporaryDirectory() as folder:
        lower = hits(model, conversations, rounds, growth, memory=str(pool), kv_disk=f"{4 * pool}:{folder}")
    return {
        "conversations": conversations,
        "tokens of their contexts": tokens,
        "hit rate, unbounded": unbounded,
        "hit rate, device alone": device,
        "hit rate with a disk tier": lower,
        "of the unbounded cache's": lower / unbounded,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000, help="of the long prompt")
    parser.add_argument("--pairs", type=int, default=3, help="cold and restarted runs")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--growth", type=int, default=128, help="new prompt tokens of a turn")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(first_token(asked.model, asked.tokens, asked.seed, asked.child)))
        return 0
    report = {
        "restart": restart(asked.model, asked.tokens, asked.pairs),
        "turns": turns(asked.model, asked.conversations, asked.rounds, asked.growth),
    }
    for part, found in report.items():
        print(part)
        for name, value in found.items():
            print(f"  {name:34} {value:,.4g}")
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
