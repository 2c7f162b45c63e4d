"""The sampling wishes of every permanent row: as device tensors for the kernels, as host facts for skipping work.

A step gathers its lines with one index per tensor. Neutral values are exact no-ops (divide by 1, subtract 0, keep
all), so a row's numbers are the same whether or not a batch-mate caused a stage to run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bankfull.errors import RequestError
from bankfull.sample.params import MAX_VOCAB, SamplingParams

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(7)
SEED, CHILD, PROMPT_LEN, TOP_K, STOP_FROM, GREEDY, LOGPROBS = range(7)

_NEUTRAL_REALS = (1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the host knows about a row; an unset row is a plain greedy one."""

    greedy: bool = True
    repeats: bool = False
    counts: bool = False
    biased: bool = False
    fenced: bool = False
    masked: bool = False
    """By a grammar: what it allows is known only once the token before is."""
    waits: bool = False
    worded: bool = False
    top_k: int | None = None
    nucleus: bool = False
    min_p: bool = False
    typical: bool = False
    logprobs: int | None = None

    @property
    def simple(self) -> bool:
        """Greedy, or temperature, top-k, top-p and min-p over the model's own scores: what a kernel draws by itself."""
        return replace(self, greedy=True, top_k=None, nucleus=False, min_p=False) == PLAIN


Chooser = Callable[[Tensor, Tensor, "SamplingTable", Tensor], Tensor]
"""Scores, the lines' rows, the table and the lines' lengths -> one token per line, greedy ones included; lines with
`typical` are not given to it."""
PLAIN = Facts()
"""Nothing but the likeliest token."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the request wants that enters a row."""

    row: int
    params: SamplingParams
    prompt_len: int
    child: int
    seed: int
    stop_ids: Collection[int]
    """End tokens and stop_token_ids: banned until min_tokens are out."""
    fence: Tensor | None = None
    """What `fence` made of the params when they were checked."""


