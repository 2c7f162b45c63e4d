"""Whether speculative decoding is ever slower: python -m benchmarks.never_slower MODEL --speculative draft:OTHER

Two engines in one process, one of them without drafts, answer the same prompts in turns, one request at a time. A pair
is one answer of each; its ratio is the time without drafts over the time with them, so less than 1 is slower. `cold`:
the first answer after everything measured was forgotten, as after a start. `warm`: the answers after that. The prefix
cache is off, so that each answer computes its prompt. `adversarial` prompts repeat themselves and then do not, or ask
for text that nothing predicts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from bankfull.bench.prompt_sets import prompt_set
from bankfull.decode.gain import StepCosts
from bankfull.decode.speculating import Speculating
from bankfull.drafters import adaptive_width
from bankfull.llm import LLM
from bankfull.sample.params import SamplingParams
from bankfull.speculation import SpeculativeChoice
from bankfull.types import StepPlan

ADVERSARIAL = (
    "red red red red red red red red red red red red. Now write one long sentence without the word before.",
    "Write twenty unrelated words in no order, then twenty others, and never use a word twice.",
    "1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8. Continue with numbers that nobody could guess.",
    "Repeat `alpha beta gamma` twice. Then tell a story in which each sentence begins with another letter.",
)
CODE = (
    "Write a Python function that merges two sorted lists, with a docstring and three assertions.",
    "Write a Python class for a queue on two stacks, with type hints.",
    "Write a Python function that parses a CSV line with quotes, without the csv module.",
    "Write a Python function that finds all primes below n with a sieve.",
)
TEXTS = {"code": "code", "chat": "chat", "copying": "code-edit", "adversarial": "adversarial"}
MOST_PROMPTS = 4
"""Of each kind, in turns."""


@dataclass(frozen=True, slots=True)
class Pair:
    kind: str
    cold: bool
    plain_seconds: float
    seconds: float
    same: bool
    """Whether both gave the same tokens."""
    steps: int
    """Steps with drafts allowed; `plain_steps`: without."""
    plain_steps: int
    drafted: int
    accepted: int
    passes: int
    """Passes of the drafter's own model."""

    @property
    def ratio(self) -> float:
        return self.plain_seconds / self.seconds


class Counted:
    """An engine whose steps and drafter's passes are counted."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.steps, self.passes = llm, 0, 0
        self.engine = llm.loaded.engine
        self.engine.on_launch.append(self._launched)
        steps = getattr(self.engine.strategy, "_steps", None)
        if steps is not None:
            run = steps.run

            def counted(batch: Any) -> Any:
                self.passes += 1
                return run(batch)

            steps.run = counted

    def _launched(self, plan: StepPlan) -> None:
        self.steps += 1

    def answer(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
        begun = time.perf_counter()
        (output,) = self.llm.generate([prompt], params)
        return output.outputs[0].token_ids, time.perf_counter() - begun

    def forget(self, choice: SpeculativeChoice) -> None:
        """Everything that was measured, as after a start."""
        engine = self.engine
        chooser = adaptive_width(choice.then or choice, engine.strategy)
        engine.adaptive = None if chooser is None else Speculating(chooser, engine.strategy)
        if engine.drafting is not None:
            engine.drafting.costs = StepCosts()


def texts_of(kind: str) -> Sequence[str]:
    name = TEXTS[kind]
    return {"adversarial": ADVERSARIAL, "code": CODE}.get(name) or prompt_set(name)


def measured(
    plain: Counted, drafting: Counted, kind: str, choice: SpeculativeChoice, pairs: int, output: int
) -> list[Pair]:
    front = plain.llm.loaded.frontend
    texts = texts_of(kind)[:MOST_PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=output)
    found = []
    for number in range(2 * pairs):
        cold = number < pairs  # of each pair, everything is forgotten; then the rest goes on with what is known
        text = texts[number % len(texts)]
        asked = front.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        if cold or number == pairs:
            drafting.forget(choice)
        if number == pairs:  # the first one after a start is no warm one
            drafting.answer(asked, params)
        totals = drafting.engine.totals
        before = sum(totals.drafted), sum(totals.accepted), plain.steps, drafting.steps, drafting.passes
        arms = (plain, drafting) if number % 2 == 0 else (drafting, plain)
        answers = {id(arm): arm.answer(asked, params) for arm in arms}
        (tokens, without), (others, seconds) = answers[id(plain)], answers[id(drafting)]
        found.append(
            Pair(
                kind,
                cold,
                without,
                seconds,
                tokens == others,
                drafting.steps - before[3],
                plain.steps - before[2],
                sum(totals.drafted) - before[0],
                sum(totals.accepted) - before[1],
                drafting.passes - before[4],
            )
        )
    return found


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    ratios = sorted(pair.ratio for pair in pairs)
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "kind": pairs[0].kind,
        "cold": pairs[0].cold,
        "pairs": len(pairs),
        "ratio": {"median": median(ratios), "quartiles": [low, high]},
        "same_tokens": all(pair.same for pair in pairs),
        "steps_without_drafts": sum(pair.plain_steps for pair in pairs),
        "steps": sum(pair.steps for pair in pairs),
        "drafter_passes": sum(pair.passes for pair in pairs),
        "drafted": sum(pair.drafted for pair in pairs),
        "accepted": sum(pair.accepted for pair in pairs),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.never_slower", description="Time without drafts over time with them, in pairs."
    )
    parser.add_argument("model")
    parser.add_argument("--speculative", default="auto", help="any value of the engine's option (default: auto)")
    parser.add_argument("--kind", action="append", choices=sorted(TEXTS), help="may be repeated (default: all)")
    parser.add_argument("--pairs", type=int, default=7, help="cold ones, and as many warm ones, of each kind")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--memory", default="1GiB", help="for the pages of each engine")
    parser.add_argument("--json", action="store_true", help="every pair, and the summaries")
    asked = parser.parse_args(arguments)
    options: dict[str, Any] = {"memory": asked.memory, "prefix_cache": False, "max_model_len": asked.max_len, "rows": 2}
    options |= {} if asked.threads is None else {"threads": asked.threads}
    plain = Counted(LLM(asked.model, speculative="off", **options))
    drafting = Counted(LLM(asked.model, speculative=asked.speculative, **options))
    choice = SpeculativeChoice.parse(asked.speculative)
    report: dict[str, Any] = {"model": asked.model, "speculative": asked.speculative, "pairs": [], "summaries": []}
    print(
        "" if asked.json else f"{'prompts':<12} {'':<5} {'median':>7} {'quartiles':>14} {'steps':>12} {'accepted':>13}"
    )
    for kind in asked.kind or list(TEXTS):
        pairs = measured(plain, drafting, kind, choice, asked.pairs, asked.output_len)
        report["pairs"] += [asdict(pair) | {"ratio": pair.ratio} for pair in pairs]
        for cold in (True, False):
            one = summary([pair for pair in pairs if pair.cold == cold])
            report["summaries"].append(one)
            if not asked.json:
                low, high = one["ratio"]["quartiles"]
                steps = f"{one['steps']}/{one['steps_without_drafts']}"
                print(
                    f"{kind:<12} {'cold' if cold else 'warm':<5} {one['ratio']['median']:6.2f}x {low:6.2f}-{high:.2f}x "
                    f"{steps:>12} {one['accepted']:>6}/{one['drafted']}"
                )
    if asked.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
