"""LLaDA, Dream and SDAR compute what their references compute; what of them is not supported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull.errors import ModelError
from bankfull.ops.attention.body import WHOLE_SEQUENCE
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests.models.diffusion import MASK, make
from tests.models.oracle import CPU, TOLERANCE, build

TOKENS = [*torch.randint(3, 50, (29,), generator=torch.Generator().manual_seed(4)).tolist(), *[MASK] * 16]


@pytest.mark.parametrize("providers", ["torch", "auto"])
@pytest.mark.parametrize("kind", ["llada", "dream", "sdar"])
def test_logits_equal_the_reference(kind: str, providers: str, tmp_path: Path) -> None:
    want = make(kind, tmp_path).logits(TOKENS)
    got = naive.logits(build(open_model(tmp_path), providers=providers), TOKENS, CPU)
    assert float((got - want).abs().max()) < TOLERANCE


@pytest.mark.parametrize("chunks", [(4,) * 11 + (1,), (12, 20, 13), (40, 5)])
def test_a_block_causal_model_may_be_cut_at_its_blocks(chunks: tuple[int, ...], tmp_path: Path) -> None:
    want = make("sdar", tmp_path).logits(TOKENS)
    got = naive.logits(build(open_model(tmp_path)), TOKENS, CPU, chunks)
    assert float((got - want).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llada", {"rope_theta": 6000.0}),
        ("llada", {"rms_norm_eps": 1e-2}),
        ("dream", {"rope_theta": 5000.0}),
        ("sdar", {"block_size": 5}),
        ("sdar", {"rope_theta": 7000.0}),
    ],
)
def test_a_wrong_reading_shows_in_the_logits(kind: str, change: dict[str, Any], tmp_path: Path) -> None:
    want = make(kind, tmp_path).logits(TOKENS)
    got = naive.logits(build(open_model(tmp_path), changes=change), TOKENS, CPU)
    assert float((got - want).abs().max()) > 10 * TOLERANCE


def test_what_the_models_say_of_themselves(tmp_path: Path) -> None:
    found = {}
    for kind in ("llada", "dream", "sdar"):
        make(kind, tmp_path / kind)
        found[kind] = build(open_model(tmp_path / kind)).diffusion
    assert all(one is not None and one.mask == MASK for one in found.values())
    assert [(one.block, one.shifted) for one in found.values() if one] == [
        (WHOLE_SEQUENCE, False),
        (WHOLE_SEQUENCE, True),
        (4, False),
    ]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llada", {"alibi": True}, "alibi"),
        ("llada", {"block_type": "sequential"}, "block_type"),
        ("llada", {"n_layers": 10**9}, "num_hidden_layers"),
        ("llada", {"mask_token_id": None}, "mask_token_id"),
        ("llada", {"mask_token_id": 10**6}, "mask_token_id"),
        ("llada", {"embedding_size": 10}, "embedding_size"),
        ("llada", {"d_model": -3}, "hidden_size"),
        ("dream", {"block_size": 32}, "block_size"),
        ("dream", {"use_sliding_window": True}, "use_sliding_window"),
        ("sdar", {"block_size": 0}, "block_size"),
        ("sdar", {"block_size": "four"}, "block_size"),
        ("sdar", {"mask_token_id": 53}, "mask_token_id"),
    ],
)
def test_hostile_configurations_are_refused_in_one_sentence(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as refusal:
        build(open_model(tmp_path))
    assert str(refusal.value).count("\n") == 0
