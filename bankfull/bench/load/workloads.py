"""What is asked: conversations of one or more turns, all made before the first request is sent.

A prompt is a list of token ids where the server can tell some (/tokenize), so that its length is exact; else a text of
common words. What the server counts is what is reported.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Protocol

import msgspec

from bankfull.bench.load.arrivals import check_count
from bankfull.errors import ConfigError

Prompt = str | list[int]
MOST_TOKENS = 1 << 20
"""Of one prompt or answer."""
LARGEST_FILE = 2 << 30
BLOCK_TOKENS = 512
"""That a hash of a Mooncake trace stands for."""
CHARACTERS_PER_TOKEN = 4.0
"""Of English text, where nobody can count."""


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: Prompt
    """What this turn adds to what was said before."""
    max_tokens: int
    tokens: int | None = None
    """Of the prompt; None: only the server can tell."""


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    at: float | None = None
    """Seconds from the beginning, where a trace says so."""


# -- lengths


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts or answers, in tokens: "512", "100-900" (all alike likely), or "512~0.8" (log-normal: the mean,
    and the standard deviation as a part of it)."""

    mean: float
    low: int
    high: int
    spread: float = 0.0

    def draw(self, numbers: random.Random) -> int:
        if self.spread:
            # The underlying normal distribution of a log-normal one with this mean and coefficient of variation.
            variance = math.log1p(self.spread**2)
            found = numbers.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
            return min(max(round(found), self.low), self.high)
        return self.low if self.low == self.high else numbers.randint(self.low, self.high)


def parse_lengths(text: str) -> Lengths:
    matched = re.fullmatch(r"\s*(\d{1,9})\s*(?:(-|~)\s*([0-9.]{1,9}))?\s*", text)
    try:
        if matched is None:
            raise ValueError
        first, how, second = int(matched[1]), matched[2], float(matched[3] or 0)
        if how == "~":
            made = Lengths(first, 1, MOST_TOKENS, second)
        else:
            last = int(second) if how else first
            made = Lengths((first + last) / 2, first, last)
    except ValueError:
        raise ConfigError(f"{text!r} is no length in tokens; write 512, 100-900 or 512~0.8.") from None
    if not 1 <= made.low <= made.high <= MOST_TOKENS or not 1 <= made.mean <= MOST_TOKENS or made.spread > 10:
        raise ConfigError(f"The length {text!r} must lie between 1 and {MOST_TOKENS} tokens.")
    return made


# -- words


class Words(Protocol):
    """Makes prompts of a number of tokens, and counts those of a text."""

    def take(self, numbers: random.Random, tokens: int) -> Prompt: ...

    def join(self, first: Prompt, second: Prompt) -> Prompt: ...

    def count(self, text: str) -> int: ...


class Tokenizes(Protocol):
    def tokenize(self, text: str) -> list[int] | None: ...


class TokenWords:
    """Random ids among those that a server made of ordinary text: lengths are exact."""

    def __init__(self, server: Tokenizes, known: Sequence[int]) -> None:
        self._server, self._known = server, sorted(set(known))

    def take(self, numbers: random.Random, tokens: int) -> Prompt:
        return numbers.choices(self._known, k=tokens)

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        assert isinstance(first, list) and isinstance(second, list)
        return first + second

    def count(self, text: str) -> int:
        return len(self._server.tokenize(text) or ())


class TextWords:
    """Random words of ordinary text; how many tokens a word is can be told, else it is a rule of thumb."""

    def __init__(self, server: Tokenizes | None = None) -> None:
        self._server = server

    def take(self, numbers: random.Random, tokens: int) -> Prompt:
        words = max(1, round(tokens / self._tokens_per_word))
        return " ".join(numbers.choices(pool(), k=words))

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        return f"{first} {second}"

    def count(self, text: str) -> int:
        found = None if self._server is None else self._server.tokenize(text)
        return max(1, round(len(text) / CHARACTERS_PER_TOKEN)) if found is None else len(found)

    @cached_property
    def _tokens_per_word(self) -> float:
        sample = random.Random("words").choices(pool(), k=400)
        return max(0.25, self.count(" ".join(sample)) / len(sample))


