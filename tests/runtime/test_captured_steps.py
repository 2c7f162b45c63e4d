"""The launches of a captured step, one by one in the interpreter, against the bodies; and what a step does without."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ops.norm import triton as norm
from bankfull.ops.products.triton.quantized import persistent as quantized_persistent
from bankfull.ops.products.triton.quantized.persistent import GemvPlan
from bankfull.ops.sampling.triton.sampling import choose
from bankfull.runtime.captured import Captured
from bankfull.runtime.forward import Eager
from bankfull.runtime.naive import generate
from bankfull.runtime.rows import Rows
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.synthetic.random_weights import random_model
from bankfull.weights.requantized import Requantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16
CONFIG = {
    "model_type": "llama",
    "vocab_size": 150,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
NEW = 2


@lru_cache
def model_of(providers: str, types: tuple[str, ...]) -> Decoder:
    files = random_model("tiny", CONFIG, DTYPE, DEVICE)
    source = Requantized(files.source, types, tables=True) if types else files.source
    return build_model(files.config, Build(source, kit_for("cuda", providers), DTYPE, DEVICE))


def answers(model: Decoder, prompts: list[int], size: int) -> list[list[int]]:
    """Greedy tokens behind prompts of one token each, from steps that are padded to `size` rows."""
    layout = layout_of(model.states(), 4)
    pages = 4
    captured = Captured(Eager(model, layout, Storage(layout, pages * (size + 1), 1, DEVICE).layers))
    rows = Rows(size, pages * 4, layout, model.vocab, DEVICE, lambda array: torch.from_numpy(array).to(DEVICE))
    captured._take(rows, choose)
    for row, token in enumerate(prompts):
        rows.tokens[row, 0], rows.known[row] = token, 1
        rows.tables[0][row] = 1 + pages * row + torch.arange(pages, device=DEVICE)
    captured._send(list(range(len(prompts))), [1] * len(prompts), 1)
    with torch.inference_mode():
        for _ in range(NEW):
            captured._best(captured._blank(size, 1), size)
    found = rows.tokens[: len(prompts), 1 : 1 + NEW].tolist()
    assert captured._tokens_out[:NEW, : len(prompts)].T.tolist() == found, "the host is told what the rows got"
    return found


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a tile, whatever its size."""
    monkeypatch.setattr(quantized_persistent, "persistent_plan", lambda weight, normed=False: GemvPlan(64, 1))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("types", "count", "size", "last_norm"), [((), 1, 1, 1), ((), 2, 4, 1), (("int4_g128",), 1, 1, 0)], ids=str
)
def test_steps_choose_the_tokens_that_the_bodies_choose(
    types: tuple[str, ...], count: int, size: int, last_norm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of few rows no norm is a kernel, but the last before a dense head: linears norm what they read, from the
    embedding on."""
    norms: list[int] = []
    monkeypatch.setattr(norm, "normed", lambda *args, own=norm.normed: (norms.append(len(args[0])), own(*args))[1])
    prompts = list(range(7, 7 + count))
    expected = [generate(model_of("torch", types), [prompt], NEW, DEVICE) for prompt in prompts]
    assert min(margin for _, margins in expected for margin in margins) > 1e-3, "too close for another rounding"
    assert answers(model_of("auto", types), prompts, size) == [tokens for tokens, _ in expected]
    assert norms == [size] * NEW * last_norm
