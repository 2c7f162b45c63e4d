"""What quantization and other options cost in quality: next-token distributions compared with a reference model's.

Both models run over the same windows of tokens. Each window starts from an empty state with the model's prefix (its
beginning-of-text token, if it has one). Windows do not overlap, and none spans two texts. The prefix, or the first
token of a window without one, is not predicted. All figures are computed in float64 from the logits. A diffusion model
predicts masked tokens instead (`masked.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.errors import ConfigError, ModelError, RequestError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quality.masked import masked_windows
from bankfull.quality.windows import WINDOW, EvaluationWindow, windows_of
from bankfull.runtime.naive import hidden_states
from bankfull.weights.source import ModelFiles

CHUNKS = (1, 8, 64, 512)
BLOCK_BYTES = 32 << 20
"""Bytes of float64 logits held at once per model; a single position may need more."""
KEPT_BYTES = 4 << 30
"""Bytes of a reference's hidden states that are kept at most."""
CPU = torch.device("cpu")

Progress = Callable[[int], None]
"""Callback with the number of tokens predicted so far."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Comparison with the reference. KL is KL(reference || model) in nats per predicted token. The perplexity of a
    diffusion model is an upper bound (`masked.py`)."""

    tokens: int
    """Predicted tokens."""
    windows: int
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1: float
    """Share of positions at which both models rank the same token first."""
    logprob_error: float
    """Mean absolute difference of the logprob of the actual next token."""
    seconds: float
    reference_seconds: float
    recovered: float | None = None
    """Diffusion: share of masked tokens that the model ranks first."""
    reference_recovered: float | None = None

    @property
    def ratio(self) -> float:
        return self.perplexity / self.reference_perplexity

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None} | {"ratio": self.ratio}


def dequantized(files: ModelFiles, device: torch.device = CPU, max_len: int = 0) -> Decoder:
    """The reference model: the same weights dequantized to float32, computed by the reference operations in torch."""
    return build_model(
        files.config, Build(files.source, kit_for(device.type, "torch"), torch.float32, device, True, max_len)
    )


def evaluate(
    model: Decoder,
    reference: Decoder,
    texts: Sequence[Sequence[int]],
    *,
    opening: Sequence[int] = (),
    window: int = WINDOW,
    chunk: int | None = None,
    device: torch.device = CPU,
    progress: Progress | None = None,
) -> Quality:
    """`texts`: token ids. The reference computes a window in one pass, `model` in chunks of `chunk` tokens."""
    _check(model, window, window if chunk is None else chunk)
    _check(reference, window, window)
    if model.vocab != reference.vocab:
        raise _other_vocabulary(model.vocab, reference.vocab)
    if (model.diffusion is None) != (reference.diffusion is None):
        raise ModelError(
            "One of the models predicts masked tokens and the other one the next token, so they cannot be compared; "
            "choose a reference of the same kind."
        )
    sides = _Side(reference, window, device), [_Side(model, window if chunk is None else chunk, device)]
    return _compare(*sides, samples_of(reference, texts, opening, window), progress)[0]


def samples_of(
    model: Decoder, texts: Sequence[Sequence[int]], opening: Sequence[int] = (), window: int = WINDOW
) -> list[EvaluationWindow]:
    """The windows that a model of this kind is evaluated on."""
    windows = windows_of(texts, opening, window)
    return windows if model.diffusion is None else masked_windows(windows, model.diffusion)


@dataclass(frozen=True, slots=True)
class KeptReference:
    """The reference's hidden states over all windows, and its head: enough to compare any number of models one after
    the other, while the reference's layers no longer take memory."""

    head: Callable[[Tensor], Tensor]
    vocab: int
    windows: list[EvaluationWindow]
    hidden: list[Tensor]
    """Hidden states of each window, on the host."""
    device: torch.device
    seconds: float


