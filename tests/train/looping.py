"""A tiny model with a language of its own: after each token comes one certain token most of the time, so that its text
runs in loops. A head that looks further ahead has something to learn, and little time is needed to learn it."""

from __future__ import annotations

import random
import shutil
from functools import lru_cache
from pathlib import Path

import torch
import transformers

from tests.tiny import speaking_folder

HIDDEN = 64
LOOPS = 12
"""Loops of the language; every token leads into one of them."""


@lru_cache
def looping_folder() -> Path:
    """The tokenizer and the template of the model that speaks, and weights that make the next token a function of the
    last one: the branches of all layers are zero."""
    import atexit
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="bankfull-looping-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(speaking_folder(), folder, dirs_exist_ok=True)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": HIDDEN, "tie_word_embeddings": False})
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    follows = successors(config.vocab_size, config.eos_token_id)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        table = torch.nn.functional.normalize(torch.randn(config.vocab_size, HIDDEN))
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_().index_add_(0, torch.tensor(follows), table * 1.5)
    model.save_pretrained(folder)
    return folder


def successors(vocab: int, end: int) -> list[int]:
    """The token after each token. Loops have three to seven tokens; the end of text is in none of them."""
    rng = random.Random(2)
    ids = [token for token in range(3, vocab) if token != end]
    rng.shuffle(ids)
    follows, inside = [0] * vocab, []
    for _ in range(LOOPS):
        loop = [ids.pop() for _ in range(rng.randint(3, 7))]
        inside += loop
        for token, after in zip(loop, loop[1:] + loop[:1], strict=True):
            follows[token] = after
    for token in range(vocab):
        if token not in inside:
            follows[token] = rng.choice(inside)
    return follows