class SamplingTable:
    """One line per permanent row. Tensors for ragged wishes appear when a request first needs them, and grow."""

    def __init__(self, rows: int, vocab: int, device: torch.device | str = "cpu") -> None:
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab} tokens is outside 1 to {MAX_VOCAB}")
        self.rows = rows
        self.vocab = vocab
        self.device = torch.device(device)
        self.words = (vocab + 31) // 32
        self.facts: list[Facts] = [PLAIN] * rows
        self._neutral_whole = (0, 0, 0, vocab, 0, 1, -1)
        self.reals = torch.tensor([_NEUTRAL_REALS] * rows, dtype=torch.float64, device=self.device).view(rows, -1)
        self.wholes = torch.tensor([self._neutral_whole] * rows, dtype=torch.int64, device=self.device).view(rows, -1)
        self.allowed: Tensor | None = None
        self.stops: Tensor | None = None
        self.bias_ids: Tensor | None = None
        self.bias_values: Tensor | None = None
        self.bad_words: Tensor | None = None
        self.chooser: Chooser | None = None
        """What draws tokens in the place of tensor operations, where there is such a kernel."""

    def set(self, wishes: Sequence[Wish]) -> None:
        """Requests enter rows."""
        for wish in wishes:
            if wish.params.bad_words and not wish.params.bad_word_ids:
                raise RuntimeError("bad_words must be tokenized into bad_word_ids before a request enters a row")
            if wish.fence is None:
                self.check(wish.params, wish.stop_ids)
        facts = [self.facts_of(wish.params, wish.stop_ids) for wish in wishes]
        rows = [wish.row for wish in wishes]
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
                for params in (wish.params for wish in wishes)
            ],
        )
        self._write(
            self.wholes,
            rows,
            [
                (
                    wish.seed,
                    wish.child,
                    wish.prompt_len,
                    fact.top_k or self.vocab,
                    wish.prompt_len + wish.params.min_tokens,
                    int(wish.params.greedy),
                    -1 if wish.params.logprobs is None else wish.params.logprobs,
                )
                for wish, fact in zip(wishes, facts, strict=True)
            ],
        )
        for wish, fact in zip(wishes, facts, strict=True):
            self._set_bits(wish, fact)
            self._set_bias(wish.row, wish.params)
            self._set_bad_words(wish.row, wish.params)
            self.facts[wish.row] = PLAIN if fact == PLAIN else fact  # the very same, so that asking is cheap

    def clear(self, rows: Sequence[int]) -> None:
        """Requests have left; until the next `set` their rows are plain greedy ones."""
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

    def facts_for(self, host_rows: Sequence[int] | None, count: int) -> list[Facts]:
        """Facts of a batch; without host rows every line is taken to want what any row of the table wants."""
        if host_rows is not None:
            if len(host_rows) != count:
                raise ValueError(f"{len(host_rows)} host rows for {count} rows of logits")
            return [self.facts[row] for row in host_rows]
        asked = [fact.logprobs for fact in self.facts if fact.logprobs is not None]
        union = Facts(
            greedy=all(fact.greedy for fact in self.facts),
            top_k=self.vocab if any(fact.top_k for fact in self.facts) else None,
            logprobs=max(asked, default=None),
            **{
                name: any(getattr(fact, name) for fact in self.facts)
                for name in (
                    "repeats",
                    "counts",
                    "biased",
                    "fenced",
                    "masked",
                    "waits",
                    "worded",
                    "nucleus",
                    "min_p",
                    "typical",
                )
            },
        )
        return [union] * count

    def ship(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """Host values as a device tensor, without waiting for the device: pinned memory is freed by its own event."""
        on_gpu = self.device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=on_gpu).to(self.device, non_blocking=True)

    def choose(self, facts: Sequence[Facts], wants: Callable[[Facts], bool]) -> Choice:
        lines = [line for line, fact in enumerate(facts) if wants(fact)]
        every = len(lines) == len(facts)
        return Choice(lines, None if every or not lines else self.ship(lines, torch.int64))

    def facts_of(self, params: SamplingParams, stop_ids: Collection[int]) -> Facts:
        chance = not params.greedy
        return Facts(
            greedy=params.greedy,
            repeats=params.repetition_penalty != 1.0,
            counts=params.presence_penalty != 0.0 or params.frequency_penalty != 0.0,
            biased=bool(params.logit_bias),
            fenced=params.allowed_token_ids is not None or bool(params.banned_token_ids),
            waits=params.min_tokens > 0 and bool(stop_ids),
            masked=params.structured is not None,
            worded=bool(params.bad_word_ids),
            top_k=params.top_k if chance and 0 < params.top_k < self.vocab else None,
            nucleus=chance and params.top_p < 1.0,
            min_p=chance and params.min_p > 0.0,
            typical=chance and params.typical_p < 1.0,
            logprobs=params.logprobs,
        )

    def check(self, params: SamplingParams, stop_ids: Collection[int]) -> None:
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
        """One line for each row; whatever their number, they cross in one copy."""
        if len(rows) == 1:
            table[rows[0]].copy_(self.ship(values[0], table.dtype), non_blocking=True)
        elif rows:
            table.index_copy_(0, self.ship(rows, torch.int64), self.ship(values, table.dtype))

    def _bits(self, ids: Collection[int]) -> Tensor:
        """A packed line (bit t % 32 of word t // 32), on the host: it crosses as one small copy."""
        flags = torch.zeros(self.words * 32, dtype=torch.int64)
        flags[torch.tensor(list(ids), dtype=torch.int64)] = 1
        return (flags.view(-1, 32) << torch.arange(32)).sum(-1).to(torch.int32)

    def fence(self, params: SamplingParams) -> Tensor | None:
        """The tokens that a request may use, as a packed line on the host; None: all. Made once for all of its samples,
        beside the steps: a list of ids may be as long as the vocabulary."""
        if params.allowed_token_ids is None and not params.banned_token_ids:
            return None
        line = torch.full((self.words,), -1, dtype=torch.int32)
        if params.allowed_token_ids is not None:
            line &= self._bits(params.allowed_token_ids)
        if params.banned_token_ids:
            line &= ~self._bits(params.banned_token_ids)
        return line.pin_memory() if self.device.type == "cuda" else line

    def _set_bits(self, wish: Wish, facts: Facts) -> None:
        row = wish.row
        if facts.fenced and self.allowed is None:
            self.allowed = torch.full((self.rows, self.words), -1, dtype=torch.int32, device=self.device)
        if self.allowed is not None:
            fence = self.fence(wish.params) if wish.fence is None else wish.fence
            if fence is None:
                self.allowed[row].fill_(-1)
            else:
                self.allowed[row].copy_(fence, non_blocking=True)
        if facts.waits and self.stops is None:
            self.stops = torch.zeros((self.rows, self.words), dtype=torch.int32, device=self.device)
        if self.stops is not None:
            if facts.waits:
                packed = self._bits(wish.stop_ids)
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
        """Right-aligned: the banned token is in the last column, and -1 before it matches anything."""
        words = params.bad_word_ids
        if words:
            self.bad_words = self._widened(self.bad_words, (len(words), max(map(len, words))), -1, torch.int64)
        if self.bad_words is not None:
            _, count, width = self.bad_words.shape
            lines = [[-1] * (width - len(ids)) + list(ids) for ids in words]
            lines += [[-1] * width] * (count - len(words))
            self.bad_words[row].copy_(self.ship(lines, torch.int64), non_blocking=True)

    def _widened(self, old: Tensor | None, sizes: tuple[int, ...], fill: int, dtype: torch.dtype) -> Tensor:
        """At least `sizes` wide in every ragged dimension, in powers of two; old lines stay, padded at their padding
        side (bad words grow to the left)."""
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
class Choice:
    """Some lines of a batch. `index` is None when it is all of them, so that nothing is gathered."""

    lines: list[int]
    index: Tensor | None

    def __bool__(self) -> bool:
        return bool(self.lines)

    def of(self, facts: Sequence[Facts]) -> list[Facts]:
        return [facts[line] for line in self.lines]

    def take(self, tensor: Tensor) -> Tensor:
        return tensor if self.index is None else tensor.index_select(0, self.index)

    def put(self, whole: Tensor, part: Tensor) -> Tensor:
        """`whole` with the chosen lines replaced, as a new tensor: the logits belong to the caller."""
        return part if self.index is None else whole.index_copy(0, self.index, part)
