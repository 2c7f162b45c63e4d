"""EAGLE heads: files of all layouts, the forward pass of the papers, and the same tokens as without heads."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.eagle import Eagle
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Sampling, Scores, Strategy, Verdict
from bankfull.layers.build import Build
from bankfull.models.eagle import build_eagle
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime import naive
from bankfull.runtime.forward import plan_mixers
from bankfull.sample.params import SamplingParams
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.weights.eagle import EagleFiles, usual_taps
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import open_model
from tests.kit import Bench, device_of
from tests.test_drafts import GRAMMAR, PARAMS, Ladder
from tests.tiny import DEVICE, VOCAB, folder_of, kit_of, model_of, reference_of

HIDDEN, HEADS, KV, SIZE, INNER = 32, 4, 2, 8, 48
NEW = 24


def random_eagle(
    seed: int = 0, *, fused: bool = True, own: bool = False, hidden: int = HIDDEN, vocab: int = VOCAB, layers: int = 3
) -> EagleFiles:
    """A head that guesses at random: EAGLE-3 if `fused`, else EAGLE-1. `own`: EAGLE-3 with its own rows of a head."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> QTensor:
        return QTensor.dense(torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 1.0))

    inner = hidden * (2 if fused else 1)
    tensors = {
        "fc.weight": drawn(hidden, hidden * (3 if fused else 2)),
        "layer.self_attn.q_proj.weight": drawn(HEADS * SIZE, inner),
        "layer.self_attn.k_proj.weight": drawn(KV * SIZE, inner),
        "layer.self_attn.v_proj.weight": drawn(KV * SIZE, inner),
        "layer.self_attn.o_proj.weight": drawn(hidden, HEADS * SIZE),
        "layer.mlp.gate_proj.weight": drawn(INNER, hidden),
        "layer.mlp.up_proj.weight": drawn(INNER, hidden),
        "layer.mlp.down_proj.weight": drawn(hidden, INNER),
        "layer.post_attention_layernorm.weight": drawn(hidden),
    }
    vocabulary = None
    if fused:
        names = ("layer.hidden_norm.weight", "layer.input_layernorm.weight", "norm.weight")
        tensors |= {name: drawn(hidden) for name in names}
        vocabulary = torch.tensor(sorted(random.Random(seed).sample(range(vocab), vocab * 2 // 3)))
        if own:
            tensors["lm_head.weight"] = drawn(len(vocabulary), hidden)
    else:
        tensors["fc.bias"] = drawn(hidden)
    config = {
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": SIZE,
        "intermediate_size": INNER,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
    }
    return EagleFiles(config, tensors, usual_taps(layers) if fused else None, vocabulary)


def strategy_of(files: EagleFiles, **options: Any) -> Eagle:
    return Eagle(partial(build_eagle, files), **options)


# -- the papers' forward pass, in plain torch


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: Tensor, first: int) -> Tensor:
    """RoPE of (tokens, heads, size) at positions from `first` on."""
    half = x.shape[-1] // 2
    angles = torch.arange(first, first + len(x), dtype=x.dtype)[:, None] * 10000.0 ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def paper_forward(files: EagleFiles, embedded: Tensor, features: Tensor) -> Tensor:
    """Predicted features of a whole sequence: entry i has the embedding of token i and the feature of token i - 1."""
    w = {name: tensor.dequantize(torch.float64) for name, tensor in files.tensors.items()}
    before = torch.cat((torch.zeros_like(features[:1]), features[:-1]))
    if files.fused:
        x = before
        inner = torch.cat((rms(embedded, w["layer.input_layernorm.weight"]), rms(x, w["layer.hidden_norm.weight"])), -1)
    else:
        x = inner = linear(torch.cat((embedded, before), -1), w["fc.weight"], w["fc.bias"])
    n = len(x)
    q = rotated(linear(inner, w["layer.self_attn.q_proj.weight"]).view(n, HEADS, SIZE), 0)
    k = rotated(linear(inner, w["layer.self_attn.k_proj.weight"]).view(n, KV, SIZE), 0).repeat_interleave(2, 1)
    v = linear(inner, w["layer.self_attn.v_proj.weight"]).view(n, KV, SIZE).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
    x = x + linear(mixed, w["layer.self_attn.o_proj.weight"])
    y = rms(x, w["layer.post_attention_layernorm.weight"])
    gated = silu(linear(y, w["layer.mlp.gate_proj.weight"])) * linear(y, w["layer.mlp.up_proj.weight"])
    return x + linear(gated, w["layer.mlp.down_proj.weight"])


class Watching(Eagle):
    """Keeps the predicted features of every token that the target model has run."""

    def attach(self, steps: Any) -> None:
        super().attach(steps)
        self.followed: list[Tensor] = []
        self._run = steps.run

    def follow(self, step: Any) -> None:
        def watched(batch: Any) -> Tensor:
            self.followed.append(self._run(batch).clone())
            return self.followed[-1]

        self._steps.run = watched  # type: ignore[method-assign]
        super().follow(step)
        self._steps.run = self._run  # type: ignore[method-assign]


@pytest.mark.parametrize("chunk", (3, 64))
@pytest.mark.parametrize(("fused", "own"), [(False, False), (True, False), (True, True)])
def test_the_forward_pass_is_that_of_the_papers(fused: bool, own: bool, chunk: int) -> None:
    """Over a prompt in chunks of any size: the feature of the token before a chunk comes from the step before."""
    files, target = random_eagle(4, fused=fused, own=own), reference_of("llama")
    strategy = Watching(partial(build_eagle, files), depth=2)
    bench = Bench(target, device_of(0), 0, SchedConfig(rows=2, step_tokens=chunk), strategy=strategy)
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(13)]
    bench.add("a", prompt, 1)
    bench.run()
    hidden, tapped = states_of(prompt, files.taps or ())
    w = {name: tensor.dequantize(torch.float64) for name, tensor in files.tensors.items()}
    features = linear(torch.cat([tapped[layer] for layer in files.taps], -1), w["fc.weight"]) if files.taps else hidden
    table = target.head.build.source.get("model.embed_tokens.weight").dequantize(torch.float64)
    expected = paper_forward(files, table[prompt], features)
    got = torch.cat(strategy.followed)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    head = strategy._logits
    scores = head(got)
    if fused:
        assert files.vocabulary is not None
        rows = w["lm_head.weight"] if own else target.head.stored().dequantize(torch.float64)[files.vocabulary]
        torch.testing.assert_close(scores[:, files.vocabulary], linear(rms(expected, w["norm.weight"]), rows))
        others = sorted(set(range(VOCAB)) - set(files.vocabulary.tolist()))
        assert (scores[:, others] == -torch.inf).all()
    else:
        torch.testing.assert_close(scores, linear(expected, target.head.stored().dequantize(torch.float64)))
    assert torch.equal(head.best(got), scores.argmax(-1))
    assert torch.equal(head.highest(got, 3)[1], scores.topk(3).indices)


def states_of(tokens: list[int], taps: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
    """Last hidden states, and those that enter each layer of `taps`."""
    model = reference_of("llama")
    layout = layout_of(model.states(), 16)
    storage = Storage(layout, 4, 1, torch.device("cpu"))
    batch = naive.single_batch(layout, tokens, 0, len(tokens), 0, torch.device("cpu"))
    found: dict[int, Any] = dict.fromkeys(taps)
    with torch.inference_mode():
        return model.forward(batch, storage.layers, plan_mixers(model, layout, batch), found), found


# -- the same tokens as without heads


class CountedEagle(Eagle):
    accepted = verified = 0

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        verdict = super().verify(scores, sampling)
        if verdict.counts is not None:
            self.accepted += int((verdict.counts - 1).sum())
            self.verified += len(verdict.counts)
        return verdict


WAYS: dict[str, dict[str, Any]] = {
    "chain": {"depth": 3},
    "tree": {"depth": 3, "tree": "dynamic", "branch": 3, "nodes": 9},
}


def bench_of(strategy: Strategy, depth: int, shape: str = "llama", **more: Any) -> Bench:
    how = (torch.float32, "auto")
    given = {"sched": SchedConfig(rows=4, step_tokens=24), "state": StateConfig(page_tokens=4), **more}
    kit = kit_of(shape, *how)
    return Bench(model_of(shape, *how), device_of(depth, seed=3), depth, strategy=strategy, kit=kit, **given)


def ask(bench: Bench, params: dict[str, SamplingParams], n: int = 1) -> None:
    rng = random.Random(5)
    for name, each in params.items():
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        bench.add(name, prompt, NEW, n=n, params=each, seed=rng.randrange(1 << 40))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("fused", (False, True))
def test_heads_change_neither_tokens_nor_logprobs(fused: bool, depth: int, way: str) -> None:
    """With penalties, biases, truncation, `n`, chunks, preemption, and few pages."""
    plain = bench_of(Plain(), depth)
    drafted = bench_of(strategy_of(random_eagle(depth, fused=fused), **WAYS[way]), depth, frames=60)
    for bench in (plain, drafted):
        ask(bench, PARAMS, n=2)
        bench.run(preempt=random.Random(1))
    assert drafted.tokens == plain.tokens
    for key, extras in plain.extras.items():
        ours = [entry.logprob for extra in drafted.extras[key] for entry in extra.logprobs]
        assert ours == pytest.approx([entry.logprob for extra in extras for entry in extra.logprobs], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", (0, 1))
def test_drafts_are_verified_under_a_grammar(depth: int, way: str) -> None:
    strategy = strategy_of(random_eagle(2, own=True), **WAYS[way])
    plain, drafted = (bench_of(each, depth) for each in (Plain(), strategy))
    for bench in (plain, drafted):
        for i, params in enumerate((GRAMMAR, replace(GRAMMAR, temperature=0.0), GRAMMAR)):
            bench.add(i, [i + 1, 5, 7], NEW, params=params, seed=i, matchers=[Ladder(9 + 5 * i)])
        bench.add("free", [3, 4], NEW)
        bench.run(preempt=random.Random(2))
    assert drafted.tokens == plain.tokens and drafted.finish == plain.finish


def oracle() -> EagleFiles:
    """An EAGLE-1 head for a model whose layers add nothing: the embedding of the last token determines the next one,
    and `fc` passes it on. The head's own layer adds nothing either."""
    files = random_eagle(3, fused=False)
    tensors = dict(files.tensors)
    identity = torch.cat((torch.eye(HIDDEN) * 60, torch.zeros(HIDDEN, HIDDEN)), 1)  # sharp: a tree grows deep
    tensors["fc.weight"], tensors["fc.bias"] = QTensor.dense(identity), QTensor.dense(torch.zeros(HIDDEN))
    for name in ("layer.self_attn.o_proj.weight", "layer.mlp.down_proj.weight"):
        tensors[name] = QTensor.dense(torch.zeros(tensors[name].shape))
    return replace(files, tensors=tensors)


@pytest.fixture(scope="module")
def memoryless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token is a function of the last one: all branches are zero, and the last norm is even."""
    folder = tmp_path_factory.mktemp("memoryless")
    shutil.copytree(folder_of("llama"), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    tensors["model.norm.weight"].fill_(1.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", (0, 1))
def test_a_head_that_knows_the_next_token_is_always_right(memoryless: Path, depth: int, way: str) -> None:
    files = open_model(memoryless)
    kit = kit_for(DEVICE.type, "auto")
    model = build_model(files.config, Build(files.source, kit, torch.float32, DEVICE))
    strategy = CountedEagle(partial(build_eagle, oracle()), **WAYS[way])
    bench = Bench(model, device_of(depth), depth, SchedConfig(rows=4, step_tokens=64), strategy=strategy, kit=kit)
    for i in range(3):
        bench.add(i, [7 * i + 1, 3 * i + 5], 61)
    bench.run()
    # 61 tokens: the first comes from the prompt, and each step adds three drafts and one more. At depth 1 the step
    # after the prompt is planned before there are drafts.
    assert strategy.accepted / strategy.verified > 2.7, "a whole path of three drafts is accepted in each step"
