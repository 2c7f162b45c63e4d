"""GGUF's IQ types: their values are those of the reference, and their translations hold the same values."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.weights.formats import READ_ONLY, importance
from bankfull.weights.formats.importance import as_known
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import open_model
from tests.models.oracle import build
from tests.quick import examples

NAMES = sorted(importance.NAMES)


def stored(blocks: np.ndarray, name: str) -> QTensor:
    scheme = READ_ONLY[name]
    shape = (*blocks.shape[:-1], blocks.shape[-1] // scheme.block_bytes * scheme.block)
    return QTensor(scheme, {"blocks": torch.from_numpy(blocks)}, shape)


def reference(blocks: np.ndarray, name: str) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()])


def drawn(name: str, rows: int, each: int = 2, unit: float = 0.01) -> np.ndarray:
    """Random blocks whose float16 is not extreme."""
    random, size = np.random.default_rng(3), READ_ONLY[name].block_bytes
    blocks = random.integers(0, 256, (rows, each, size), dtype=np.uint8)
    units = (random.random((rows, each, 1)) * unit + unit / 2).astype(np.float16)
    if name == "iq1_m":  # its four nibbles are the upper ones of four numbers
        bits = units.view(np.uint16)[..., 0]
        for nibble in range(4):
            at = 48 + 2 * nibble + 1
            blocks[..., at] = (blocks[..., at] & 15) | ((bits >> (4 * nibble) & 15) << 4).astype(np.uint8)
    else:
        blocks[..., :2] = units.view(np.uint8)
    return blocks.reshape(rows, each * size)


@pytest.mark.parametrize("name", NAMES)
def test_random_blocks_agree_with_the_reference(name: str) -> None:
    scheme = READ_ONLY[name]
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert (scheme.block, scheme.block_bytes) == sizes
    blocks = np.random.default_rng(7).integers(0, 256, (300, 2 * scheme.block_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(stored(blocks, name).dequantize().numpy(), reference(blocks, name))


@pytest.mark.parametrize("name", NAMES)
@examples(20, deadline=None)
@given(data=st.data())
def test_any_block_agrees_with_the_reference(name: str, data: st.DataObject) -> None:
    size = READ_ONLY[name].block_bytes
    raw = data.draw(st.binary(min_size=size, max_size=size))
    blocks = np.frombuffer(raw, np.uint8).reshape(1, size).copy()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(stored(blocks, name).dequantize().numpy(), reference(blocks, name))


@pytest.mark.parametrize("name", NAMES)
def test_translations_hold_the_same_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "ROWS_AT_ONCE", 7)
    weight = stored(drawn(name, 10), name)
    known = as_known(weight)
    if name.startswith("iq2") or name == "iq4_xs":
        assert known is None
        return
    assert known is not None and known.shape == weight.shape
    assert known.scheme.name == ("q8_0" if name == "iq4_nl" else "q6_k")
    assert torch.equal(known.dequantize(), weight.dequantize())
    assert weight.to("meta").dequantize().shape == weight.shape
    made = as_known(weight.to("meta"))
    assert made is not None and made.nbytes == known.nbytes


def test_scales_that_would_lose_bits_are_not_translated() -> None:
    assert as_known(stored(drawn("iq3_xxs", 4, unit=1e-6), "iq3_xxs")) is None


@pytest.mark.parametrize(
    ("name", "scheme"), [("iq4_nl", "q8_0"), ("iq3_s", "q6_k"), ("iq2_s", "f32"), ("iq4_xs", "f32")]
)
def test_a_file_with_such_tensors_is_built(
    tmp_path: Path, name: str, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    size = READ_ONLY[name].block

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(size)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_scores([0.0, 1.0, 2.5])
    blocks = drawn(name, size, 1, 1e-3)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", blocks, raw_dtype=kind)
    for part in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{part}.weight", np.ones(size, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((3, size), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = open_model(path)
    assert files.source.scheme("model.layers.0.mlp.down_proj.weight").name == name
    model = build(files, providers="auto")
    down = model.blocks[0].feed.down
    assert down.stored.scheme.name == scheme
    if scheme == "f32":
        assert f"some weights are expanded at load, because no kernel reads {name.upper()}." in caplog.text
        assert caplog.text.count("expanded") == 1
