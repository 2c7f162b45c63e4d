"""Lookahead and Jacobi decoding: the window and the pool follow the algorithm, and no token changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull import LLM
from bankfull.combinations import refuse_impossible
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.lookahead import Jacobi, Lookahead, last_level, window_parents
from bankfull.decode.ngram_pool import NgramPool
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Draft, Strategy, Verdict, View
from bankfull.errors import ConfigError
from bankfull.runtime.device import Cpu
from bankfull.sample.params import SamplingParams
from bankfull.weights.source import open_model
from tests.kit import GREEDY, Bench, device_of
from tests.quick import examples
from tests.test_drafts import GRAMMAR, PARAMS, Ladder
from tests.tiny import VOCAB, folder_of, kit_of, model_of, speaking_folder
from tests.train.looping import looping_folder

NEW = 24
SIZES = st.tuples(st.integers(1, 8), st.integers(2, 5), st.integers(1, 8)).filter(
    lambda size: 1 <= (size[0] + size[2]) * (size[1] - 1) - 1 <= 63
)


class PlainPool:
    """The pool of one row: for each set of first tokens the newest n-grams, the oldest first."""

    def __init__(self, ways: int, sets: int) -> None:
        self.ways, self.sets = ways, sets
        self.kept: dict[int, list[tuple[int, ...]]] = {}

    def add(self, grams: list[tuple[int, ...]]) -> None:
        """The n-grams of one step: at most `ways` enter a set."""
        entered: dict[int, int] = {}
        for gram in grams:
            place = self._set_of(gram[0])
            kept = self.kept.setdefault(place, [])
            if gram in kept or entered.get(place, 0) == self.ways:
                continue
            entered[place] = entered.get(place, 0) + 1
            kept.append(gram)
        for place in entered:
            del self.kept[place][: -self.ways]

    def find(self, first: int) -> list[list[int]]:
        kept = self.kept.get(self._set_of(first), [])[::-1]
        found = [list(gram[1:]) for gram in kept if gram[0] == first]
        return found

    def _set_of(self, token: int) -> int:
        return (token * 2654435769 % 2**32) * self.sets // 2**32


class PlainWindow:
    """The algorithm for one row, in lists."""

    def __init__(self, columns: int, length: int, guesses: int, text: list[int]) -> None:
        self.columns, self.length, self.guesses = columns, length, guesses
        self.pool = PlainPool(guesses, 512)
        self.levels = self._fill(text)

    def _fill(self, text: list[int]) -> list[list[int]]:
        known = len(text)
        number = range((self.length - 1) * self.columns)
        tokens = [text[((known * 40503 + i * 2654435769 & 0x7FFFFFFF) >> 8) % known] for i in number]
        return [tokens[i : i + self.columns] for i in range(0, len(tokens), self.columns)]

    def learn(self, text: list[int], count: int) -> None:
        """The text has grown by `count` tokens."""
        grams = [text[end - self.length : end] for end in range(len(text) - self.length + 2, len(text) + 1)]
        fresh = grams[max(0, len(grams) - count) :]
        self.pool.add([*self.waiting, *(tuple(gram) for gram in fresh if len(gram) == self.length)])

    waiting: list[tuple[int, ...]]

    def advance(self, text: list[int], count: int, chosen: list[int] | None) -> None:
        """`chosen`: the model's tokens after the last level, if the whole window has run."""
        fill = self._fill(text)
        levels = [list(level) for level in self.levels]
        levels[0][0] = text[-count - 1]
        self.waiting = []
        if chosen is not None:
            self.waiting = list(zip(*levels, chosen, strict=True))
            levels = [*levels[1:], chosen]
            count -= 1
        self.learn(text, count + (chosen is not None))
        self.levels = [
            [level[j + count] if j + count < self.columns else fill[i][j] for j in range(self.columns)]
            for i, level in enumerate(levels)
        ]


