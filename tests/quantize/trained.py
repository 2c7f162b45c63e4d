"""A tiny model that has begun to learn the bundled texts byte by byte: unlike random weights, it can lose something."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from bankfull.quality.windows import bundled_texts
from bankfull.train.lm.model import TrainedModel
from bankfull.train.lm.tasks import TextWindows
from bankfull.train.lm.vocabulary import byte_tokenizer

CONFIG = {
    "model_type": "bankfull",
    "layers": "3 x attention",
    "vocab_size": 256,
    "hidden_size": 64,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
STEPS, BATCH, LENGTH, RATE = 40, 8, 32, 8e-3
OUTLIERS, FACTOR = (3, 29, 50), 24.0
"""Channels of the second layer's attention whose weights become large, and their norm's factors as small."""
CPU = torch.device("cpu")


@lru_cache
def trained_folder(steps: int = STEPS) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bankfull-trained-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its operations are too small for more
    try:
        model = _trained(steps)
    finally:
        torch.set_num_threads(threads)
    tensors = {name: value.detach().clone() for name, value in model.parameters.items()}
    stem = "model.layers.1."
    for channel in OUTLIERS:
        tensors[f"{stem}mixer_norm.weight"][channel] /= FACTOR
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{stem}mixer.{name}.weight"][:, channel] *= FACTOR
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": "float32"}))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _trained(steps: int) -> TrainedModel:
    task = TextWindows(torch.tensor(list(text())), LENGTH, seed=0, digest="bundled")
    model = TrainedModel(CONFIG, 0, CPU)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        batch = task.batch(step, BATCH)
        loss = cross_entropy(model.logits(batch.tokens).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def text() -> bytes:
    return "".join(bundled_texts().values()).encode()


def sequences(count: int, first: int, length: int = 64) -> list[list[int]]:
    """Windows of the text; a second set with another `first` is disjoint."""
    whole = text()
    return [list(whole[at : at + length]) for at in range(first, first + 2 * length * count, 2 * length)]