def keep_reference(
    reference: Decoder,
    texts: Sequence[Sequence[int]],
    *,
    opening: Sequence[int] = (),
    window: int = WINDOW,
    device: torch.device = CPU,
    progress: Progress | None = None,
) -> KeptReference:
    _check(reference, window, window)
    windows, side, kept, done = samples_of(reference, texts, opening, window), _Side(reference, window, device), [], 0
    size = sum(len(one.tokens) for one in windows) * reference.hidden * 4
    if size > KEPT_BYTES:
        raise RequestError(
            f"The reference's hidden states over this text take {size / 2**30:.1f} GiB, more than "
            f"{KEPT_BYTES / 2**30:.0f} GiB; give a shorter text."
        )
    for one in windows:
        kept.append(side.hidden(one).cpu())
        done += len(one.predicted)
        if progress is not None:
            progress(done)
    return KeptReference(reference.head, reference.vocab, windows, kept, device, side.seconds)


def evaluate_kept(
    model: Decoder, kept: KeptReference, *, chunk: int | None = None, progress: Progress | None = None
) -> Quality:
    """Compare a model as `evaluate` does, with the reference's hidden states computed before."""
    window = max(len(one.tokens) for one in kept.windows)
    _check(model, window, window if chunk is None else chunk)
    if model.vocab != kept.vocab:
        raise _other_vocabulary(model.vocab, kept.vocab)
    side = _Side(model, window if chunk is None else chunk, kept.device)
    return _compare(_KeptSide(kept), [side], kept.windows, progress)[0]


def across_chunks(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    *,
    chunks: Sequence[int] = CHUNKS,
    opening: Sequence[int] = (),
    window: int = WINDOW,
    device: torch.device = CPU,
    progress: Progress | None = None,
) -> dict[int, Quality]:
    """Compare the same model at several chunk sizes, each with the first of `chunks`.

    One row and many rows may use different kernels. With 1 as the first chunk size, this shows how far prefill and
    batched decoding deviate from decoding a single sequence.
    """
    if len(chunks) < 2 or len(set(chunks)) < len(chunks):
        raise ConfigError(f"chunks={tuple(chunks)} must have at least two different sizes.")
    for chunk in chunks:
        _check(model, window, chunk)
    first, *others = (_Side(model, chunk, device) for chunk in chunks)
    return dict(zip(chunks[1:], _compare(first, others, windows_of(texts, opening, window), progress), strict=True))


def _other_vocabulary(own: int, other: int) -> ModelError:
    return ModelError(
        f"The models have different vocabularies ({own} and {other} tokens), so their distributions cannot be "
        "compared; choose a reference that shares the model's tokenizer."
    )


def _check(model: Decoder, window: int, chunk: int) -> None:
    if window > model.max_positions:
        raise ConfigError(
            f"window={window} is longer than the {model.max_positions} positions that the model supports; use at most "
            "that many."
        )
    if model.diffusion is not None and chunk != window:
        raise ConfigError(
            f"chunk={chunk} does not go with a diffusion model, whose tokens see later ones; leave it and --chunks out."
        )
    if not 1 <= chunk <= window:
        raise ConfigError(f"chunk={chunk} must be at least 1 and at most the window of {window} tokens.")


@dataclass(slots=True)
class _Side:
    model: Decoder
    chunk: int
    device: torch.device
    seconds: float = 0.0

    def hidden(self, window: EvaluationWindow) -> Tensor:
        start, count = perf_counter(), len(window.tokens)
        chunks = [min(self.chunk, count - at) for at in range(0, count, self.chunk)]
        hidden = hidden_states(self.model, window.inputs, self.device, chunks)
        self.seconds += perf_counter() - start
        return hidden

    def logprobs(self, hidden: Tensor) -> Tensor:
        """Shape (positions, vocab) in float64; the head gets at most `chunk` rows at once, like the layers."""
        start = perf_counter()
        logprobs = _logprobs(torch.cat([self.model.head(rows).to(torch.float64) for rows in hidden.split(self.chunk)]))
        self.seconds += perf_counter() - start
        return logprobs


@dataclass(slots=True)
class _KeptSide:
    kept: KeptReference
    number: int = 0

    @property
    def seconds(self) -> float:
        return self.kept.seconds

    def hidden(self, window: EvaluationWindow) -> Tensor:
        assert self.kept.windows[self.number] is window, "windows are compared in order"
        self.number += 1
        return self.kept.hidden[self.number - 1].to(self.kept.device)

    def logprobs(self, hidden: Tensor) -> Tensor:
        return _logprobs(self.kept.head(hidden).to(torch.float64))