class Checked(Lookahead):
    """Compares window and pool with the plain algorithm after every step."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.rows: dict[int, PlainWindow] = {}
        self.compared = self.advanced = 0

    def observe(self, view: View, verdict: Verdict) -> None:
        first, fresh = 0, set(self._fresh)
        last = last_level(*self._shape).tolist()
        before = []
        for i, (row, width) in enumerate(zip(view.host_rows, view.lines, strict=True)):
            count = 1 if verdict.counts is None else int(verdict.counts[i])
            chosen = verdict.sampled.tokens[first : first + width].tolist()
            before.append((row, width, count, chosen))
            first += width
        super().observe(view, verdict)
        for row, width, count, chosen in before:
            text = view.tokens[row, : int(view.known[row])].tolist()
            if row in fresh:
                one = self.rows[row] = PlainWindow(*self._shape, text)
                one.waiting = []
                one.learn(text, count)
                continue
            whole = width == 1 + self.width(0)
            self.rows[row].advance(text, count, [chosen[line] for line in last] if whole else None)
            self.advanced += whole

    def propose(self, view: View) -> Draft | None:
        draft = super().propose(view)
        assert draft is not None
        _, length, guesses = self._shape
        for row, tokens in zip(view.host_rows, draft.tokens.tolist(), strict=True):
            known, newest = self.rows[row], int(view.tokens[row, int(view.known[row]) - 1])
            found = known.pool.find(newest)
            expected = [token for gram in found for token in gram]
            split = guesses * (length - 1)
            assert [t for t in tokens[:split] if t] == [t for t in expected if t], "the pool"
            assert tokens[split:] == [t for level in known.levels for t in level][1:], "the window"
            self.compared += 1
        return draft


def bench_of(strategy: Strategy, shape: str, depth: int, **more: object) -> Bench:
    how = (torch.float32, "auto")
    given = {"sched": SchedConfig(rows=4, step_tokens=256), "state": StateConfig(page_tokens=4), **more}
    return Bench(
        model_of(shape, *how), device_of(depth, seed=3), depth, strategy=strategy, kit=kit_of(shape, *how), **given
    )  # type: ignore[arg-type]


def ask(bench: Bench, params: dict[str, SamplingParams], n: int = 1, new: int = NEW, **more: object) -> None:
    rng = random.Random(5)
    for name, each in params.items():
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        bench.add(name, prompt, new, n=n, params=each, seed=rng.randrange(1 << 40), **more)


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("size", ((4, 3, 4), (1, 2, 1), (2, 5, 2), (7, 2, 3), (12, 4, 9)))
def test_window_and_pool_are_those_of_the_plain_algorithm(size: tuple[int, int, int], depth: int) -> None:
    strategy = Checked(*size)
    bench = bench_of(strategy, "llama", depth, max_len=250)
    ask(bench, {"greedy": GREEDY, "sampled": SamplingParams(temperature=0.8)}, n=2, new=180)
    ask(bench, {"few": GREEDY}, drafts=2)
    bench.run(preempt=random.Random(1))
    assert strategy.compared > 100 and strategy.advanced > 50


@examples(25)
@given(SIZES, st.sampled_from(("llama", "gemma")), st.integers(1, 300), st.integers(0, 1))
def test_every_window_gives_the_tokens_of_plain_decoding(
    size: tuple[int, int, int], shape: str, chunk: int, depth: int
) -> None:
    asked = {"greedy": GREEDY, "sampled": SamplingParams(temperature=1.0)}
    benches = [
        bench_of(one, shape, depth, sched=SchedConfig(rows=3, step_tokens=chunk)) for one in (Plain(), Checked(*size))
    ]
    for bench in benches:
        ask(bench, asked, n=2)
        bench.run()
    assert benches[0].tokens == benches[1].tokens


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize(
    ("shape", "make"),
    [
        ("llama", lambda: Lookahead(5, 4, 5)),
        ("gemma", lambda: Lookahead(4, 3, 4)),
        ("llama", lambda: Jacobi(6)),
        ("mamba", lambda: Jacobi(3)),
    ],
)
def test_penalties_samples_and_preemption_change_no_token(shape: str, make: object, depth: int) -> None:
    plain, drafted = bench_of(Plain(), shape, depth), bench_of(make(), shape, depth)  # type: ignore[operator]
    for bench in (plain, drafted):
        ask(bench, PARAMS, n=2)
        bench.run(preempt=random.Random(1))
    assert drafted.tokens == plain.tokens
    for key, extras in plain.extras.items():
        ours = [entry.logprob for extra in drafted.extras[key] for entry in extra.logprobs]
        assert ours == pytest.approx([entry.logprob for extra in extras for entry in extra.logprobs], abs=1e-4)


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("make", (lambda: Lookahead(4, 3, 4), lambda: Jacobi(4)), ids=("lookahead", "jacobi"))
def test_a_grammar_holds_along_every_path(make: object, depth: int) -> None:
    plain, drafted = (bench_of(each, "llama", depth) for each in (Plain(), make()))  # type: ignore[operator]
    for bench in (plain, drafted):
        for i, params in enumerate((GRAMMAR, replace(GRAMMAR, temperature=0.0), GRAMMAR)):
            bench.add(i, [i + 1, 5, 7], NEW, params=params, seed=i, matchers=[Ladder(9 + 5 * i)])
        bench.run(preempt=random.Random(2))
    assert drafted.tokens == plain.tokens and drafted.finish == plain.finish


@pytest.mark.parametrize("choice", ("lookahead,adaptive=false", "lookahead,window=2,ngram=5,guesses=2,adaptive=false"))
def test_looped_text_is_accepted(choice: str) -> None:
    """The model's next token depends on the last one only, so that a pool soon knows every n-gram of the loop."""
    plain, drafted = (
        LLM(str(looping_folder()), device="cpu", memory="16MiB", speculative=one) for one in ("off", choice)
    )
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    texts = [llm.generate(["The river", "A"], params) for llm in (plain, drafted)]
    assert [o.outputs[0].token_ids for o in texts[0]] == [o.outputs[0].token_ids for o in texts[1]]
    totals = drafted.loaded.engine.totals
    assert sum(totals.accepted) > 120, "half of the tokens, at least, were drafts"


