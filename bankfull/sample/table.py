"""The sampling parameters of every row: as device tensors for the kernels, as host facts for skipping stages.

A step gathers its lines with one index per tensor. Neutral values are exact no-ops (divide by 1, subtract 0, keep
all), so a row's numbers are the same whether or not another row caused a stage to run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bankfull.errors import RequestError
from bankfull.sample.params import MAX_VOCAB, SamplingParams
from bankfull.types import Enter

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(7)
SEED, CHILD, PROMPT_LEN, TOP_K, STOP_FROM, GREEDY, LOGPROBS = range(7)
"""Columns of `SamplingTable.reals` and of `SamplingTable.wholes`."""

_NEUTRAL_REALS = (1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Which sampling stages a row needs, known to the host; an unset row is plain greedy."""

    greedy: bool = True
    repeats: bool = False
    """Repetition penalty."""
    counts: bool = False
    """Presence or frequency penalty."""
    biased: bool = False
    """Logit bias."""
    restricted: bool = False
    """Allowed or banned token ids."""
    masked: bool = False
    """A grammar, whose mask is known only after the previous token."""
    waits: bool = False
    """Stop tokens banned until min_tokens."""
    bad_words: bool = False
    top_k: int | None = None
    nucleus: bool = False
    """top_p."""
    min_p: bool = False
    typical: bool = False
    logprobs: int | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether a stage reads the tokens before the position."""
        return self.repeats or self.counts or self.bad_words

    @property
    def simple(self) -> bool:
        """Greedy, or temperature, top-k, top-p and min-p over unmodified logits: stages that a kernel does by
        itself."""
        return replace(self, greedy=True, top_k=None, nucleus=False, min_p=False) == PLAIN


Chooser = Callable[[Tensor, Tensor, "SamplingTable", Tensor], Tensor]
"""Scores, the lines' rows, the table and the lines' lengths -> one token per line, greedy ones included; it gets no
lines with `typical`."""
PLAIN = RowFacts()
"""Plain greedy decoding."""


class SamplingTable:
    """One line per row. Tensors for parameters of variable length are allocated at their first use, and grow."""

    def __init__(self, rows: int, vocab: int, device: torch.device | str = "cpu") -> None:
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab} tokens is outside 1 to {MAX_VOCAB}")
        self.rows = rows
        self.vocab = vocab
        self.device = torch.device(device)
        self.words = (vocab + 31) // 32
        self.facts: list[RowFacts] = [PLAIN] * rows
        self._neutral_whole = (0, 0, 0, vocab, 0, 1, -1)
        self.reals = torch.tensor([_NEUTRAL_REALS] * rows, dtype=torch.float64, device=self.device).view(rows, -1)
        self.wholes = torch.tensor([self._neutral_whole] * rows, dtype=torch.int64, device=self.device).view(rows, -1)
        self.allowed: Tensor | None = None
        self.stops: Tensor | None = None
        self.bias_ids: Tensor | None = None
        self.bias_values: Tensor | None = None
        self.bad_words: Tensor | None = None
        self.chooser: Chooser | None = None
        """The sampling kernel, where there is one; else tensor operations sample."""

    def set(self, enters: Sequence[Enter]) -> None:
        """Sequences enter rows. Their payload is the runner's (`runtime.rows.Job`): `params`, `seed`, `stop_ids` (end
        tokens and stop_token_ids, banned before min_tokens) and `allowed_mask`, where it was computed before."""
        jobs = [enter.payload for enter in enters]
        for job in jobs:
            if job.params.bad_words and not job.params.bad_word_ids:
                raise RuntimeError("bad_words must be tokenized into bad_word_ids before a request enters a row")
            if job.allowed_mask is None:
                self.check(job.params, job.stop_ids)
        facts = [self.facts_of(job.params, job.stop_ids) for job in jobs]
        rows = [enter.row for enter in enters]
        self._write(
            self.reals,
            rows,
            [
                (
                    1.0 if params.greedy else params.temperature,
                    params.top_p,
                    params.min_p,
                    params.typical_p,
                    params.repetition_penalty,
                    params.presence_penalty,
                    params.frequency_penalty,
                )
                for params in (job.params for job in jobs)
            ],
        )
        self._write(
            self.wholes,
            rows,
            [
                (
                    job.seed,
                    enter.child,
                    enter.prompt_len,
                    fact.top_k or self.vocab,
                    enter.prompt_len + job.params.min_tokens,
                    int(job.params.greedy),
                    -1 if job.params.logprobs is None else job.params.logprobs,
                )
                for enter, job, fact in zip(enters, jobs, facts, strict=True)
            ],
        )
        for row, job, fact in zip(rows, jobs, facts, strict=True):
            self._set_bits(row, job.params, job.stop_ids, job.allowed_mask, fact)
            self._set_bias(row, job.params)
            self._set_bad_words(row, job.params)
            self.facts[row] = PLAIN if fact == PLAIN else fact  # the same object, so that comparing is cheap

    def clear(self, rows: Sequence[int]) -> None:
        """Sequences have left; until the next `set` their rows are plain greedy."""
        self._write(self.reals, rows, [_NEUTRAL_REALS] * len(rows))
        self._write(self.wholes, rows, [self._neutral_whole] * len(rows))
        for row in rows:
            self.facts[row] = PLAIN
            if self.allowed is not None:
                self.allowed[row].fill_(-1)
            if self.stops is not None:
                self.stops[row].zero_()
            if self.bias_values is not None:
                self.bias_values[row].zero_()
            if self.bad_words is not None:
                self.bad_words[row].fill_(-1)

    def facts_for(self, host_rows: Sequence[int] | None, count: int) -> list[RowFacts]:
        """Facts of the lines of a batch; without host rows every line gets the union of all rows' facts."""
        if host_rows is not None:
            if len(host_rows) != count:
                raise ValueError(f"{len(host_rows)} host rows for {count} rows of logits")
            return [self.facts[row] for row in host_rows]
        asked = [fact.logprobs for fact in self.facts if fact.logprobs is not None]
        union = RowFacts(
            greedy=all(fact.greedy for fact in self.facts),
            top_k=self.vocab if any(fact.top_k for fact in self.facts) else None,
            logprobs=max(asked, default=None),
            **{
                name: any(getattr(fact, name) for fact in self.facts)
                for name in (
                    "repeats",
                    "counts",
                    "biased",
                    "restricted",
                    "masked",
                    "waits",
                    "bad_words",
                    "nucleus",
                    "min_p",
                    "typical",
                )
            },
        )
        return [union] * count

    def ship(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """Host values as a device tensor, without waiting for the device; torch frees pinned memory after the copy."""
        on_gpu = self.device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=on_gpu).to(self.device, non_blocking=True)

    def choose(self, facts: Sequence[RowFacts], wants: Callable[[RowFacts], bool]) -> SelectedLines:
        lines = [line for line, fact in enumerate(facts) if wants(fact)]
        every = len(lines) == len(facts)
        return SelectedLines(lines, None if every or not lines else self.ship(lines, torch.int64))

    def facts_of(self, params: SamplingParams, stop_ids: Collection[int]) -> RowFacts:
        chance = not params.greedy
        return RowFacts(
            greedy=params.greedy,
            repeats=params.repetition_penalty != 1.0,
            counts=params.presence_penalty != 0.0 or params.frequency_penalty != 0.0,
            biased=bool(params.logit_bias),
            restricted=params.allowed_token_ids is not None or bool(params.banned_token_ids),
            waits=params.min_tokens > 0 and bool(stop_ids),
            masked=params.structured is not None,
            bad_words=bool(params.bad_word_ids),
            top_k=params.top_k if chance and 0 < params.top_k < self.vocab else None,
            nucleus=chance and params.top_p < 1.0,
            min_p=chance and params.min_p > 0.0,
            typical=chance and params.typical_p < 1.0,
            logprobs=params.logprobs,
        )

    def check(self, params: SamplingParams, stop_ids: Collection[int]) -> None:
        """Raises RequestError where a token id is outside of the vocabulary."""
        named: tuple[tuple[str, Collection[int]], ...] = (
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("banned_token_ids", params.banned_token_ids),
            ("stop_token_ids", stop_ids),
            *(("bad_words", ids) for ids in params.bad_word_ids),
        )
        for name, ids in named:
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab):
                wrong = next(token for token in ids if not 0 <= token < self.vocab)
                raise RequestError(f"{name} names token {wrong}, but the model's ids go from 0 to {self.vocab - 1}.")

    def _write(self, table: Tensor, rows: Sequence[int], values: Sequence[Sequence[float | int]]) -> None:
        """One line for each row, in one copy."""
        if len(rows) == 1:
            table[rows[0]].copy_(self.ship(values[0], table.dtype), non_blocking=True)
        elif rows:
            table.index_copy_(0, self.ship(rows, torch.int64), self.ship(values, table.dtype))

    def _bits(self, ids: Collection[int]) -> Tensor:
        """A packed mask (bit t % 32 of integer t // 32) on the host."""
        flags = torch.zeros(self.words * 32, dtype=torch.int64)
        flags[torch.tensor(list(ids), dtype=torch.int64)] = 1
        return (flags.view(-1, 32) << torch.arange(32)).sum(-1).to(torch.int32)

    def allowed_mask(self, params: SamplingParams) -> Tensor | None:
        """The request's allowed tokens as a packed mask on the host; None if all are. Computed once for all of its
        samples, outside of steps: a list of ids may be as long as the vocabulary."""
        if params.allowed_token_ids is None and not params.banned_token_ids:
            return None
        line = torch.full((self.words,), -1, dtype=torch.int32)
        if params.allowed_token_ids is not None:
            line &= self._bits(params.allowed_token_ids)
        if params.banned_token_ids:
            line &= ~self._bits(params.banned_token_ids)
        return line.pin_memory() if self.device.type == "cuda" else line

    def _set_bits(
        self, row: int, params: SamplingParams, stop_ids: Collection[int], mask: Tensor | None, facts: RowFacts
    ) -> None:
        if facts.restricted and self.allowed is None:
            self.allowed = torch.full((self.rows, self.words), -1, dtype=torch.int32, device=self.device)
        if self.allowed is not None:
            mask = self.allowed_mask(params) if mask is None else mask
            if mask is None:
                self.allowed[row].fill_(-1)
            else:
                self.allowed[row].copy_(mask, non_blocking=True)
        if facts.waits and self.stops is None:
            self.stops = torch.zeros((self.rows, self.words), dtype=torch.int32, device=self.device)
        if self.stops is not None:
            if facts.waits:
                packed = self._bits(stop_ids)
                if self.device.type == "cuda":
                    packed = packed.pin_memory()
                self.stops[row].copy_(packed, non_blocking=True)
            else:
                self.stops[row].zero_()

    def _set_bias(self, row: int, params: SamplingParams) -> None:
        bias = params.logit_bias or {}
        if bias:
            self.bias_ids = self._widened(self.bias_ids, (len(bias),), 0, torch.int64)
            self.bias_values = self._widened(self.bias_values, (len(bias),), 0, torch.float64)
        if self.bias_ids is not None and self.bias_values is not None:
            padding = [0] * (self.bias_ids.shape[1] - len(bias))
            self._write(self.bias_ids, [row], [[*bias, *padding]])
            self._write(self.bias_values, [row], [[*bias.values(), *padding]])

    def _set_bad_words(self, row: int, params: SamplingParams) -> None:
        """Write a row's bad words, right-aligned: the banned token is in the last column, and -1 before it matches
        anything."""
        words = params.bad_word_ids
        if words:
            self.bad_words = self._widened(self.bad_words, (len(words), max(map(len, words))), -1, torch.int64)
        if self.bad_words is not None:
            _, count, width = self.bad_words.shape
            lines = [[-1] * (width - len(ids)) + list(ids) for ids in words]
            lines += [[-1] * width] * (count - len(words))
            self.bad_words[row].copy_(self.ship(lines, torch.int64), non_blocking=True)

    def _widened(self, old: Tensor | None, sizes: tuple[int, ...], fill: int, dtype: torch.dtype) -> Tensor:
        """A tensor at least `sizes` wide in every ragged dimension, in powers of two; old lines stay, padded at their
        padding side (bad words grow to the left)."""
        if old is not None and all(have >= want for have, want in zip(old.shape[1:], sizes, strict=True)):
            return old
        have = (0,) * len(sizes) if old is None else tuple(old.shape[1:])
        grown = [max(now, 1 << (want - 1).bit_length()) for now, want in zip(have, sizes, strict=True)]
        new = torch.full((self.rows, *grown), fill, dtype=dtype, device=self.device)
        if old is not None:
            corner = new[:, : have[0]] if len(have) == 1 else new[:, : have[0], grown[1] - have[1] :]
            corner.copy_(old)
        return new


@dataclass(frozen=True, slots=True)
class SelectedLines:
    """Some lines of a batch. `index` is None when it has all lines, so that nothing is gathered."""

    lines: list[int]
    index: Tensor | None

    def __bool__(self) -> bool:
        return bool(self.lines)

    def of(self, facts: Sequence[RowFacts]) -> list[RowFacts]:
        return [facts[line] for line in self.lines]

    def take(self, tensor: Tensor) -> Tensor:
        return tensor if self.index is None else tensor.index_select(0, self.index)

    def put(self, whole: Tensor, part: Tensor) -> Tensor:
        """A copy of `whole` with the chosen lines replaced: the logits belong to the caller."""
        return part if self.index is None else whole.index_copy(0, self.index, part)
