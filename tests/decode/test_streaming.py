"""Speculative Streaming: streams change no token, compute what a plain reference computes, and need few KV slots."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.candidate_tree import best_tree
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Draft, Strategy, Verdict, View
from bankfull.decode.stream_tree import Continuations, FixedTree, grown_tree
from bankfull.decode.streaming import StreamDrafter, Streaming, TreeStreaming
from bankfull.decode.streams import CANDIDATES
from bankfull.errors import BankfullError, ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.loading import load
from bankfull.sample.params import SamplingParams
from bankfull.weights.streams import Map, StreamWeights
from tests.kit import GREEDY, Bench, device_of
from tests.quick import examples
from tests.test_drafts import GRAMMAR, PARAMS, Ladder
from tests.tiny import VOCAB, config_of, folder_of, kit_of, model_of, speaking_folder

HIDDEN, OUTPUTS, MIXED = 32, 64, 32
NEW = 24


def random_streams(
    seed: int = 0, *, count: int = 4, layers: int = 2, hidden: int = HIDDEN, vocab: int = VOCAB, spread: float = 0.1
) -> StreamWeights:
    """Streams that guess at random."""
    generator = torch.Generator().manual_seed(seed)
    rank = 3 + seed % 4

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    def low_rank(inner: int, outer: int) -> tuple[Tensor, Tensor]:
        return drawn(rank, inner), drawn(outer, rank)

    rng = random.Random(seed)
    sites = {"qkv": (hidden, OUTPUTS), "out": (MIXED, hidden), "feed": (hidden, hidden)}
    return StreamWeights(
        drawn(count, hidden),
        low_rank(2 * hidden, hidden),
        low_rank(2 * hidden, hidden),
        [{site: low_rank(*sizes) for site, sizes in sites.items()} for _ in range(layers)],
        torch.tensor(sorted(rng.sample(range(vocab), vocab * 2 // 3))),
        vocab,
        [sorted((rng.random() / 12 for _ in range(10)), reverse=True) for _ in range(count)],
    )


class Observed:
    """Counts accepted drafts, and keeps the proposals."""

    accepted = 0

    def observe(self, view: View, verdict: Verdict) -> None:
        if verdict.counts is not None:
            self.accepted += int((verdict.counts - 1).sum())


class ObservedStreaming(Observed, Streaming):
    pass


class ObservedTreeStreaming(Observed, TreeStreaming):
    pass


def bench_of(strategy: Strategy, shape: str = "llama", depth: int = 0, **more: object) -> Bench:
    how = (torch.float32, "auto", more.pop("kv_dtype", None))
    chosen = {"sched": SchedConfig(rows=4, step_tokens=64), "state": StateConfig(page_tokens=4), **more}
    return Bench(
        model_of(shape, *how),  # type: ignore[arg-type]
        device_of(depth, seed=3),
        depth,
        strategy=strategy,
        kit=kit_of(shape, *how),  # type: ignore[arg-type]
        **chosen,  # type: ignore[arg-type]
    )


def ask(bench: Bench, params: dict[str, SamplingParams], n: int = 1) -> Bench:
    rng = random.Random(5)
    for name, each in params.items():
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        bench.add(name, prompt, NEW, n=n, params=each, seed=rng.randrange(1 << 40))
    return bench


def strategies_of(kind: str) -> list[StreamDrafter]:
    if kind == "grown":
        return [
            ObservedTreeStreaming(random_streams(seed, count=2 + seed, layers=1 + seed % 2), nodes)
            for seed, nodes in ((0, 3), (1, 16), (2, 40))
        ]
    return [
        ObservedStreaming(random_streams(seed, count=2 + seed, layers=1 + seed % 2), nodes, kind)
        for seed, nodes in ((0, 3), (1, 16), (2, 63))
    ]


# -- tokens


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("shape", ("llama", "gemma"))
@pytest.mark.parametrize("kind", ("sparse", "chain", "grown"))
def test_tokens_and_logprobs_are_those_without_streams(shape: str, kind: str, depth: int) -> None:
    """With penalties, biases, truncation, `n` and preemption. Poisoned pages would give NaN if a step read a slot that
    it has not written."""
    plain = ask(bench_of(Plain(), shape, depth), PARAMS, n=2)
    plain.run(preempt=random.Random(1))
    accepted = 0
    for strategy in strategies_of(kind):
        found = ask(bench_of(strategy, shape, depth), PARAMS, n=2)
        found.run(preempt=random.Random(1))
        assert found.tokens == plain.tokens and found.finish == plain.finish
        for key, extras in plain.extras.items():
            mine = [line.logprob for extra in found.extras[key] for line in extra.logprobs]
            assert mine == pytest.approx([line.logprob for extra in extras for line in extra.logprobs], abs=1e-4)
        accepted += strategy.accepted  # type: ignore[attr-defined]
    assert accepted > 0, "no draft was ever accepted"


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("kind", ("sparse", "grown"))
def test_streams_are_verified_under_a_grammar(kind: str, depth: int) -> None:
    found = []
    for strategy in (Plain(), strategies_of(kind)[1]):
        bench = bench_of(strategy, "llama", depth)
        for i, params in enumerate((GRAMMAR, replace(GRAMMAR, temperature=0.0), GRAMMAR)):
            bench.add(i, [i + 1, 5, 7], NEW, params=params, seed=i, matchers=[Ladder(9 + 5 * i)])
        bench.add("free", [3, 4], NEW)
        bench.run(preempt=random.Random(2))
        found.append((bench.tokens, bench.finish))
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_dtype", (None, torch.int8, torch.bfloat16))
def test_streams_read_pages_of_any_dtype(kv_dtype: torch.dtype | None) -> None:
    found = []
    for strategy in (Plain(), Streaming(random_streams(1), 12)):
        bench = ask(bench_of(strategy, "gemma", kv_dtype=kv_dtype), PARAMS)
        bench.run(preempt=random.Random(3))
        found.append(bench.tokens)
    assert found[0] == found[1]


def test_a_prefix_hit_holds_no_keys_of_streams() -> None:
    plain = bench_of(Plain())
    drafted = bench_of(Streaming(random_streams(1, spread=3.0), 12))
    prompt = [(7 * i) % VOCAB for i in range(40)]
    for bench in (plain, drafted):
        bench.add("first", prompt, NEW)
        bench.run()
        longer = [*prompt, *bench.tokens["first", 0]]
        bench.add("second", longer, NEW)
        bench.run()
    assert drafted.tokens == plain.tokens
    assert drafted.cached["second"] > 50, "the answer with its drafts is in the cache, too"


# -- what the streams compute


def unit(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class PlainLlama:
    """The tiny Llama and its streams as written in a textbook, in float64: no pages, no batches, no kernels."""

    def __init__(self, streams: StreamWeights) -> None:
        tensors = load_file(folder_of("llama") / "model.safetensors")
        self.weights = {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}
        self.streams, self.layers, self.config = streams, 3, config_of("llama")
        self.first = self.layers - len(streams.layers)

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """(streams, d) the input of the head. The last token is the newest one."""
        streams, known = self.streams, len(tokens) - 1
        x = self.weights["embed_tokens.weight"][torch.tensor(tokens)]
        main, newest, cache = x[:-1], x[-1], {}
        for layer in range(self.layers):
            if layer == self.first:
                entering = main[-1]
            q, k, v = self.project(layer, main, torch.arange(known))
            cache[layer] = k, v
            hidden = torch.ones(known, known, dtype=torch.bool).triu(1)
            main = self.rest(layer, main, self.attend(q, k, v, hidden))
        down, up = (part.double() for part in streams.entry)
        mapped = up @ silu(down @ torch.cat((unit(entering), unit(newest))))
        x = entering + mapped + streams.embeddings.double()
        for layer, maps in enumerate(streams.layers, self.first):
            q, k, v = self.project(layer, x, known + torch.arange(streams.count), maps)
            k, v = (torch.cat((before, own)) for before, own in zip(cache[layer], (k, v), strict=True))
            hidden = torch.ones(streams.count, known + streams.count, dtype=torch.bool).triu(known + 1)
            x = self.rest(layer, x, self.attend(q, k, v, hidden), maps)
        return self.norm(x, "norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            self.weights[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        )

    def project(self, layer: int, x: Tensor, at: Tensor, maps: Mapping[str, Map] | None = None) -> tuple[Tensor, ...]:
        x, name = self.norm(x, f"layers.{layer}.input_layernorm"), f"layers.{layer}.self_attn"
        whole = x @ torch.cat([self.weights[f"{name}.{part}_proj.weight"] for part in "qkv"]).T
        if maps is not None:
            down, up = (part.double() for part in maps["qkv"])
            whole = whole + x @ down.T @ up.T
        q, k, v = whole.unflatten(1, (-1, 8)).split((4, 2, 2), 1)
        angles = at[:, None].double() / 10000.0 ** (torch.arange(4).double() / 4)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def turned(part: Tensor) -> Tensor:
            there = torch.complex(part[..., :4], part[..., 4:]) * turn
            return torch.cat((there.real, there.imag), -1)

        return turned(q), turned(k), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)

    def rest(self, layer: int, x: Tensor, mixed: Tensor, maps: Mapping[str, Map] | None = None) -> Tensor:
        name = f"layers.{layer}"
        branch = mixed @ self.weights[f"{name}.self_attn.o_proj.weight"].T
        if maps is not None:
            down, up = (part.double() for part in maps["out"])
            branch = branch + mixed @ down.T @ up.T
        x = x + branch
        inner = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up, down = (self.weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        branch = (silu(inner @ gate.T) * (inner @ up.T)) @ down.T
        if maps is not None:
            down, up = (part.double() for part in maps["feed"])
            branch = branch + silu(inner @ down.T) @ up.T
        return x + branch


class Compared(Streaming):
    """Compares the streams of every proposal with the reference."""

    chances = True
    compared = 0

    def prepare(self, target: Decoder) -> None:
        super().prepare(target)
        self.reference, self.head = PlainLlama(self.streams), target.head.stored().dequantize(torch.float64)

    def propose(self, view: View) -> Draft | None:
        seen: list[Continuations] = []
        with pytest.MonkeyPatch.context() as patch:
            continuations, states = self.stack.continuations, list[Tensor]()

            def kept(hidden: Tensor, present: Tensor | None, chances: bool) -> Continuations:
                states.append(hidden)
                seen.append(continuations(hidden, present, chances))
                return seen[-1]

            patch.setattr(self.stack, "continuations", kept)
            draft = super().propose(view)
            by_logits = self._fixed.tokens(continuations(states[0], None, chances=False))
        room = self._steps.room(view.host_rows, self.ahead).tolist()
        for i, (row, slots) in enumerate(zip(view.host_rows, room, strict=True)):
            if min(room) and slots == self.ahead:  # others have fewer streams, at the end of a sequence
                expected = self.reference.hidden(view.tokens[row, : int(view.known[row])].tolist())
                torch.testing.assert_close(states[0][i], expected, rtol=1e-8, atol=1e-8)
                self.compare(seen[0], i, expected)
                assert draft is not None and torch.equal(by_logits[i], draft.tokens[i]), "logits give the same order"
                self.compared += 1
        return draft

    def compare(self, found: Continuations, row: int, hidden: Tensor) -> None:
        """Candidates, their logprobs, and those of one after another, from the hidden states."""
        ids, most = self.streams.vocabulary, found.first.shape[1]
        logprobs = (hidden @ self.head[ids].T).log_softmax(-1)
        best = logprobs.topk(most, -1)
        assert torch.equal(found.tokens[row], ids[best.indices])
        torch.testing.assert_close(found.first[row].double(), best.values[0], rtol=1e-4, atol=1e-4)
        down, up = (part.double() for part in self.streams.exit)
        for j in range(1, len(hidden)):
            for p in range(most):
                parent = self.head[found.tokens[row, j - 1, p]]
                state = hidden[j] + up @ silu(down @ torch.cat((unit(hidden[j]), unit(parent))))
                share = (self.head[found.tokens[row, j]] @ state).log_softmax(-1)
                expected = share + best.values[j].logsumexp(-1)
                torch.testing.assert_close(found.following[row, j - 1, p].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("layers", (1, 2))
def test_streams_are_those_of_a_plain_reference(layers: int) -> None:
    """In chunks, batches and pages, after accepted and rejected drafts."""
    strategy = Compared(random_streams(layers, layers=layers, count=3), 3, "chain")
    bench = Bench(
        model_of("llama"),
        device_of(0),
        0,
        SchedConfig(rows=3, step_tokens=16),
        StateConfig(page_tokens=4),
        strategy,
        kit=kit_of("llama"),
    )
    ask(bench, dict.fromkeys("abcd", GREEDY))
    bench.run()
    assert strategy.compared > NEW


# -- trees


def random_continuations(seed: int, rows: int, depth: int, most: int, certain: bool) -> Continuations:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        found = (torch.randn(shape, generator=generator) * 3).log_softmax(-1)
        return found.round().clamp_max(0) if certain else found  # many ties, and probabilities of 1

    tokens = torch.stack(
        [torch.stack([torch.randperm(50, generator=generator)[:most] for _ in range(depth)]) for _ in range(rows)]
    )
    return Continuations(tokens, drawn(rows, most).sort(-1, descending=True).values, drawn(rows, depth - 1, most, most))


def every_path(found: Continuations, row: int) -> dict[tuple[int, ...], float]:
    """Tokens of each path, with its logprob."""
    depth, most = found.tokens.shape[1:]
    paths = {(c,): float(found.first[row, c]) for c in range(most)}
    level = paths
    for j in range(depth - 1):
        level = {
            (*path, c): chance + float(found.following[row, j, path[-1], c])
            for path, chance in level.items()
            for c in range(most)
        }
        paths = paths | level
    return {tuple(int(found.tokens[row, j, c]) for j, c in enumerate(path)): chance for path, chance in paths.items()}


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert -1 <= parent < len(found), "a parent comes before its children"
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@examples(60)
@given(st.integers(0, 1 << 20), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_grown_trees_have_the_most_likely_paths(
    seed: int, rows: int, depth: int, most: int, certain: bool, data: st.DataObject
) -> None:
    nodes = data.draw(st.integers(1, depth * most))
    found = random_continuations(seed, rows, depth, most, certain)
    tokens, parents = grown_tree(found, nodes)
    for row in range(rows):
        made, chances = paths_of(tokens[row].tolist(), parents[row].tolist()), every_path(found, row)
        own = [chances[path] for path in made]
        assert len(set(made)) == nodes and own == sorted(own, reverse=True)
        if nodes <= most:  # no depth is cut off
            assert own == pytest.approx(sorted(chances.values(), reverse=True)[:nodes], abs=1e-5)


@examples(40)
@given(st.integers(0, 1 << 20), st.integers(1, 4), st.integers(1, 4), st.integers(1, 30))
def test_fixed_trees_rank_candidates_by_what_follows_their_parent(seed: int, depth: int, most: int, nodes: int) -> None:
    rng = random.Random(seed)
    tree = best_tree([[rng.random() for _ in range(most)] for _ in range(depth)], nodes)
    found = random_continuations(seed, 2, depth, most, False)
    tokens = FixedTree(tree, torch.device("cpu")).tokens(found)
    for row in range(2):
        places: list[int] = []
        for parent, head, rank in zip(tree.parents.tolist(), tree.heads.tolist(), tree.ranks.tolist(), strict=True):
            chances = found.first[row] if head == 0 else found.following[row, head - 1, places[parent]]
            places.append(int(chances.argsort(descending=True)[rank]))
        expected = [
            int(found.tokens[row, head, place]) for head, place in zip(tree.heads.tolist(), places, strict=True)
        ]
        assert tokens[row].tolist() == expected


# -- memory


class Roomy(TreeStreaming):
    """Notes how many streams each row has, step by step."""

    def __init__(self, streams: StreamWeights, nodes: int) -> None:
        super().__init__(streams, nodes)
        self.room: list[int] = []

    def propose(self, view: View) -> Draft | None:
        self.room += self._steps.room(view.host_rows, self.ahead).tolist()
        return super().propose(view)


@pytest.mark.full
@examples(15)
@given(st.integers(7, 30), st.sampled_from((1, 3)), st.integers(1, 40), st.integers(0, 1 << 20))
def test_fewer_kv_slots_give_fewer_streams_and_the_same_tokens(frames: int, page: int, chunk: int, seed: int) -> None:
    """Rows with little memory run fewer streams; sequences are never preempted for streams."""
    rng = random.Random(seed)
    asked = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(4)]
    strategy = Roomy(random_streams(seed % 5), 9)
    most = max(frames, -(-16 // page) + 2)
    benches = [
        bench_of(
            each,
            depth=seed % 2,
            sched=SchedConfig(rows=3, step_tokens=chunk),
            state=StateConfig(page_tokens=page),
            frames=pages,
        )
        for each, pages in ((strategy, most), (Plain(), 400))
    ]
    for bench in benches:
        for i, prompt in enumerate(asked):
            params = SamplingParams(temperature=1.0) if i % 2 else GREEDY
            bench.add(i, prompt, 16 - len(prompt), params=params, seed=i)
        bench.run()
    assert benches[0].tokens == benches[1].tokens


def test_streams_follow_the_free_memory() -> None:
    """Two long sequences in pages of one token: where the pages are few, rows run fewer streams, and some none."""
    found = {}
    for frames in (40, 400):
        strategy = Roomy(random_streams(1), 9)
        bench = bench_of(strategy, state=StateConfig(page_tokens=1), frames=frames)
        for name in "ab":
            bench.add(name, [1, 2, 3], 26)
        bench.run()
        found[frames] = strategy.room, bench.tokens
    assert min(found[400][0]) == 1, "only the end of a sequence leaves room for fewer"
    assert {0, 1, 2, 3, 4} == set(found[40][0])
    assert found[40][1] == found[400][1]


# -- refusals


@pytest.mark.parametrize(
    ("streams", "sentence"),
    [
        (random_streams(hidden=48, vocab=318, layers=1), "another model: they have hidden states of 48, .* has 32"),
        (random_streams(vocab=500, layers=1), "belong to another model: they have a vocabulary of 500"),
        (random_streams(layers=2), "Streams in 2 top layers are not possible: the model has 2 layers"),
        (
            replace(
                random_streams(vocab=318, layers=1),
                layers=[{**random_streams().layers[0], "qkv": (torch.zeros(2, HIDDEN), torch.zeros(5, 2))}],
            ),
            "queries, keys and values of 5",
        ),
    ],
)
def test_streams_of_another_model_are_refused(streams: StreamWeights, sentence: str) -> None:
    with pytest.raises(BankfullError, match=sentence) as refused:
        load(str(speaking_folder()), RunConfig(), SchedConfig(), StateConfig(), strategy=Streaming(streams))
    assert "\n" not in str(refused.value)


def test_recurrent_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recurrent state verifies chains .* streams could read"):
        bench_of(Streaming(random_streams()), "mamba")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nodes": 0}, "nodes=0 is not possible"),
        ({"nodes": 64}, "nodes=64 is not possible; choose 1 to 63"),
        ({"tree": "binary"}, "tree='binary' is unknown"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Streaming(random_streams(), **options)  # type: ignore[arg-type]
    if "nodes" in options:
        with pytest.raises(ConfigError, match=sentence):
            TreeStreaming(random_streams(), **options)  # type: ignore[arg-type]


def test_a_grown_tree_has_at_most_the_candidates_of_all_depths() -> None:
    assert TreeStreaming(random_streams(count=2), 63).width(0) == 2 * CANDIDATES
