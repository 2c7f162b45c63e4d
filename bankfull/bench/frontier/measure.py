"""The figures of each way to run a model. One way is in memory at a time, beside the reference's head."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from bankfull.assembly import Assembled, assemble
from bankfull.bench.frontier.ways import RunWay, opened
from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import BankfullError, ModelError, RequestError
from bankfull.frontend import Frontend
from bankfull.layers.build import Build
from bankfull.limits.statistics import per_second
from bankfull.ops.pages.rounded import pages_name
from bankfull.quality.evaluate import KeptReference, Quality, dequantized, evaluate_kept, keep_reference
from bankfull.quality.recall import RecallPrompt, recall, recall_prompts
from bankfull.runtime.device import Device
from bankfull.sample.params import SamplingParams
from bankfull.text.load import load_tokenizer
from bankfull.text.tokenizer import Tokenizer
from bankfull.weights.locate import locate
from bankfull.weights.requantized import is_matrix
from bankfull.weights.source import TensorSource, open_model

PROMPT, OUTPUT = 256, 48
"""Tokens of the timed request, where the model's context has room for them."""
Advance = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class WayFigures:
    """A way with its costs and losses. KL is against the float32 reference, in nats per token."""

    way: RunWay
    bits_per_weight: float
    """Bits per weight of all matrices, with scales and minima."""
    weight_bytes: int
    """Bytes of all tensors as stored: a kernel may keep wider ones, or a copy for large batches."""
    quality: Quality
    recall: float | None
    decode_per_s: float | None
    """Output tokens per second of one stream; None if speed was not measured."""
    prefill_per_s: float | None
    dtype: str
    kv_dtype: str
    activations: str

    def as_json(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in self.__slots__ if name not in ("way", "quality")}
        kept = ("kl_mean", "kl_median", "kl_p99", "kl_max", "perplexity", "ratio", "top1")
        quality = self.quality.to_dict()
        return {"name": self.way.name, "way": asdict(self.way), **figures, **{name: quality[name] for name in kept}}


@dataclass(frozen=True, slots=True)
class Judge:
    """What every way is compared with: the reference's hidden states and head, and the prompts of the recall score."""

    model: str
    tokenizer: Tokenizer
    kept: KeptReference
    prompts: list[RecallPrompt]
    recall: float | None
    """Recall of the reference."""
    window: int


def judge_of(
    model: str, texts: Sequence[str], device: Device, window: int, progress: Callable[[int], None] | None = None
) -> Judge:
    """Runs the reference once; its layers are freed before this returns."""
    files = open_model(locate(model))
    tokenizer, _ = load_tokenizer(files)
    reference = dequantized(files, device.torch, window)
    window = min(window, reference.max_positions)
    ids = [tokenizer.encode(text, add_bos=False, parse_special=False) for text in texts]
    opening = tokenizer.opening if tokenizer.add_bos else ()
    kept = keep_reference(reference, ids, opening=opening, window=window, device=device.torch, progress=progress)
    prompts = recall_prompts(tokenizer, window)
    return Judge(model, tokenizer, kept, prompts, recall(reference, prompts, device.torch), window)


def measure(
    judge: Judge, ways: Sequence[RunWay], device: Device, *, reps: int, advance: Advance = lambda done, note: None
) -> Iterator[WayFigures | tuple[RunWay, str]]:
    """The figures of each way, or the sentence that says why it does not run here."""
    for number, way in enumerate(ways):
        advance(number, way.name)
        try:
            yield figures_of(judge, way, device, reps)
        except BankfullError as error:
            yield way, str(error)
        gc.collect()  # a model holds cycles; the next one must not stand beside it


def figures_of(judge: Judge, way: RunWay, device: Device, reps: int) -> WayFigures:
    files = opened(open_model(locate(judge.model)), way, device)
    if way.path is not None:
        tokenizer, _ = load_tokenizer(files)
        if tokenizer.first_other_token(judge.tokenizer) is not None:
            raise ModelError(f"{way.path} has another vocabulary than {judge.model}, so they cannot be compared.")
    sched = SchedConfig(rows=1, step_tokens=judge.window)
    assembled = assemble(files, way.run(str(device.torch)), sched, StateConfig(), max_len=judge.window, device=device)
    quality = evaluate_kept(assembled.model, judge.kept)
    recalled = recall(assembled.model, judge.prompts, device.torch)
    decode, prefill = speed_of(assembled, judge.tokenizer, reps) if reps else (None, None)
    sizes = {name: _bytes_of(files.source, name, assembled.build) for name in files.source.names()}
    matrices = [name for name in sizes if is_matrix(files.source, name)]
    weights = sum(math.prod(files.source.shape(name)) for name in matrices)
    return WayFigures(
        way,
        8 * sum(sizes[name] for name in matrices) / max(weights, 1),
        sum(sizes.values()),
        quality,
        recalled,
        decode,
        prefill,
        str(assembled.build.dtype).removeprefix("torch."),
        pages_name(assembled.build.pages),
        assembled.build.activations.name,
    )


def _bytes_of(source: TensorSource, name: str, build: Build) -> int:
    shape, scheme = source.shape(name), source.scheme(name)
    if scheme.is_dense or build.expand:
        dtype = build.matrices if len(shape) > 1 else build.dtype
        return math.prod(shape) * dtype.itemsize
    return math.prod(shape[:-1]) * scheme.row_bytes(shape[-1])


def speed_of(made: Assembled, tokenizer: Tokenizer, reps: int) -> tuple[float | None, float | None]:
    """Tokens per second of decode and of prefill: medians over repetitions of one request after a warm-up."""
    front = Frontend(made.engine, tokenizer, None, vocab=made.model.vocab, max_len=made.sizes.max_len)
    output = min(OUTPUT, made.sizes.max_len // 4)
    prompt = min(PROMPT, made.sizes.max_len - output)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    times = []
    for turn in range(reps + 1):
        ids = random.Random(f"speed {turn}").choices(range(made.model.vocab), k=prompt)
        times.append(_timed(front, ids, params, turn))
    prefills, decodes = zip(*times[1:], strict=True)
    return per_second(output - 1, median(decodes)), per_second(prompt, median(prefills))


def _timed(front: Frontend, prompt: list[int], params: SamplingParams, turn: int) -> tuple[float, float]:
    """Seconds until the first token, and after it."""
    begun = first = perf_counter()
    request = front.submit(prompt, params, salt=f"frontier {turn}")
    produced, ended = 0, False
    try:
        while not ended:
            for delta in front.step():
                if delta.error is not None:
                    raise RequestError(delta.error)
                if not produced and delta.token_ids:
                    first = perf_counter()
                produced += len(delta.token_ids)
                ended = ended or delta.finish_reason is not None
    finally:
        front.abort(request)
        front.pending.pop(request, None)
    return first - begun, perf_counter() - first
