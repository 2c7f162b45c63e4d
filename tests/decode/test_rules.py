"""The rules that accept drafts, through the engine: rejection keeps the distribution, typical acceptance does not, and
greedy requests get the tokens of plain decoding from both."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import scipy
import torch
from torch import Tensor

from bankfull import LLM
from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.draft import DraftModel
from bankfull.decode.medusa import Medusa
from bankfull.decode.plain import Plain
from bankfull.decode.rules import RULES, RejectionSampling, TypicalAcceptance
from bankfull.decode.strategy import LogitsHead, OwnModel, Strategy
from bankfull.runtime import naive
from bankfull.sample.params import SamplingParams
from tests.decode.test_medusa import random_heads
from tests.kit import Bench, device_of
from tests.test_drafts import GRAMMAR, PARAMS, Ladder
from tests.tiny import DEVICE, VOCAB, kit_of, model_of, speaking_folder

HOW = (torch.float32, "auto")
CHAIN, TREE = (1, 1, 1), (3, 2, 1)
IDS = (3, 11, 20, 47, 80)
"""The tokens that may be sampled."""
PROMPT = (5, 9, 2, 61)
WARM = SamplingParams(temperature=5.0, allowed_token_ids=list(IDS))
SAMPLES = 2048


class NoisyHead:
    """A head whose logits differ from another one's by a linear function of the hidden state."""

    def __init__(self, head: LogitsHead, spread: float) -> None:
        self.head = head
        self._noise = torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(1)).to(DEVICE) * spread

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) + hidden @ self._noise

    def best(self, hidden: Tensor) -> Tensor:
        return self(hidden).argmax(-1)


def drafter(branching: Sequence[int], rule: str, spread: float = 1.5) -> DraftModel:
    """The target itself, with other logits."""
    model = copy.copy(model_of("llama", *HOW))
    model.head = NoisyHead(model.head, spread)  # type: ignore[assignment]
    return DraftModel(OwnModel(model, kit_of("llama", *HOW)), branching, RULES[rule]())


def bench_of(strategy: Strategy, depth: int, rows: int = 4) -> Bench:
    sched, state = SchedConfig(rows=rows, step_tokens=512), StateConfig(page_tokens=4)
    return Bench(
        model_of("llama", *HOW),
        device_of(depth, seed=3),
        depth,
        sched,
        state,
        strategy,
        2000,
        kit=kit_of("llama", *HOW),
    )


