"""One tokenizer for all tiny models: byte level, small enough for the smallest model, rich enough for JSON, for words
that several tokens spell, and for characters whose bytes are several tokens."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
END = 2
LETTERS = "abcdeilnorstuxy"
_SIGNS = ' {}[]":,0127\n'
_BYTES = "é😀".encode()
_MERGES = ('{"', '":', '",', '"}', "tr", "ue", "true", "ab", "abc", "es", "yes", "no", " a", " ab", "12", "an")
SMALLEST = 53
"""Ids of the smallest vocabulary."""
NAMELESS = 2
"""Ids of a larger vocabulary that no token has: padding, as published models have."""
_OF_CALLS = (b"<tool_call>", b"</tool_call>", b"name", b"arguments")
"""Words of larger vocabularies, with which a call is short enough for the smallest context. They are added tokens, as
published models have for the marks of a call: no other token spells some of their letters."""
TEMPLATE = (
    "{% if tools %}<|im_start|>s{% for t in tools %} {{ t['function']['name'] }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
"""Roles are one letter, and tools are names: the smallest context holds a question and a call."""


@lru_cache
def words_of(vocab: int) -> tuple[bytes, ...]:
    """The bytes of each token; empty for special tokens and for ids without a token."""
    plain = [c.encode() for c in _SIGNS + LETTERS] + [bytes([b]) for b in _BYTES] + [m.encode() for m in _MERGES]
    pairs = ((a + b).encode() for a in LETTERS for b in LETTERS)
    known = {b"", *plain}
    room = vocab - len(SPECIAL) - len(plain) - (NAMELESS if vocab > SMALLEST else 0)
    of_calls = list(_OF_CALLS) if room >= len(_OF_CALLS) else []
    more = [pair for pair in pairs if pair not in known][: max(0, room - len(of_calls))]
    words = [b""] * len(SPECIAL) + plain + more + of_calls
    return tuple((words + [b""] * vocab)[:vocab])


def ids_of_calls(vocab: int) -> list[int]:
    """The marks of a call, and the words in it; none in the smallest vocabulary."""
    return [number for number, word in enumerate(words_of(vocab)) if word in _OF_CALLS]


def chat(content: str, tools: Iterable[str]) -> str:
    """What the template makes of a user's message and the names of tools."""
    names = "".join(f" {name}" for name in tools)
    offer = f"<|im_start|>s{names}<|im_end|>\n" if names else ""
    return f"{offer}<|im_start|>u\n{content}<|im_end|>\n<|im_start|>a\n"


def text_of(tokens: Iterable[int], vocab: int, *, spells: bool = False) -> str:
    """`spells`: special tokens have their names as text."""
    return _bytes_of(tokens, vocab, spells).decode(errors="replace")


def stable_text_of(tokens: Iterable[int], vocab: int, *, spells: bool = False) -> str:
    """The text without the bytes at its end that a later token may complete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(_bytes_of(tokens, vocab, spells))


def _bytes_of(tokens: Iterable[int], vocab: int, spells: bool) -> bytes:
    words, special = words_of(vocab), len(SPECIAL)
    return b"".join(SPECIAL[t].encode() if spells and t < special else words[t] for t in tokens)


@lru_cache
def _letters_of_bytes() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def spelled(word: bytes) -> str:
    return "".join(_letters_of_bytes()[b] for b in word)


@lru_cache
def backend_of(vocab: int) -> Any:
    import tokenizers

    ids = {spelled(word): number for number, word in enumerate(words_of(vocab)) if word}
    ids |= {name: number for number, name in enumerate(SPECIAL)}
    merges = []
    for word in words_of(vocab):
        cut = next((i for i in range(len(word) - 1, 0, -1) if {spelled(word[:i]), spelled(word[i:])} <= ids.keys()), 0)
        if cut:
            merges.append((spelled(word[:cut]), spelled(word[cut:])))
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    of_calls = [words_of(vocab)[number].decode() for number in ids_of_calls(vocab)]
    made.add_tokens([tokenizers.AddedToken(word, special=False, normalized=False) for word in of_calls])
    return made


def encode(text: str, vocab: int) -> list[int]:
    return list(backend_of(vocab).encode(text, add_special_tokens=False).ids)


def add_to(folder: Path, vocab: int) -> None:
    """The tokenizer's files, and a configuration that knows its end token."""
    backend_of(vocab).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[END], "chat_template": TEMPLATE, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "generation_config.json"):
        if (file := folder / name).exists():
            found = json.loads(file.read_text())
            (folder / name).write_text(json.dumps(found | {"eos_token_id": END, "bos_token_id": None}))
