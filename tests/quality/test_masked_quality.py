"""The quality of diffusion models: the samples that they see, and figures against the reference of the papers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from bankfull.errors import ConfigError, ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder, MaskedDiffusion
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ops.attention.body import WHOLE_SEQUENCE
from bankfull.quality.evaluate import (
    across_chunks,
    dequantized,
    evaluate,
    evaluate_kept,
    keep_reference,
    samples_of,
)
from bankfull.quality.masked import masked_windows
from bankfull.quality.windows import windows_of
from bankfull.weights.requantized import Requantized
from bankfull.weights.source import open_model
from tests.models.diffusion import MASK, DiffusionReference, make
from tests.tiny import model_of

CPU = torch.device("cpu")
TEXTS = [torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (75, 41)]


def written(kind: str, folder: Path) -> tuple[DiffusionReference, Decoder]:
    oracle = make(kind, folder)
    return oracle, dequantized(open_model(folder))


@pytest.mark.parametrize("kind", ["llada", "dream", "sdar"])
def test_the_bound_is_that_of_the_reference_on_the_same_samples(kind: str, tmp_path: Path) -> None:
    oracle, model = written(kind, tmp_path)
    found = evaluate(model, model, TEXTS, window=32)
    losses, hits, tokens = [], 0, 0
    for sample in samples_of(model, TEXTS, (), 32):
        logprobs = oracle.logits(sample.inputs).double().log_softmax(-1)
        own = [logprobs[at - (kind == "dream"), sample.tokens[at]].item() for at in sample.masked]
        losses.append(-sum(own) / len(own))
        best = [logprobs[at - (kind == "dream")].argmax().item() for at in sample.masked]
        hits += sum(one == sample.tokens[at] for one, at in zip(best, sample.masked, strict=True))
        tokens += len(own)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert found.tokens == tokens and found.recovered == pytest.approx(hits / tokens)
    assert found.kl_max == 0 and found.reference_recovered == found.recovered and found.windows == len(losses)


def test_samples_hide_any_number_of_tokens_and_are_the_same_in_every_run() -> None:
    windows = windows_of([list(range(2000))], (7,), 20)
    samples = masked_windows(windows, MaskedDiffusion(MASK, WHOLE_SEQUENCE))
    assert samples == masked_windows(windows, MaskedDiffusion(MASK, WHOLE_SEQUENCE))
    counts = Counter(len(sample.masked) for sample in samples)
    assert set(counts) == set(range(1, 20)) and max(counts.values()) <= 2 * min(counts.values()) + 1
    for sample in samples:
        assert sample.masked[0] >= 1 and all(sample.inputs[at] == MASK for at in sample.masked)
        assert sum(a != b for a, b in zip(sample.inputs, sample.tokens, strict=True)) <= len(sample.masked)


def test_only_the_last_block_of_a_sample_is_masked() -> None:
    samples = masked_windows(windows_of([list(range(100, 164))], (7,), 65), MaskedDiffusion(MASK, 8))
    assert [len(sample.tokens) for sample in samples] == [16, 32, 48, 64]
    assert all(min(sample.masked) >= len(sample.tokens) - 8 for sample in samples)
    (short,) = masked_windows(windows_of([[1, 2, 3]], (), 8), MaskedDiffusion(MASK, 8))
    assert set(short.masked) <= {1, 2}


def test_rounded_weights_lose_and_a_kept_reference_gives_the_same_figures(tmp_path: Path) -> None:
    _, model = written("sdar", tmp_path)
    files = open_model(tmp_path)
    source = Requantized(files.source, ("int8_row",))
    rounded = build_model(files.config, Build(source, kit_for("cpu", "torch"), torch.float32, CPU))
    found = evaluate(rounded, model, TEXTS, window=32)
    assert found.kl_mean > 0 and "recovered" in found.to_dict()
    kept = evaluate_kept(rounded, keep_reference(model, TEXTS, window=32))
    assert (kept.perplexity, kept.kl_mean, kept.recovered) == (found.perplexity, found.kl_mean, found.recovered)


def test_chunks_and_models_of_another_kind_are_refused_in_one_sentence(tmp_path: Path) -> None:
    _, model = written("llada", tmp_path)
    with pytest.raises(ConfigError, match=r"chunk=8 does not go with a diffusion model.*leave it and --chunks out"):
        evaluate(model, model, TEXTS, window=32, chunk=8)
    with pytest.raises(ConfigError, match="leave it and --chunks out"):
        across_chunks(model, TEXTS, chunks=(1, 8), window=32)
    with pytest.raises(ModelError, match=r"\w"):
        evaluate(model, model_of("llama", torch.float32), TEXTS, window=32)