def pool() -> list[str]:
    """Words of the texts that quality is evaluated on."""
    if not _pool:
        folder = package_files("bankfull.limits") / "evaluation"
        texts = " ".join((folder / name).read_text() for name in ("story.txt", "papers.txt", "lesson.txt"))
        _pool.extend(sorted({word for word in re.findall(r"[a-z]+", texts.lower()) if len(word) > 2}))
    return _pool


_pool: list[str] = []
FEWEST_WORDS = 32
"""That prompts may be made of."""


def words_of(server: Tokenizes, how: str = "auto") -> Words:
    """`how`: ids, text, or auto: ids where the server tells some."""
    if how not in ("auto", "ids", "text"):
        raise ConfigError(f"There are no prompts {how!r}; use auto, ids or text.")
    if how == "text":
        return TextWords(server)
    words = pool()
    while (known := server.tokenize(" ".join(words))) is None and len(words) > FEWEST_WORDS:
        words = words[::2]  # a server may refuse a text that is longer than its context could hold
    if known is not None:
        return TokenWords(server, known)
    if how == "ids":
        raise ConfigError("The server has no /tokenize, so no token ids are known; use --prompts text.")
    return TextWords()


# -- workloads


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random prompts of given lengths; with prefixes, each begins with one of a few; with turns, each goes on."""

    input: Lengths
    output: Lengths
    prefixes: int = 0
    prefix_tokens: int = 0
    turns: int = 1

    def __post_init__(self) -> None:
        if (self.prefixes > 0) != (self.prefix_tokens > 0):
            raise ConfigError("Shared prefixes need both --prefixes (how many) and --prefix-len (tokens of each).")
        if self.prefixes < 0 or not 0 <= self.prefix_tokens <= MOST_TOKENS:
            raise ConfigError(f"{self.prefixes} prefixes of {self.prefix_tokens} tokens cannot be made.")
        if not 1 <= self.turns <= 1000:
            raise ConfigError(f"turns={self.turns} must lie between 1 and 1000.")

    def make(self, count: int, seed: int, words: Words) -> list[Conversation]:
        check_count(count)
        numbers = random.Random(f"workload/{seed}")
        shared = [words.take(random.Random(f"prefix/{n}"), self.prefix_tokens) for n in range(self.prefixes)]
        return [self._one(numbers, words, shared) for _ in range(count)]

    def _one(self, numbers: random.Random, words: Words, shared: list[Prompt]) -> Conversation:
        turns = []
        for turn in range(self.turns):
            length = self.input.draw(numbers)
            prompt = words.take(numbers, length)
            if shared and turn == 0:
                prompt, length = words.join(numbers.choice(shared), prompt), length + self.prefix_tokens
            turns.append(Turn(prompt, self.output.draw(numbers), length))
        return Conversation(tuple(turns))


class _Said(msgspec.Struct):
    value: str = ""
    speaker: str = msgspec.field(name="from", default="")
    role: str = ""
    content: str = ""


class _Talk(msgspec.Struct):
    conversations: list[_Said] = []
    conversation: list[_Said] = []
    messages: list[_Said] = []


_ASKS = {"human", "user"}
_ANSWERS = {"gpt", "assistant", "chatgpt", "bing", "bard"}


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """A file in ShareGPT's form: a list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}.

    Each answer is as long as the recorded one, or `output`. `turns`: how many of a conversation are asked; the answers
    in between are the server's own.
    """

    path: Path
    output: Lengths | None = None
    turns: int = 1

    def make(self, count: int, seed: int, words: Words) -> list[Conversation]:
        check_count(count)
        talks = _decoded(self.path, list[_Talk])
        numbers = random.Random(f"workload/{seed}")
        numbers.shuffle(talks)
        found: list[Conversation] = []
        for talk in talks:
            pairs = _pairs(talk)[: self.turns]
            if pairs:
                found.append(Conversation(tuple(self._turn(ask, said, numbers, words) for ask, said in pairs)))
            if len(found) == count:
                return found
        if not found:
            raise ConfigError(f"{self.path} has no conversation that begins with a question and its answer.")
        return [found[number % len(found)] for number in range(count)]

    def _turn(self, ask: str, said: str, numbers: random.Random, words: Words) -> Turn:
        wanted = words.count(said) if self.output is None else self.output.draw(numbers)
        return Turn(ask, min(max(1, wanted), MOST_TOKENS))


def _pairs(talk: _Talk) -> list[tuple[str, str]]:
    lines = talk.conversations or talk.conversation or talk.messages
    said = [(line.speaker or line.role, line.value or line.content) for line in lines]
    while said and said[0][0] not in _ASKS:
        said = said[1:]
    found = []
    for (asker, ask), (teller, told) in zip(said[::2], said[1::2], strict=False):
        if asker not in _ASKS or teller not in _ANSWERS or not ask.strip() or not told.strip():
            break
        found.append((ask, told))
    return found


class _Line(msgspec.Struct):
    input_length: int
    output_length: int
    timestamp: float = 0.0
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class Trace:
    """Times and lengths that were recorded: JSON lines as of Mooncake (timestamp in milliseconds, input_length,
    output_length, and hash_ids, one for each 512 tokens: equal ids are equal tokens), or a table with commas as of
    Azure (TIMESTAMP, ContextTokens, GeneratedTokens). `speed` 2 replays it in half the time."""

    path: Path
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"speed={self.speed} must be above 0.")

    def make(self, count: int, seed: int, words: Words) -> list[Conversation]:
        """The first `count`, or all."""
        lines = _table(self.path) if self.path.suffix.lower() == ".csv" else _lines(self.path)
        lines = sorted(lines, key=lambda line: line.timestamp)[:count]
        if not lines:
            raise ConfigError(f"{self.path} holds no request.")
        check_count(len(lines))
        begin = lines[0].timestamp
        return [
            Conversation((self._turn(line, f"{seed}/{number}", words),), (line.timestamp - begin) / 1e3 / self.speed)
            for number, line in enumerate(lines)
        ]

    def _turn(self, line: _Line, name: str, words: Words) -> Turn:
        length, output = line.input_length, line.output_length
        if not 1 <= length <= MOST_TOKENS or not 0 <= output <= MOST_TOKENS:
            raise ConfigError(f"{self.path} has a request of {length} + {output} tokens, which cannot be asked.")
        known = line.hash_ids[: length // BLOCK_TOKENS]
        parts = [words.take(random.Random(f"block/{block}"), BLOCK_TOKENS) for block in known]
        left = length - BLOCK_TOKENS * len(known)
        if left:
            parts.append(words.take(random.Random(f"trace/{name}"), left))
        prompt = parts[0]
        for part in parts[1:]:
            prompt = words.join(prompt, part)
        return Turn(prompt, max(1, output), length)


Workload = Synthetic | ShareGpt | Trace


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{path} is larger than {LARGEST_FILE >> 30} GiB; cut it first.")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None


def _decoded(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(_read(path), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not in ShareGPT's form: {error}.") from None


def _lines(path: Path) -> list[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    found = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"Line {number} of the trace {path} cannot be read: {error}.") from None
    return found


def _table(path: Path) -> list[_Line]:
    import csv
    import io
    from datetime import datetime

    def milliseconds(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            # Azure writes seven digits behind the point, one more than a datetime holds.
            return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.strip())).timestamp() * 1e3

    rows = csv.DictReader(io.StringIO(_read(path).decode(errors="replace")))
    found = []
    for number, row in enumerate(rows, 2):
        fields = {str(name).strip().lower(): value for name, value in row.items()}
        try:
            found.append(
                _Line(
                    int(fields.get("contexttokens") or fields["input_length"]),
                    int(fields.get("generatedtokens") or fields["output_length"]),
                    milliseconds(fields["timestamp"]),
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"Line {number} of the trace {path} has no TIMESTAMP, ContextTokens and GeneratedTokens ({error})."
            ) from None
    return found
