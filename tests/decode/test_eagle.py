"""EAGLE heads: files of all layouts, the forward pass of the papers, and the same tokens as without heads."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.adaptive import AdaptiveWidth, DraftChoice, DraftRow
from bankfull.decode.eagle import Eagle
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Sampling, Scores, Strategy, Verdict
from bankfull.errors import BankfullError, ConfigError, ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Head
from bankfull.loading import load
from bankfull.models.eagle import build_eagle
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime import naive
from bankfull.runtime.forward import plan_mixers
from bankfull.sample.params import SamplingParams
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.weights.drafter_files import CONFIG, TREE
from bankfull.weights.eagle import WEIGHTS, EagleFiles, read_eagle, usual_taps, write_eagle
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.source import open_model
from tests.decode.watched import Watched
from tests.kit import Bench, device_of
from tests.test_drafts import GRAMMAR, PARAMS, Ladder
from tests.tiny import DEVICE, VOCAB, folder_of, kit_of, model_of, reference_of, speaking_folder

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


class Watching(Watched, Eagle):
    """Keeps the predicted features of every token that the target model has run."""


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


@pytest.mark.parametrize("own", (False, True))
def test_a_head_for_a_model_with_capped_logits_norms_them_once(own: bool) -> None:
    """Its best token is the one with the highest of its scores, also among some of the tokens."""
    target = copy(reference_of("llama"))
    target.head = Head(target.head.build, target.head.project, target.head.stored, cap=2.0)
    head = build_eagle(random_eagle(4, own=own), target).model.head
    features = torch.randn(40, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(head.best(features), head(features).argmax(-1))


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


@pytest.mark.few(1)
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


class Toggling(AdaptiveWidth):
    """Drafts for some steps, then none for some steps, whatever is measured."""

    def __init__(self, widest: int, period: int) -> None:
        super().__init__((widest,))
        self._period, self._step = period, 0

    def choose(self, rows: Sequence[DraftRow]) -> DraftChoice:
        self._step += 1
        on = self._step // self._period % 2 == 0
        return DraftChoice(self.widest if on else 0, frozenset(one.row for one in rows if on or one.prompt))

    def observe(self, *measured: object) -> None:
        pass


@pytest.mark.parametrize("pause", (0, 1, 5), ids=("always", "alternating", "pauses"))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", (0, 1))
def test_a_head_that_knows_the_next_token_is_always_right(memoryless: Path, depth: int, way: str, pause: int) -> None:
    """Also after steps that it was left out of: no KV slot is left without an entry, which would read as NaN."""
    files = open_model(memoryless)
    kit = kit_for(DEVICE.type, "auto")
    model = build_model(files.config, Build(files.source, kit, torch.float32, DEVICE))
    strategy = CountedEagle(partial(build_eagle, oracle()), **WAYS[way])
    toggling = Toggling(WAYS[way].get("nodes", 3), pause) if pause else None
    bench = Bench(
        model,
        device_of(depth),
        depth,
        SchedConfig(rows=4, step_tokens=64),
        strategy=strategy,
        kit=kit,
        adaptive=toggling,
    )
    for i in range(3):
        bench.add(i, [7 * i + 1, 3 * i + 5], 61)
    bench.run()
    assert strategy.accepted / strategy.verified > 2.7, "a whole path of three drafts is accepted in each step"
    assert strategy.accepted > (120 if not pause else 30)


# -- files


def published(fused: bool, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration as published heads have them."""
    files = random_eagle(6, fused=fused, own=True)
    layer = "midlayer." if fused else "layers.0."
    tensors = {
        prefix + name.replace("layer.", layer, 1): tensor.dequantize(torch.float16)
        for name, tensor in files.tensors.items()
    }
    config = {**files.config, "architectures": ["LlamaForCausalLMEagle3" if fused else "LlamaForCausalLMEagle"]}
    if fused:
        assert files.vocabulary is not None
        tensors["d2t"] = files.vocabulary - torch.arange(len(files.vocabulary))
        mapped = torch.zeros(VOCAB, dtype=torch.bool)
        mapped[files.vocabulary] = True
        tensors["t2d"] = mapped
        config |= {"draft_vocab_size": len(files.vocabulary), "num_hidden_layers": 1}
    else:
        tensors[prefix + "embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN, dtype=torch.float16)
    return tensors, config


@pytest.mark.parametrize("prefix", ("", "model."))
@pytest.mark.parametrize("fused", (False, True))
def test_the_published_layouts_are_read(tmp_path: Path, fused: bool, prefix: str) -> None:
    tensors, config = published(fused, prefix)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    found, drawn = read_eagle(tmp_path), random_eagle(6, fused=fused, own=True)
    assert found.fused == fused and found.taps is None and found.name == tmp_path.name
    assert set(found.tensors) == set(drawn.tensors)
    for name, tensor in drawn.tensors.items():
        assert torch.equal(found.tensors[name].dequantize(torch.float16), tensor.dequantize(torch.float16))
    if fused:
        assert found.vocabulary is not None and drawn.vocabulary is not None
        assert torch.equal(found.vocabulary, drawn.vocabulary), "d2t holds differences, not ids"
    head = build_eagle(found, model_of("llama", torch.float32, "auto"))
    assert head.taps == (usual_taps(3) if fused else ())


@pytest.mark.parametrize("layers", (1, 2, 30))
def test_published_heads_read_a_low_a_middle_and_a_high_layer(layers: int) -> None:
    assert usual_taps(layers) == {1: (0, 0, 0), 2: (1, 1, 0), 30: (2, 15, 27)}[layers]


def test_layers_are_named_by_their_results(tmp_path: Path) -> None:
    tensors, config = published(True)
    save_file(tensors, tmp_path / WEIGHTS)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    assert read_eagle(tmp_path).taps == (1, 1, 2)


@pytest.mark.parametrize("own", (False, True))
@pytest.mark.parametrize("fused", (False, True))
def test_heads_are_read_as_they_were_written(tmp_path: Path, fused: bool, own: bool) -> None:
    files = replace(random_eagle(1, fused=fused, own=own), acceptance=[[0.5, 0.25], [0.25, 0.125]])
    matrix = files.tensors["fc.weight"].dequantize()
    files = replace(files, tensors={**files.tensors, "fc.weight": quantize(matrix, "q8_0")})
    written = write_eagle(files, tmp_path, {"base_model_name_or_path": "tiny"})
    assert {file.name for file in written} == {WEIGHTS, CONFIG, TREE} == {file.name for file in tmp_path.iterdir()}
    found = read_eagle(tmp_path)
    assert found.taps == files.taps and found.acceptance == files.acceptance
    for name, tensor in files.tensors.items():
        assert found.tensors[name].scheme == tensor.scheme
        assert torch.equal(found.tensors[name].dequantize(), tensor.dequantize())
    if fused:
        assert found.vocabulary is not None and files.vocabulary is not None
        assert torch.equal(found.vocabulary, files.vocabulary)


def damage(name: str) -> Callable[[Path], None]:
    def config(folder: Path, **changes: object) -> None:
        known = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**known, **changes}))

    def tensors(folder: Path, **changes: Tensor | None) -> None:
        changed = {**load_file(folder / WEIGHTS), **changes}
        save_file({key: tensor for key, tensor in changed.items() if tensor is not None}, folder / WEIGHTS)

    def truncated(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: len(data) // 2])

    return {
        "truncated": truncated,
        "pickled": lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "absent": lambda folder: shutil.rmtree(folder),
        "no weights": lambda folder: (folder / WEIGHTS).unlink(),
        "no config": lambda folder: (folder / CONFIG).unlink(),
        "no size": lambda folder: config(folder, hidden_size=None),
        "no head": lambda folder: tensors(folder, d2t=None, **{"lm_head.weight": None}),
        "other rows": lambda folder: tensors(folder, d2t=None),
        "no fc": lambda folder: tensors(folder, **{"fc.weight": None}),
        "no layer": lambda folder: tensors(folder, **{"midlayer.self_attn.q_proj.weight": None}),
        "shape": lambda folder: tensors(folder, **{"midlayer.mlp.up_proj.weight": torch.zeros(3, 7)}),
        "ids": lambda folder: tensors(folder, d2t=torch.full((VOCAB * 2 // 3,), VOCAB)),
        "bytes": lambda folder: tensors(folder, **{"fc.weight": torch.zeros(4, 33, dtype=torch.uint8)}),
        "integers": lambda folder: tensors(folder, **{"fc.weight": torch.zeros(4, 33, dtype=torch.int32)}),
        "taps": lambda folder: config(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
        "deep taps": lambda folder: config(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}),
        "other vocabulary": lambda folder: config(folder, vocab_size=VOCAB + 1),
        "other size": lambda folder: config(folder, hidden_size=64),
    }[name]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("truncated", "is truncated or no safetensors file"),
        ("pickled", "'pytorch_model.bin', a pickle that could run any code; convert it to model.safetensors"),
        ("absent", "is not a directory of EAGLE heads"),
        ("no weights", "holds no EAGLE heads: model.safetensors is missing; train some with `bankfull train eagle`"),
        ("no config", "has no config.json"),
        ("no size", "has no 'hidden_size'"),
        ("no head", "lacks the tensor 'lm_head.weight'"),
        ("other rows", "a head of 64 rows that its vocabulary does not have"),
        ("no fc", "lacks the tensor 'fc.weight'"),
        ("no layer", "lack the tensor 'midlayer.self_attn.q_proj.weight'"),
        ("shape", "mlp.up_proj.weight has shape"),
        ("ids", f"token ids outside of a vocabulary of {VOCAB}"),
        ("bytes", "as bytes that are no q8_0 blocks"),
        ("integers", "as torch.int32, which no weight can be"),
        ("taps", "that are not 3 layer numbers"),
        ("deep taps", "they read layer 10, and this model has 3 layers"),
        ("other vocabulary", f"a vocabulary of {VOCAB + 1}, and this model has {VOCAB}"),
        ("other size", "hidden states of 64, and this model has 32"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    tensors, config = published(True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config))
    damage(name)(folder)
    with pytest.raises(ModelError, match=re.escape(sentence)) as refusal:
        strategy_of(read_eagle(folder)).prepare(model_of("llama", torch.float32, "auto"))
    assert "\n" not in str(refusal.value)


def test_nothing_starts_with_heads_of_another_model(tmp_path: Path) -> None:
    write_eagle(random_eagle(), tmp_path)
    run = RunConfig(device="cpu", speculative=f"eagle:{tmp_path}")
    with pytest.raises(BankfullError, match="belong to another model"):
        load(str(speaking_folder()), run, SchedConfig(rows=2), StateConfig(memory="4MiB"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree": "bush"}, "tree='bush' is unknown"),
        ({"depth": 0}, "depth=0 is not possible"),
        ({"tree": "dynamic", "nodes": 64}, "nodes=64 is not possible"),
        ({"tree": "dynamic", "depth": 9, "branch": 8}, "lower depth or branch"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        strategy_of(random_eagle(), **options)
