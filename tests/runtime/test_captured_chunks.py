"""Steps of prompts as a GPU captures them, launched one by one in the interpreter, against the bodies."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.norm import AddThen
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ops.attention.triton.map import tile_map
from bankfull.ops.triton.chunks import DevicePartition
from bankfull.runtime import captured_chunks
from bankfull.runtime.captured_chunks import SIZES, Chunks, sizes_for
from bankfull.runtime.forward import Eager
from bankfull.runtime.naive import hidden_states
from bankfull.runtime.rows import Rows
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.synthetic.random_weights import random_model
from bankfull.types import Work

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float32
CONFIG = {
    "model_type": "llama",
    "vocab_size": 150,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
DEEP = CONFIG | {"num_hidden_layers": 2}
WINDOWED = CONFIG | {"model_type": "mistral", "sliding_window": 9}
PAGE, PAGES = 4, 16
TOLERANCE = 2e-5
BARE = Build(None, kit_for("cuda", "torch"), DTYPE, DEVICE)  # type: ignore[arg-type]


@lru_cache
def model_of(providers: str, windowed: bool, deep: bool = False) -> Decoder:
    config = WINDOWED if windowed else DEEP if deep else CONFIG
    files = random_model("tiny", config, DTYPE, DEVICE)
    return build_model(files.config, Build(files.source, kit_for("cuda", providers), DTYPE, DEVICE))


class Chunked:
    """Rows of some sequences, and steps over them."""

    def __init__(
        self, sequences: list[list[int]], tokens: int, windowed: bool = False, taps: tuple[int, ...] = ()
    ) -> None:
        """With `taps`, over a model of two layers."""
        self.sequences, self.how = sequences, (windowed, bool(taps))
        model = model_of("auto", *self.how)
        layout = layout_of(model.states(), PAGE)
        count = len(sequences)
        self.storage = Storage(layout, PAGES * count, 1, DEVICE)
        self.rows = Rows(
            count, PAGE * PAGES, layout, model.vocab, DEVICE, lambda array: torch.from_numpy(array.copy()).to(DEVICE)
        )
        order = torch.randperm(PAGES * count, generator=torch.Generator().manual_seed(1)).view(count, PAGES) + 1
        for row, own in enumerate(sequences):
            self.rows.tokens[row, : len(own)] = torch.tensor(own)
            self.rows.tables[0][row] = order[row]
        self.chunks = Chunks(Eager(model, layout, self.storage.layers, taps=taps), self.rows)
        self.chunks.prepare(tokens)

    def step(self, counts: dict[int, int]) -> None:
        """Run `counts` more tokens of each row and compare the hidden states with those of the bodies."""
        work = [Work(row, int(self.rows.computed[row]), count, sample=True) for row, count in counts.items()]
        with torch.inference_mode():
            found = self.chunks.replay(work, captured=False)
        assert found is not None, "there is no graph for this step"
        batch, hidden = found
        assert batch.logit_index.tolist() == (np.cumsum(list(counts.values())) - 1).tolist()
        assert len(hidden) == sum(counts.values()) == len(batch.tokens)
        for (row, count), first in zip(counts.items(), batch.q_start[:-1].tolist(), strict=True):
            done = int(self.rows.computed[row])
            own = self.sequences[row][: done + count]
            assert batch.tokens[first : first + count].tolist() == own[done:]
            assert batch.positions[first : first + count].tolist() == list(range(done, done + count))
            model = model_of("torch", *self.how)
            expected = {None: hidden_states(model, own, DEVICE)[done:]}
            for layer in self.chunks.eager.taps:
                bare = replace(model, blocks=model.blocks[:layer], norm=AddThen(BARE, lambda x: x))
                expected[layer] = hidden_states(bare, own, DEVICE)[done:]
            for layer, right in expected.items():
                ours = hidden if layer is None else self.chunks.tapped[layer]
                worst = float((ours[first : first + count] - right).norm() / right.norm())
                assert worst < TOLERANCE, f"row {row}, {count} tokens behind {done}, layer {layer}: {worst}"
            self.rows.computed[row] += count
            self.rows.reached[row] += count


def sequences(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(150) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("windowed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_prompts_of_unequal_lengths_chunks_and_decoding_rows_share_a_step(windowed: bool) -> None:
    here = Chunked(sequences(40, 23, 40, 8), 32, windowed)
    here.step({2: 19})  # a prompt alone
    here.step({0: 9, 1: 18, 3: 4})  # prompts of unequal lengths
    here.step({1: 1, 2: 12, 3: 1, 0: 2})  # some go on, others decode


def test_steps_keep_the_hidden_states_that_enter_tapped_layers() -> None:
    here = Chunked(sequences(20, 12), 32, taps=(0, 1))
    here.step({1: 11})
    here.step({0: 9, 1: 1})


def test_what_fills_up_a_step_leaves_the_pages_of_others_alone() -> None:
    here = Chunked(sequences(30, 30), 32)
    here.step({0: 9, 1: 1})
    before = [part.clone() for part in here.storage.layers[0][0].values()]
    held = here.rows.tables[0][1].tolist()
    here.step({0: 5})
    for part, old in zip(here.storage.layers[0][0].values(), before, strict=True):
        # Bits: memory that was never written may hold NaN.
        assert torch.equal(part[held].view(torch.uint8), old[held].view(torch.uint8))


def test_steps_without_a_graph_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Chunked(sequences(60, 60), 32)
    assert here.chunks.replay([Work(0, 0, 33)], captured=False) is None, "too many tokens"
    monkeypatch.setattr(captured_chunks, "SPLIT_FROM", 20)
    here.step({0: 19})
    assert here.chunks.replay([Work(0, 19, 2)], captured=False) is None, "few tokens behind many"
    here.step({0: 1})
    here.step({0: 17})
    monkeypatch.setattr(captured_chunks, "FEWEST_PROMPTS", 1)
    few = Chunked(sequences(60, 60, 60), 16)
    assert few.chunks.replay([Work(0, 0, 5), Work(1, 0, 5), Work(2, 0, 5)], captured=False) is None, "too many prompts"


@pytest.mark.parametrize("ones", [False, True])
def test_tiles_are_those_that_the_host_would_list(ones: bool) -> None:
    counts = [37, 16, 1, 3, 0, 0]
    q_start = np.concatenate(([0], np.cumsum(counts)))
    starts = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    starts[: len(q_start)] = torch.tensor(q_start)
    for tokens in (16, 5):
        found = DevicePartition(starts, len(counts), 64, starts if ones else None).tiles(tokens).tolist()
        cut = [i for i, count in enumerate(counts) if count > (1 if ones else 0)]
        expected = tile_map(q_start, np.array(counts), np.array(cut), tokens).tolist()
        used = found[: len(expected)]
        assert sorted(used) == sorted(expected)
        assert found[len(used) :] == [[len(counts) - 1, 0, 0, 0]] * (64 // tokens + len(counts) - len(used))


@pytest.mark.parametrize("tokens", [0, 1, 32, 33, 200, 2048, 8192])
def test_every_step_up_to_the_largest_has_a_size(tokens: int) -> None:
    sizes = sizes_for(tokens)
    assert sizes == sorted(set(sizes))
    assert (sizes[-1] if sizes else 0) == min(tokens, SIZES[-1])
