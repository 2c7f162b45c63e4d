"""The quality metrics: known perturbations give known figures, and perplexity equals that of transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from bankfull.errors import ConfigError, ModelError, RequestError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quality import evaluate as module
from bankfull.quality.evaluate import Quality, across_chunks, dequantized, evaluate
from bankfull.quality.windows import bundled_texts, windows_of
from bankfull.runtime import naive
from bankfull.weights.requantized import Requantized
from bankfull.weights.source import TensorSource, open_model
from tests.tiny import VOCAB, folder_of, model_of

CPU = torch.device("cpu")
TEXTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (75, 32, 1)]
SHORT = {"window": 32}


def tiny(dtype: torch.dtype = torch.float32, source: TensorSource | None = None) -> Decoder:
    files = open_model(folder_of("llama"))
    return build_model(files.config, Build(source or files.source, kit_for("cpu", "torch"), dtype, CPU))


def figures(found: Quality) -> np.ndarray:
    """All figures except the times."""
    return np.array([v for k, v in found.to_dict().items() if not k.endswith("seconds")], np.float64)


@pytest.mark.parametrize("shape", ["llama", "gemma", "mamba"])
def test_a_model_against_itself_has_lost_nothing(shape: str) -> None:
    model = model_of(shape, torch.float32)
    found = evaluate(model, model, TEXTS, **SHORT)
    assert found.kl_max == 0 and found.ratio == 1 and found.top1 == 1 and found.logprob_error == 0
    assert found.perplexity > 1 and found.seconds > 0 and found.reference_seconds > 0


def test_windows_cover_each_text_once_and_begin_with_the_opening() -> None:
    made = windows_of([list(range(10, 20)), [5], [6, 7]], opening=(1, 2), window=6)
    assert [w.tokens for w in made] == [
        (1, 2, 10, 11, 12, 13),
        (1, 2, 14, 15, 16, 17),
        (1, 2, 18, 19),
        (1, 2, 5),
        (1, 2, 6, 7),
    ]
    assert {w.first for w in made} == {2}
    # Without a prefix the first token of a window is not predicted, so a single token predicts nothing.
    assert [(w.tokens, w.first) for w in windows_of([[3, 4, 5], [6]], window=2)] == [((3, 4), 1)]


@pytest.mark.parametrize("opening", [(), (7,)])
def test_perplexity_is_that_of_transformers_on_the_same_windows(opening: tuple[int, ...]) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder_of("llama"), dtype=torch.float32)
    losses = []
    with torch.inference_mode():
        for window in windows_of(TEXTS, opening, 32):
            tokens = torch.tensor([window.tokens])
            loss = oracle(tokens, labels=tokens).loss
            losses += [float(loss)] * (len(window.tokens) - 1)
    found = evaluate(tiny(), tiny(), TEXTS, opening=opening, **SHORT)
    assert found.tokens == len(losses)
    assert math.log(found.perplexity) == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_known_perturbation_gives_the_figures_of_the_plain_formulas() -> None:
    reference, model = tiny(torch.float64), tiny(torch.float64)
    noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    head = model.head
    model = replace(model, head=lambda hidden: head(hidden) + noise)  # type: ignore[arg-type]
    found = evaluate(model, reference, TEXTS[:1], **SHORT)

    kl, own, expected, same = [], [], [], []
    for window in windows_of(TEXTS[:1], window=32):
        logits = naive.logits(reference, window.tokens, CPU)[:-1]
        for line, target in zip(logits, window.tokens[1:], strict=True):
            p = torch.exp(line - line.max())
            p = p / p.sum()
            q = p * torch.exp(noise)
            q = q / q.sum()
            kl.append(float((p * (p / q).log()).sum()))
            own.append(float(q[target].log()))
            expected.append(float(p[target].log()))
            same.append(int(p.argmax()) == int(q.argmax()))
    assert found.tokens == len(kl) == 72
    assert found.kl_mean == pytest.approx(np.mean(kl)) and found.kl_max == pytest.approx(max(kl))
    assert found.kl_median == pytest.approx(np.median(kl)) and found.kl_p99 == pytest.approx(np.percentile(kl, 99))
    assert found.perplexity == pytest.approx(math.exp(-np.mean(own)))
    assert found.reference_perplexity == pytest.approx(math.exp(-np.mean(expected)))
    assert found.ratio == pytest.approx(math.exp(np.mean(expected) - np.mean(own)))
    assert found.top1 == np.mean(same) < 1
    assert found.logprob_error == pytest.approx(np.mean(np.abs(np.subtract(own, expected))))


def test_the_bound_on_memory_changes_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = tiny(torch.bfloat16), tiny()
    whole = evaluate(model, reference, TEXTS, **SHORT)
    rows = []
    plain = module._Side.logprobs

    def watched(side: module._Side, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return plain(side, hidden)

    monkeypatch.setattr(module._Side, "logprobs", watched)
    monkeypatch.setattr(module, "BLOCK_BYTES", 8 * VOCAB * 3)
    blocked = evaluate(model, reference, TEXTS, **SHORT)
    assert max(rows) == 3 and whole.kl_mean > 0
    np.testing.assert_allclose(figures(blocked), figures(whole), rtol=1e-6)


@pytest.mark.parametrize("shape", ["llama", "mamba"])
def test_in_exact_arithmetic_chunks_do_not_matter(shape: str) -> None:
    found = across_chunks(model_of(shape), TEXTS, chunks=(1, 8, 32), **SHORT)
    assert list(found) == [8, 32]
    for other in found.values():
        assert other.kl_max < 1e-12 and other.ratio == pytest.approx(1, abs=1e-12)


def test_a_kernel_that_errs_for_many_rows_shows_across_chunks() -> None:
    model = tiny()
    head = model.head
    model = replace(model, head=lambda hidden: head(hidden) * (1.1 if len(hidden) >= 8 else 1.0))  # type: ignore[arg-type]
    found = across_chunks(model, TEXTS[:2], chunks=(1, 4, 8), **SHORT)
    assert found[4].kl_mean < 1e-9 < found[8].kl_mean
    whole = evaluate(model, tiny(), TEXTS[:2], chunk=4, **SHORT)
    assert whole.kl_mean < 1e-9 < evaluate(model, tiny(), TEXTS[:2], **SHORT).kl_mean


def test_weights_rounded_twice_to_one_type_are_rounded_once() -> None:
    files = open_model(folder_of("llama"))
    once = Requantized(files.source, ("q4_1", "keep"), tables=True)
    reference = tiny(source=once)
    again = evaluate(tiny(source=Requantized(once, ("q4_1", "keep"), tables=True)), reference, TEXTS, **SHORT)
    rounded = evaluate(reference, tiny(), TEXTS, **SHORT)
    assert again.kl_mean < 1e-4 < rounded.kl_mean and again.ratio == pytest.approx(1, abs=1e-2)


def test_the_reference_computes_with_dequantized_weights() -> None:
    files = open_model(folder_of("llama"))
    made = dequantized(files)
    assert made.head.project.weight.is_dense
    assert evaluate(made, tiny(), TEXTS, **SHORT).kl_max == 0


def test_the_bundled_text_is_there_and_no_part_repeats() -> None:
    texts = bundled_texts()
    assert len(texts) >= 4 and 12_000 <= sum(map(len, texts.values())) <= 20_000
    lines = [line for text in texts.values() for line in text.splitlines() if len(line) > 30]
    assert len(lines) == len(set(lines))


def test_what_cannot_be_measured_is_refused() -> None:
    model = tiny()
    with pytest.raises(ModelError, match="different vocabularies"):
        evaluate(model, replace(model, vocab=VOCAB + 1), TEXTS, **SHORT)
    with pytest.raises(ConfigError, match="256 positions"):
        evaluate(model, model, TEXTS)
    with pytest.raises(ConfigError, match="at most the window"):
        evaluate(model, model, TEXTS, chunk=33, **SHORT)
    with pytest.raises(ConfigError, match="nothing to predict"):
        evaluate(model, model, TEXTS, window=1)
    with pytest.raises(RequestError, match="longer one"):
        evaluate(model, model, [[3]], **SHORT)
    with pytest.raises(ConfigError, match="two different sizes"):
        across_chunks(model, TEXTS, chunks=(4, 4), **SHORT)
    broken = replace(model, head=lambda hidden: hidden[:, :1].expand(-1, VOCAB) * math.nan)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="not finite"):
        evaluate(broken, model, TEXTS, **SHORT)
