"""A byte-level tokenizer for any vocabulary size: every text can be encoded, and every token is text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from bankfull.errors import ConfigError

END, TURN, END_OF_TURN, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGE = ("t", "h")
"""The only merge: encoders of byte pairs expect at least one."""
BYTES = 256
FEWEST = BYTES + 4
"""Tokens of the smallest vocabulary: all bytes, the merge, and the special tokens at its end."""
NORMAL, CONTROL = 1, 3
"""Token types of a GGUF file."""


class ByteVocabulary:
    """Token n < 256 is byte n, then the merge, then made-up words, then the special tokens. `mask`: the token that a
    diffusion model replaces."""

    def __init__(self, size: int, mask: int | None = None) -> None:
        if size < FEWEST:
            raise ConfigError(f"A vocabulary of {size} tokens has no room for all bytes; at least {FEWEST} are needed.")
        self.size, self.mask = size, mask

    @cached_property
    def tokens(self) -> list[str]:
        letters = byte_letters()
        words = [f"{letters[ord(' ')]}w{number}" for number in range(self.size - FEWEST)]
        tokens = [*letters, "".join(MERGE), *words, TURN, END_OF_TURN, END]
        if self.mask is not None and BYTES < self.mask < self.size - 3:
            tokens[self.mask] = MASK
        return tokens

    @property
    def specials(self) -> dict[str, int]:
        last = {name: self.size - 3 + i for i, name in enumerate((TURN, END_OF_TURN, END))}
        return last | ({} if self.mask is None or self.tokens[self.mask] != MASK else {MASK: self.mask})

    @property
    def kinds(self) -> list[int]:
        """Token types of a GGUF file."""
        special = set(self.specials.values())
        return [CONTROL if token in special else NORMAL for token in range(self.size)]

    def write(self, folder: Path) -> None:
        """tokenizer.json and tokenizer_config.json with a chat template."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        known = {token: number for number, token in enumerate(self.tokens)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=known, merges=[MERGE]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in self.specials])
        backend.save(str(folder / "tokenizer.json"), pretty=False)
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TURN,
            "pad_token": END,
            "chat_template": TEMPLATE,
            "model_max_length": 1 << 30,
        }
        if MASK in self.specials:
            settings["mask_token"] = MASK
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    def ids(self) -> Mapping[str, Any]:
        """Token ids of config.json. A beginning-of-text token is not needed."""
        return {"bos_token_id": None, "eos_token_id": self.specials[END_OF_TURN], "pad_token_id": self.specials[END]}


def byte_letters() -> list[str]:
    """Each byte in the encoding of byte-level vocabularies: itself if printable, otherwise a character from 256 up."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