def _logprobs(scores: Tensor) -> Tensor:
    if not bool(scores.isfinite().all()):
        raise ModelError("The model produced logits that are not finite; try another dtype (float32).")
    return scores.log_softmax(-1)


class _Tally:
    """One number per predicted token and quantity; the logits are discarded.

    Allocated once: small long-lived arrays between large short-lived ones would fragment the heap and keep its memory
    from returning to the system.
    """

    def __init__(self, windows: Sequence[EvaluationWindow]) -> None:
        count = sum(len(window.predicted) for window in windows)
        self.own, self.reference, self.kl = (np.empty(count, np.float64) for _ in range(3))
        self.same, self.found, self.reference_found = (np.empty(count, np.bool_) for _ in range(3))
        self.weights: np.ndarray | None = None
        """Weights of tokens in the mean of log-probabilities; None: equal. With masks, each sample weighs the same."""
        if windows[0].masked:
            self.weights = np.concatenate(
                [np.full(len(window.masked), 1 / (len(windows) * len(window.masked))) for window in windows]
            )

    def add(self, at: int, reference: Tensor, own: Tensor, targets: Tensor) -> None:
        place = slice(at, at + len(targets))
        # Rounding can make the sum negative by about 1e-17.
        self.kl[place] = (reference.exp() * (reference - own)).sum(-1).clamp(min=0).cpu().numpy()
        self.same[place] = (reference.argmax(-1) == own.argmax(-1)).cpu().numpy()
        self.found[place] = (own.argmax(-1) == targets).cpu().numpy()
        self.reference_found[place] = (reference.argmax(-1) == targets).cpu().numpy()
        self.own[place] = own.gather(-1, targets[:, None])[:, 0].cpu().numpy()
        self.reference[place] = reference.gather(-1, targets[:, None])[:, 0].cpu().numpy()

    def quality(self, windows: int, seconds: float, reference_seconds: float) -> Quality:
        own, reference, kl, weights = self.own, self.reference, self.kl, self.weights
        return Quality(
            len(own),
            windows,
            _perplexity(own, weights),
            _perplexity(reference, weights),
            float(kl.mean()),
            float(np.median(kl)),
            float(np.percentile(kl, 99)),
            float(kl.max()),
            float(self.same.mean()),
            float(np.abs(own - reference).mean()),
            seconds,
            reference_seconds,
            None if weights is None else float(self.found.mean()),
            None if weights is None else float(self.reference_found.mean()),
        )


def _perplexity(logprobs: np.ndarray, weights: np.ndarray | None) -> float:
    mean = logprobs.mean() if weights is None else (logprobs * weights).sum()
    # A very bad model would overflow a double; exp(709) is the largest finite result.
    return math.exp(min(-float(mean), 709.0))


@torch.inference_mode()
def _compare(
    reference: _Side | _KeptSide,
    others: Sequence[_Side],
    windows: Sequence[EvaluationWindow],
    progress: Progress | None,
) -> list[Quality]:
    """Compare every model with the reference."""
    done, tallies = 0, [_Tally(windows) for _ in others]
    block = max(1, BLOCK_BYTES // (8 * others[0].model.vocab))
    for window in windows:
        hidden = [side.hidden(window) for side in (reference, *others)]
        lines, predicted = window.lines, window.predicted
        for at in range(0, len(lines), block):
            part = lines[at : at + block]
            targets = torch.tensor([window.tokens[i] for i in predicted[at : at + block]], device=others[0].device)
            expected = reference.logprobs(hidden[0][part])
            for side, tally, states in zip(others, tallies, hidden[1:], strict=True):
                tally.add(done, expected, side.logprobs(states[part]), targets)
            done += len(part)
            if progress is not None:
                progress(done)
    return [t.quality(len(windows), s.seconds, reference.seconds) for t, s in zip(tallies, others, strict=True)]