def test_jacobi_accepts_tokens_that_do_not_depend_on_the_newest_ones() -> None:
    """A guess is right as soon as it no longer changes. A text in which each token follows from the one before it is
    the worst case: it moves one place per step."""
    llm = LLM(str(looping_folder()), device="cpu", memory="16MiB", speculative="jacobi,width=6,adaptive=false")
    totals = llm.loaded.engine.totals
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    llm.generate(["The river"], params)
    assert totals.steps >= 70 - 2 and sum(totals.accepted) <= 2
    before = totals.steps
    [output] = llm.generate(["The river"], replace(params, logit_bias={7: 100.0}))
    assert output.outputs[0].token_ids == [7] * 70
    assert totals.steps - before <= 3 + 70 / 5


@examples(100)
@given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 9), st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_pool_is_bounded_and_keeps_the_newest_ngrams(
    ways: int, length: int, sets: int, steps: int, rng: random.Random
) -> None:
    rows = 3
    pool = NgramPool(rows, ways, length, torch.device("cpu"), sets)
    plain = [PlainPool(ways, sets) for _ in range(rows)]
    for _ in range(steps):
        chosen = rng.sample(range(rows), rng.randint(1, rows))
        count = rng.randint(1, 9)
        grams = [[tuple(rng.randint(1, 5) for _ in range(length)) for _ in range(count)] for _ in chosen]
        valid = [[rng.random() < 0.8 for _ in range(count)] for _ in chosen]
        pool.add(torch.tensor(chosen), torch.tensor(grams), torch.tensor(valid))
        for row, of_row, good in zip(chosen, grams, valid, strict=True):
            plain[row].add([gram for gram, ok in zip(of_row, good, strict=True) if ok])
        if rng.random() < 0.2:
            gone = rng.randrange(rows)
            pool.clear(torch.tensor([gone]))
            plain[gone] = PlainPool(ways, sets)
        for first in range(1, 6):
            found = pool.find(torch.arange(rows), torch.full((rows,), first))
            assert found.shape == (rows, ways, length - 1)
            for row in range(rows):
                assert [gram for gram in found[row].tolist() if any(gram)] == plain[row].find(first)


@given(SIZES)
def test_the_window_is_a_tree(size: tuple[int, int, int]) -> None:
    """Node (level i, column j) is at depth i + j, and the last level ends every column."""
    columns, length, guesses = size
    parents, last = window_parents(*size).tolist(), last_level(*size).tolist()
    assert len(parents) == (columns + guesses) * (length - 1) - 1
    depths = [0]
    for node, parent in enumerate(parents):
        assert -1 <= parent < node
        depths.append(depths[parent + 1] + 1)
    split = guesses * (length - 1)
    assert depths[1 : 1 + split] == [*range(1, length)] * guesses
    window = [0, *depths[1 + split :]]
    assert window == [level + column for level in range(length - 1) for column in range(columns)]
    assert [depths[line] for line in last] == [length - 2 + column for column in range(columns)]
    for column, line in enumerate(last):
        node = line - 1
        for _ in range(length - 2):
            node = parents[node]
        assert node == (split + column - 1 if column else -1), "a column begins on level 0"


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("lookahead,window=16,ngram=4,guesses=6", "65 draft tokens, but a step verifies at most 63"),
        ("lookahead,ngram=1", "choose a window of at least 1"),
        ("lookahead:model", "takes no model"),
        ("lookahead,width=3", "has no option 'width'; its options are window, ngram, guesses"),
        ("jacobi,width=64", "width must be a whole number from 1 to 63"),
    ],
)
def test_windows_that_no_step_can_verify_are_refused(choice: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(speaking_folder()), speculative=choice)


def test_a_tree_is_refused_for_recurrent_state() -> None:
    with pytest.raises(ConfigError, match=r"recurrent state verifies chains.*choose speculative=jacobi"):
        refuse_impossible(open_model(folder_of("mamba")), Cpu(), RunConfig(speculative="lookahead"))
