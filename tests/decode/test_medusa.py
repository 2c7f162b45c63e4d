"""Medusa: files of both layouts, candidates of the heads, and the same tokens as without heads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bankfull.combinations import refuse_impossible
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.medusa import Medusa, MedusaStack
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Strategy
from bankfull.errors import ConfigError, ModelError
from bankfull.loading import load
from bankfull.runtime.device import Cpu
from bankfull.sample.params import SamplingParams
from bankfull.weights.medusa import CONFIG, TREE, WEIGHTS, MedusaHeads, read_heads, write_heads
from bankfull.weights.source import open_model
from tests.kit import Bench, device_of
from tests.tiny import VOCAB, folder_of, kit_of, model_of, speaking_folder

HIDDEN = 32
NEW = 24


def random_heads(
    seed: int = 0, *, heads: int = 3, layers: int = 1, own: bool = False, hidden: int = HIDDEN, vocab: int = VOCAB
) -> MedusaHeads:
    """Heads that guess at random; with `own`, in the published layout."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    rng = random.Random(seed)
    table = [sorted((rng.random() / 12 for _ in range(10)), reverse=True) for _ in range(heads)]
    return MedusaHeads(
        [[(drawn(hidden, hidden), drawn(hidden)) for _ in range(layers)] for _ in range(heads)],
        vocab,
        [drawn(vocab, hidden) for _ in range(heads)] if own else None,
        None if own else torch.tensor(sorted(rng.sample(range(vocab), vocab * 2 // 3))),
        table,
    )


# -- files


@pytest.mark.parametrize("own", (False, True))
@pytest.mark.parametrize("layers", (1, 2))
def test_heads_are_read_as_they_were_written(tmp_path: Path, own: bool, layers: int) -> None:
    heads = random_heads(layers=layers, own=own)
    written = write_heads(heads, tmp_path, {"base_model_name_or_path": "tiny"})
    assert {file.name for file in written} == {WEIGHTS, CONFIG, TREE} == {file.name for file in tmp_path.iterdir()}
    found = read_heads(tmp_path)
    assert found.vocab == VOCAB and found.hidden == HIDDEN and found.name == tmp_path.name
    for mine, theirs in zip(heads.blocks, found.blocks, strict=True):
        for (weight, bias), (weight_read, bias_read) in zip(mine, theirs, strict=True):
            assert torch.equal(weight, weight_read) and torch.equal(bias, bias_read)
    if own:
        assert heads.projections is not None and found.projections is not None and found.vocabulary is None
        assert all(torch.equal(a, b) for a, b in zip(heads.projections, found.projections, strict=True))
    else:
        assert heads.vocabulary is not None and found.vocabulary is not None and found.projections is None
        assert torch.equal(heads.vocabulary, found.vocabulary)
    assert heads.acceptance is not None and found.acceptance is not None
    for mine_, theirs_ in zip(heads.acceptance, found.acceptance, strict=True):
        assert theirs_ == pytest.approx(mine_, abs=1e-6)


@pytest.mark.parametrize("prefix", ("", "medusa_head."))
def test_the_published_layout_is_read(tmp_path: Path, prefix: str) -> None:
    """Names and shapes as published; no tree, no sizes in the configuration."""
    tensors = {}
    for head in range(2):
        tensors |= {
            f"{prefix}{head}.0.linear.weight": torch.randn(HIDDEN, HIDDEN, dtype=torch.float16),
            f"{prefix}{head}.0.linear.bias": torch.randn(HIDDEN, dtype=torch.float16),
            f"{prefix}{head}.1.weight": torch.randn(VOCAB, HIDDEN, dtype=torch.float16),
        }
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}))
    found = read_heads(tmp_path)
    assert found.vocab == VOCAB and len(found.blocks) == 2 and found.acceptance is None and found.vocabulary is None
    assert torch.equal(found.blocks[1][0][0], tensors[f"{prefix}1.0.linear.weight"])
    assert found.projections is not None and torch.equal(found.projections[1], tensors[f"{prefix}1.1.weight"])
    assert Medusa(found).width(0) == 8, "the usual acceptance gives a tree"


