"""Texts that break tokenizers."""

import random
import unicodedata

HOSTILE = [
    "",
    " ",
    "a",
    " leading and trailing ",
    "  two  and   three    spaces     ",
    "tabs\tand\r\nline\n\n\nbreaks\r\r \n x",
    "12345 6789 0 ½²³ ٣٤٥ １２３ 1,000,000.00",
    "I'm you'RE we'LL don'T he'd ’s 'ſ",
    "CamelCase XMLHttpRequest snake_case kebab-case ALLCAPS",
    "f(x) = {a: [1, 2], 'b': \"c\"} // comment <= >= != -> :: /* */ #include <stdio.h>",
    "café naïve Å Å ﬁ ①",
    "e\u0301\u0302\u0323 combining a\u0300\u0301 z̸͖̏a̶l̷g̴o̵",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷🇯🇵 ❤️ 1️⃣",
    "שלום עולם مرحبا بالعالم ‏RTL‎ mixed",
    "日本語のテキスト。 中文，测试！ 한국어 텍스트 ไทย हिन्दी",
    "nul\x00inside\x01\x02\x7f\x80\x9f",
    "\u2581mark \u2581\u2581 of spaces",
    "\ufeffBOM \u200bzero\u200dwidth\u00a0nbsp\u3000ideographic \u2028 line \u2029",
    "\ufffe\uffff\ufdd0\ufdef\U0010ffff noncharacters \ue000 \U000f0000 private",
    "<s></s><unk> <|im_start|>user <|im_end|> [INST] <0x41> <0xFF> <|endoftext|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa abababababababababab aabaabaabaab",
    "\U00010400\U00010428 \U0001d400 \U00020000 \U0002a6df \U0003134a \U000e0001\U000e0041",
    "... !!! ??? --- === *** ___ ~~~ ``` \\\\\\ ///",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\dir\\file.txt",
]


def planes(seed: int = 0, count: int = 60) -> list[str]:
    """Random characters of every Unicode plane."""
    rng = random.Random(seed)
    texts = []
    for index in range(count):
        low = (index % 17) << 16
        chosen = (chr(rng.randrange(max(low, 1), low + 0x10000)) for _ in range(12))
        texts.append(" ".join(character for character in chosen if unicodedata.category(character) != "Cs"))
    return texts


def repetitive(seed: int = 0, count: int = 200, alphabet: str = "ab c") -> list[str]:
    """Where merges overlap most."""
    rng = random.Random(seed)
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(count)]


def training(seed: int = 0) -> list[str]:
    """Something to learn merges from."""
    rng = random.Random(seed)
    text = "the river runs at full capacity of its channel and fills it 12 345 6789 don't I'LL naïve café 日本 शब्द"
    words, ends = text.split(), [".", "!", "?\n", "  ", "\r\n", "..."]
    lines = [" ".join(rng.choices(words, k=12)) + rng.choice(ends) for _ in range(400)]
    return [line for line in [*lines, *HOSTILE, *repetitive(1, 60)] if line.strip() and "\x00" not in line]
