"""python -m benchmarks.pipeline_bubble --model smollm2 --stages 2 --steps 1,2,4,8

The idle share of a pipeline's first stage, measured beside (p - 1) / (m + p - 1). Each of m prompts is one step of the
same size, so that m steps pass p stages. A stage's time for one step is the slope of the time over m.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import median
from time import perf_counter

from bankfull import LLM, SamplingParams
from bankfull.runtime.host import usable_cores

REPS = 5


def seconds(llm: LLM, steps: int, tokens: int, rng: random.Random) -> float:
    """For `steps` prompts of `tokens` random tokens each: no prefix is ever cached."""
    vocab = llm.loaded.model.vocab
    prompts = [{"prompt_token_ids": rng.choices(range(vocab), k=tokens)} for _ in range(steps)]
    begun = perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
    return perf_counter() - begun


def slope(found: dict[int, float]) -> float:
    """Seconds per step, by least squares."""
    mean_m, mean_t = (sum(values) / len(found) for values in (found, found.values()))
    above = sum((m - mean_m) * (t - mean_t) for m, t in found.items())
    return above / sum((m - mean_m) ** 2 for m in found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=256, help="of each step")
    asked = parser.parse_args(arguments)
    counts, rng = [int(count) for count in asked.steps.split(",")], random.Random(0)
    llm = LLM(asked.model, parallel=f"pp={asked.stages}", rows=max(counts), step_tokens=asked.tokens)
    seconds(llm, asked.stages, asked.tokens, rng)  # compiles, and commits memory
    found = {m: median(seconds(llm, m, asked.tokens, rng) for _ in range(REPS)) for m in counts}
    each = slope(found)
    print(f"{asked.model}, {asked.stages} stages on {usable_cores()} cores, steps of {asked.tokens} tokens")
    print(f"{'steps':>6} {'seconds':>9} {'idle':>7} {'formula':>8}")
    for m, taken in found.items():
        formula = (asked.stages - 1) / (m + asked.stages - 1)
        print(f"{m:>6} {taken:>9.3f} {1 - m * each / taken:>7.1%} {formula:>8.1%}")


if __name__ == "__main__":
    main()