def damage(name: str) -> Callable[[Path], None]:
    def config(folder: Path, **changes: object) -> None:
        known = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**known, **changes}))

    def tensors(folder: Path, **changes: torch.Tensor) -> None:
        save_file({**load_file(folder / WEIGHTS), **changes}, folder / WEIGHTS)

    def truncated(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: len(data) // 2])

    def pickled(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "medusa_lm_head.pt")

    def absent(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

    return {
        "truncated": truncated,
        "pickled": pickled,
        "absent": absent,
        "no weights": lambda folder: (folder / WEIGHTS).unlink(),
        "no config": lambda folder: (folder / CONFIG).unlink(),
        "config is no JSON": lambda folder: (folder / CONFIG).write_text("{"),
        "no number": lambda folder: config(folder, medusa_num_heads=None),
        "wrong number": lambda folder: config(folder, medusa_num_layers="one"),
        "too many heads": lambda folder: config(folder, medusa_num_heads=4),
        "shape": lambda folder: tensors(folder, **{"1.0.linear.weight": torch.zeros(HIDDEN, 7)}),
        "ids": lambda folder: tensors(folder, vocabulary=torch.tensor([1, VOCAB], dtype=torch.int32)),
        "floats": lambda folder: tensors(folder, vocabulary=torch.zeros(4)),
        "tree": lambda folder: (folder / TREE).write_text(json.dumps({"acceptance": [[0.5], [2.0], [0.1]]})),
        "short tree": lambda folder: (folder / TREE).write_text(json.dumps({"acceptance": [[0.5]]})),
    }[name]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("truncated", "is truncated or no safetensors file"),
        ("pickled", "'medusa_lm_head.pt', a pickle that could run any code; convert it to medusa_lm_head.safetensors"),
        ("absent", "is not a directory of Medusa heads"),
        ("no weights", "holds no Medusa heads: medusa_lm_head.safetensors is missing"),
        ("no config", "has no config.json"),
        ("config is no JSON", "is not valid JSON"),
        ("no number", "has no 'medusa_num_heads', which must be 1 to 16"),
        ("wrong number", "has 'one' as 'medusa_num_layers'"),
        ("too many heads", "lacks the tensor '3.0.linear.weight'"),
        ("shape", "residual blocks of different shapes"),
        ("ids", f"token ids outside of a vocabulary of {VOCAB}"),
        ("floats", "not a list of token ids"),
        ("tree", "must list the acceptance of 3 heads"),
        ("short tree", "must list the acceptance of 3 heads"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    folder = tmp_path / "heads"
    write_heads(random_heads(), folder)
    damage(name)(folder)
    with pytest.raises(ModelError, match=sentence.replace("(", r"\(")) as refused:
        read_heads(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("heads", "sentence"),
    [
        (random_heads(hidden=48, vocab=318), "belong to another model: they have hidden states of 48, .* model has 32"),
        (random_heads(vocab=500), "belong to another model: they have a vocabulary of 500"),
        (random_heads(vocab=500, own=True), "belong to another model: they have a vocabulary of 500"),
    ],
)
def test_heads_of_another_model_are_refused(heads: MedusaHeads, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        load(str(speaking_folder()), RunConfig(), SchedConfig(), StateConfig(), strategy=Medusa(heads))


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
        Medusa(random_heads(), **options)  # type: ignore[arg-type]


# -- candidates


@pytest.mark.parametrize("own", (False, True))
@pytest.mark.parametrize("layers", (1, 3))
@pytest.mark.parametrize("most", (1, 4))
def test_candidates_are_those_with_the_highest_scores(own: bool, layers: int, most: int) -> None:
    model, heads = model_of("llama"), random_heads(1, layers=layers, own=own)
    hidden = torch.randn(5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = MedusaStack(model.head, heads, 2).candidates(hidden, most)
    assert found.shape == (5, 2, most)
    for k in range(2):
        x = hidden
        for weight, bias in heads.blocks[k]:
            x = x + torch.nn.functional.silu(x @ weight.double().T + bias.double())
        if heads.projections is not None:
            expected = (x @ heads.projections[k].double().T).topk(most).indices
        else:
            assert heads.vocabulary is not None
            rows = model.head.stored().dequantize(torch.float64)[heads.vocabulary]
            expected = heads.vocabulary[(x @ rows.T).topk(most).indices]
        assert torch.equal(found[:, k], expected)


@pytest.mark.parametrize("providers", ("torch", "auto"))
def test_rounded_weights_change_few_candidates(providers: str) -> None:
    """Where activations are rounded, blocks of 8 bits are multiplied."""
    from dataclasses import replace

    from bankfull.layers.decoder import Head
    from bankfull.layers.linear import Linear
    from bankfull.ops import kit_for
    from bankfull.ops.products.activations import RULES
    from bankfull.weights.qtensor import QTensor
    from bankfull.weights.quantize import quantize

    exact, heads = model_of("llama", torch.float32, providers).head, random_heads(3)
    stored = quantize(exact.stored().dequantize(), "q8_0")
    build = replace(exact.build, kit=kit_for("cpu", providers), activations=RULES["int8"])

    def rows_of(rows: torch.Tensor | None = None) -> QTensor:
        return stored if rows is None else stored.rows(rows)

    head = Head(build, Linear(build, HIDDEN, VOCAB, weight=stored), rows_of)
    hidden = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(2))
    few, all_bits = (MedusaStack(one, heads, 3).candidates(hidden, 1) for one in (head, exact))
    assert 0.9 < float((few == all_bits).double().mean()) <= 1.0


def test_no_candidate_is_outside_of_the_vocabulary_if_nothing_is_finite() -> None:
    stack = MedusaStack(model_of("llama").head, random_heads(), 2)
    for most in (1, 3):
        found = stack.candidates(torch.full((2, HIDDEN), float("nan"), dtype=torch.float64), most)
        assert int(found.min()) >= 0 and int(found.max()) < VOCAB


# -- tokens

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3),
    "sampled": SamplingParams(temperature=1.0, logprobs=2),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4),
}


class CountedMedusa(Medusa):
    """Counts accepted drafts."""

    accepted = 0

    def observe(self, view: object, verdict: object) -> None:
        if verdict.counts is not None:  # type: ignore[attr-defined]
            self.accepted += int((verdict.counts - 1).sum())  # type: ignore[attr-defined]


def generated(strategy: Strategy, shape: str, depth: int) -> Bench:
    bench = Bench(
        model_of(shape, torch.float32, "auto"),
        device_of(depth, seed=3),
        depth,
        SchedConfig(rows=4, step_tokens=64),
        StateConfig(page_tokens=4),
        strategy,
        kit=kit_of(shape, torch.float32, "auto"),
    )
    rng = random.Random(5)
    for name, params in PARAMS.items():
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        bench.add(name, prompt, NEW, n=2, params=params, seed=rng.randrange(1 << 40))
    bench.run(preempt=random.Random(1))
    return bench


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize(
    ("shape", "tree", "own"),
    [("llama", "sparse", False), ("gemma", "sparse", True), ("llama", "chain", True), ("mamba", "chain", False)],
)
def test_tokens_and_logprobs_are_those_without_heads(shape: str, tree: str, own: bool, depth: int) -> None:
    plain = generated(Plain(), shape, depth)
    accepted = 0
    for seed, nodes in ((0, 3), (1, 16), (2, 63)) if tree == "sparse" else ((0, None),):
        strategy = CountedMedusa(random_heads(seed, heads=2 + seed, own=own), nodes, tree)
        found = generated(strategy, shape, depth)
        assert found.tokens == plain.tokens and found.finish == plain.finish
        for key, extras in plain.extras.items():
            mine = [line.logprob for extra in found.extras[key] for line in extra.logprobs]
            assert mine == pytest.approx([line.logprob for extra in extras for line in extra.logprobs], abs=1e-4)
        accepted += strategy.accepted
    assert tree == "chain" or accepted > 0, "no draft was ever accepted"


def test_trees_are_refused_for_recurrent_state() -> None:
    with pytest.raises(ConfigError, match=r"recurrent state verifies chains of draft tokens only.*add tree=chain"):
        refuse_impossible(open_model(folder_of("mamba")), Cpu(), RunConfig(speculative="medusa"))