@lru_cache
def sampled(branching: Sequence[int], rule: str, depth: int = 0) -> Bench:
    """Many samples of a prompt. A sample's first step has no drafts, or arbitrary ones."""
    bench = bench_of(drafter(branching, rule), depth, 64)
    for i in range(SAMPLES // 64):
        bench.add(i, PROMPT, 6, n=64, params=WARM, seed=i)
    bench.run()
    return bench


@lru_cache
def chances() -> dict[tuple[int, ...], float]:
    """The probability of each beginning of three tokens, from whole passes of the model."""
    model, found = model_of("llama", *HOW), {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, chance in found.items():
            logits = naive.logits(model, [*PROMPT, *path], DEVICE)[-1].cpu().double()[list(IDS)]
            p = (logits / WARM.temperature).softmax(-1).tolist()
            longer |= {(*path, token): chance * each for token, each in zip(IDS, p, strict=True)}
        found = longer
    return found


def fit(bench: Bench) -> float:
    """The p-value of the samples under plain decoding's distribution; rare beginnings are counted together."""
    seen = Counter(tuple(tokens[:3]) for tokens in bench.tokens.values())
    cells = list(itertools.product(IDS, repeat=3))
    assert sum(seen[cell] for cell in cells) == SAMPLES
    common = [cell for cell in cells if chances()[cell] * SAMPLES >= 5]
    expected = [chances()[cell] * SAMPLES for cell in common]
    counts = [seen[cell] for cell in common]
    expected, counts = [*expected, SAMPLES - sum(expected)], [*counts, SAMPLES - sum(counts)]
    return float(scipy.stats.chisquare(counts, expected).pvalue)


@pytest.mark.few(1)
@pytest.mark.parametrize(("branching", "depth"), ((CHAIN, 0), (TREE, 1)), ids=("chain", "tree"))
def test_rejection_has_the_distribution_of_plain_decoding(branching: Sequence[int], depth: int) -> None:
    bench = sampled(branching, "rejection", depth)
    drafted, accepted = bench.engine.totals.drafted, bench.engine.totals.accepted
    assert 0.1 < accepted[0] / drafted[0] < 0.9, "drafts are accepted and rejected"
    assert fit(bench) > 1e-3


@pytest.mark.full
def test_the_fit_notices_a_lossy_rule() -> None:
    assert fit(sampled(CHAIN, "typical")) < 1e-9
    assert fit(sampled(CHAIN, "same")) > 1e-3


@pytest.mark.full
def test_rejection_accepts_more_sampled_drafts_than_the_race() -> None:
    shares = {}
    for rule in RULES:
        bench = bench_of(drafter(CHAIN, rule), 0, 64)
        for i in range(2):
            bench.add(i, PROMPT, 60, n=64, params=WARM, seed=i)
        bench.run()
        shares[rule] = sum(bench.engine.totals.accepted) / sum(bench.engine.totals.drafted)
    assert shares["same"] < shares["rejection"] < shares["typical"], shares


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("branching", (CHAIN, TREE), ids=("chain", "tree"))
def test_a_drafter_equal_to_the_target_is_always_accepted(branching: Sequence[int], depth: int) -> None:
    """Also after preemptions and forks, with penalties, biases and truncation."""
    bench = bench_of(drafter(branching, "rejection", 0.0), depth)
    params = {name: each for name, each in PARAMS.items() if name != "greedy penalties"}
    rng = random.Random(5)
    for name, each in params.items():
        bench.add(name, [rng.randrange(VOCAB) for _ in range(9)], 25, n=2, params=each, seed=rng.randrange(1 << 40))
    bench.run()
    steps = bench.engine.totals.drafted[0]
    # Where a row has just entered, nothing was drafted.
    assert sum(bench.engine.totals.accepted) > 0.8 * steps * len(branching)


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("rule", ("rejection", "typical"))
@pytest.mark.parametrize("kind", ("chain", "tree", "medusa"))
def test_greedy_requests_get_the_tokens_of_plain_decoding(kind: str, rule: str, depth: int) -> None:
    """Beside sampled requests, with and without penalties, and after preemptions."""
    greedy = SamplingParams(temperature=0.0, logprobs=2)
    asked = {"plain": greedy, "penalties": replace(greedy, repetition_penalty=1.4, frequency_penalty=0.3)}

    def run(strategy: Strategy) -> Bench:
        bench = bench_of(strategy, depth)
        rng = random.Random(5)
        for name, params in (*asked.items(), *((f"sampled {i}", WARM) for i in range(3))):
            bench.add(name, [rng.randrange(VOCAB) for _ in range(9)], 25, params=params, seed=rng.randrange(1 << 40))
        bench.add("grammar", [4], 25, params=replace(GRAMMAR, temperature=0.0), seed=1, matchers=[Ladder(12)])
        bench.run(preempt=random.Random(1))
        return bench

    made = Medusa(random_heads(), 9, rule=RULES[rule]()) if kind == "medusa" else None
    drafted = run(made or drafter(CHAIN if kind == "chain" else TREE, rule, 0.2))
    plain = run(Plain())
    for name in (*asked, "grammar"):
        assert drafted.tokens[name, 0] == plain.tokens[name, 0], name
    for name in asked:
        ours, theirs = (
            [(entry.logprob, *entry.top_logprobs) for extra in bench.extras[name, 0] for entry in extra.logprobs]
            for bench in (drafted, plain)
        )
        assert torch.tensor(ours) == pytest.approx(torch.tensor(theirs), abs=1e-4)
    assert sum(drafted.engine.totals.accepted) > 0 or kind == "medusa"


@pytest.mark.parametrize("rule", ("rejection", "typical"))
@pytest.mark.parametrize("branching", (CHAIN, TREE), ids=("chain", "tree"))
def test_logprobs_belong_to_the_tokens_that_were_accepted(branching: Sequence[int], rule: str) -> None:
    bench = bench_of(drafter(branching, rule), 0)
    for i in range(4):
        bench.add(i, PROMPT, 20, params=replace(WARM, logprobs=1), seed=i)
    bench.run()
    assert sum(bench.engine.totals.accepted) > 10
    for i in range(4):
        tokens = bench.tokens[i, 0]
        logits = naive.logits(model_of("llama", *HOW), [*PROMPT, *tokens], DEVICE)[len(PROMPT) - 1 : -1].cpu()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found = [entry.logprob for extra in bench.extras[i, 0] for entry in extra.logprobs]
        assert torch.tensor(found) == pytest.approx(expected, abs=1e-3)


def test_rules_are_chosen_by_name(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = str(speaking_folder()), str(speaking_folder(6))
    for choice, kind in (("rejection", RejectionSampling), ("typical", TypicalAcceptance)):
        llm = LLM(target, dtype="float32", memory="16MiB", speculative=f"draft:{draft},depth=3,rule={choice}")
        assert isinstance(llm.loaded.engine.strategy._rule, kind)  # type: ignore[attr-defined]
        assert ("rule=typical is lossy" in caplog.text) == (choice == "typical")
        [output] = llm.generate(["The river"], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1))
        assert len(output.outputs[0].token_ids) == 12
