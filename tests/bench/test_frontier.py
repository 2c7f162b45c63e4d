"""The frontier's parts: the Pareto set, the kept reference, and the recall score."""

from __future__ import annotations

import re

import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.bench.frontier.measure import WayFigures
from bankfull.bench.frontier.report import frontier_chart, frontier_table, pareto
from bankfull.bench.frontier.ways import RunWay
from bankfull.quality.evaluate import Quality, evaluate, evaluate_kept, keep_reference
from bankfull.quality.recall import MOST_PAIRS, PROMPTS, recall, recall_prompts
from bankfull.text.tokenizer import Tokenizer
from bankfull.train.lm.vocabulary import byte_tokenizer, word_tokenizer
from tests.quick import examples
from tests.tiny import VOCAB, model_of

CPU = torch.device("cpu")
TEXTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (75, 32)]


def figures(name: str, size: int, loss: float, speed: float | None) -> WayFigures:
    quality = Quality(1, 1, 2.0, 2.0, loss, loss, loss, loss, 1.0, 0.0, 1.0, 1.0)
    return WayFigures(RunWay(name), 4.0, size, quality, None, speed, speed, "float32", "float32", "float")


@examples(40)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_a_way_is_on_the_frontier_exactly_if_no_other_beats_it(pairs: list[tuple[int, int]]) -> None:
    ways = [figures(str(number), size, float(loss), None) for number, (size, loss) in enumerate(pairs)]
    kept = pareto(ways, "bytes")
    for way, (size, loss) in zip(ways, pairs, strict=True):
        beaten = any(s <= size and k <= loss and (s, k) != (size, loss) for s, k in pairs)
        assert (way in kept) == (not beaten)
    assert [one.weight_bytes for one in kept] == sorted(one.weight_bytes for one in kept)
    assert pareto(ways, "decode") == [] and frontier_table("m", ways).row_count == len(ways)


def test_the_frontier_of_speed_is_another_than_that_of_bytes() -> None:
    small, fast, neither = figures("a", 1, 0.2, 5.0), figures("b", 2, 0.2, 9.0), figures("c", 3, 0.3, 1.0)
    assert pareto([small, fast, neither], "bytes") == [small] and pareto([small, fast, neither], "decode") == [fast]
    chart = frontier_chart("m", [small, fast, neither], "decode")
    assert [mark.label for mark in chart.marks] == ["a", "b", "c"] and len(chart.series) == 2
    assert [mark.series for mark in chart.marks] == [1, 0, 1]
    drawn = chart.svg()
    for name, color in (("a", 1), ("b", 0), ("c", 1)):
        assert re.search(rf"chart-series-{color}\);[^>]*><title>{name}:", drawn)


def test_a_kept_reference_gives_the_figures_of_a_running_one() -> None:
    model, reference = model_of("llama", torch.bfloat16), model_of("llama", torch.float32)
    kept = keep_reference(reference, TEXTS, opening=(7,), window=32)
    plain, again = evaluate(model, reference, TEXTS, opening=(7,), window=32), evaluate_kept(model, kept)
    for name, value in plain.to_dict().items():
        assert name.endswith("seconds") or abs(again.to_dict()[name] - value) <= 1e-6 * abs(value) + 1e-9, name
    assert again.kl_mean > 0 and evaluate_kept(reference, kept).kl_max < 1e-9


def tokenizer_of(content: dict[str, object]) -> Tokenizer:
    import json

    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))


class Oracle:
    """A model that knows the next token of every prompt, or always says the wrong one."""

    def __init__(self, vocab: int, right: bool) -> None:
        self.vocab, self.right = vocab, right

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        told = hidden[:, 0].long() + (0 if self.right else 1)
        return torch.nn.functional.one_hot(told % self.vocab, self.vocab).float()


def test_recall_counts_answers_that_only_the_prompt_tells(monkeypatch: object) -> None:
    import bankfull.quality.recall as module

    byte = tokenizer_of(byte_tokenizer())
    prompts = recall_prompts(byte, 10_000)
    assert len(prompts) == PROMPTS and all(len(prompt.answers) == MOST_PAIRS for prompt in prompts)
    text = bytes(prompts[0].tokens).decode()
    for places in prompts[0].answers:
        answer = text[places.start : places.stop]
        assert text[: places.start].count(answer) >= 1 and answer.startswith(" ")

    def told(model: object, tokens: tuple[int, ...], device: object) -> torch.Tensor:
        return torch.tensor([*tokens[1:], 0])[:, None]

    monkeypatch.setattr(module, "hidden_states", told)  # type: ignore[attr-defined]
    assert recall(Oracle(256, True), prompts, CPU) == 1 and recall(Oracle(256, False), prompts, CPU) == 0  # type: ignore[arg-type]
    assert recall(Oracle(256, True), [], CPU) is None  # type: ignore[arg-type]


def test_recall_fits_the_context_and_speaks_the_words_of_trained_models() -> None:
    byte = tokenizer_of(byte_tokenizer())
    short = recall_prompts(byte, 200)
    assert short and max(len(prompt.tokens) for prompt in short) <= 200 and recall_prompts(byte, 10) == []
    words = ["_", *(f"k{i}" for i in range(8)), *(f"v{i}" for i in range(8))]
    (first, *_) = recall_prompts(tokenizer_of(word_tokenizer(words)), 64)
    assert len(first.tokens) == 32 and [len(places) for places in first.answers] == [1] * 8
    assert all(words[first.tokens[places.start]].startswith("v") for places in first.answers)
