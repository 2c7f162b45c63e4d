"""A model read from a GGUF file computes what the checkpoint that it was converted from computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from bankfull.layers.decoder import Decoder
from bankfull.layers.ssm import MambaMixer
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import ModelFiles, open_model
from tests.models.cases import BLOCKED
from tests.models.oracle import PASSES, TOLERANCE, build, error, logits, reference_logits, saved, spread
from tests.weights.conftest import interleave, write_gguf


def common(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def windowed(writer: gguf.GGUFWriter, config: Any) -> None:
    common(writer, config)
    writer.add_sliding_window(config.sliding_window)


def yarn(writer: gguf.GGUFWriter, config: Any) -> None:
    common(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


def gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    windowed(writer, config)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_float32(f"{writer.arch}.attention.scale", config.query_pre_attn_scalar**-0.5)
    if config.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if writer.arch == "gemma3":
        local = config.rope_parameters["sliding_attention"]["rope_theta"]
        writer.add_float32("gemma3.rope.freq_base_swa", local)


def phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    common(writer, config)
    old = config.original_max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(old)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.rope_parameters["rope_type"] == "longrope":
        stretch = config.max_position_embeddings / old
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(old)))


def mamba(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_dt_b_c_rms(False)


def as_is(name: str, tensor: Tensor, config: Any) -> Tensor:
    return tensor


def interleaved(name: str, tensor: Tensor, config: Any) -> Tensor:
    if ".q_proj." in name:
        return interleave(tensor, config.num_attention_heads)
    return interleave(tensor, config.num_key_value_heads) if ".k_proj." in name else tensor


def plus_one(name: str, tensor: Tensor, config: Any) -> Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def decayed(name: str, tensor: Tensor, config: Any) -> Tensor:
    if name.endswith(".A_log"):
        return -torch.exp(tensor)
    return tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor


def divisors(reference: Any) -> dict[str, Tensor]:
    """What the converter bakes in for Llama 3: by how much each frequency is slowed."""
    rotary, config = reference.model.rotary_emb, reference.config
    plain, _ = rotary.compute_default_rope_parameters(config)
    return {"rope_freqs.weight": plain / rotary.original_inv_freq}


def long_factors(reference: Any) -> dict[str, Tensor]:
    rope = reference.config.rope_parameters
    return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}


def nothing(reference: Any) -> dict[str, Tensor]:
    return {}


FILES: dict[str, tuple[str, Callable[..., None], Callable[..., Tensor], Callable[[Any], dict[str, Tensor]]]] = {
    "llama": ("llama", common, interleaved, nothing),
    "llama-tied-biased": ("llama", common, interleaved, nothing),
    "llama-linear": ("llama", common, interleaved, nothing),
    "llama-llama3": ("llama", common, interleaved, divisors),
    "llama-yarn": ("llama", yarn, interleaved, nothing),
    "mistral": ("llama", windowed, interleaved, nothing),
    "qwen2": ("qwen2", common, as_is, nothing),
    "qwen3": ("qwen3", common, as_is, nothing),
    "gemma2": ("gemma2", gemma, plus_one, nothing),
    "gemma3-text": ("gemma3", gemma, plus_one, nothing),
    "phi3": ("phi3", phi3, as_is, nothing),
    "phi3-long": ("phi3", phi3, as_is, long_factors),
    "mamba": ("mamba", mamba, decayed, nothing),
    "mamba-odd": ("mamba", mamba, decayed, nothing),
}


def converted(name: str, path: Path, **how: Any) -> ModelFiles:
    architecture, metadata, change, extra = FILES[name.removesuffix("-blocks")]
    reference = saved(name).reference
    config = reference.config
    tensors = dict(reference.state_dict())
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return open_model(
        write_gguf(
            path / f"{name}.gguf",
            architecture,
            tensors,
            config.num_hidden_layers,
            lambda writer: metadata(writer, config),
            change=lambda key, tensor: change(key, tensor, config),
            extra=extra(reference),
            **how,
        )
    )


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = build(converted(name, tmp_path))
    assert error(model, saved(name).logits) < TOLERANCE
    assert error(model, saved(name).logits, PASSES["chunks"]) < TOLERANCE


def test_smollm3_turns_all_but_every_fourth_layer(tmp_path: Path) -> None:
    """Its file cannot say which; so the reference follows the architecture's rule too."""
    reference = saved("smollm3").reference
    before = list(reference.config.no_rope_layers)
    tensors = {key: tensor for key, tensor in reference.state_dict().items() if key != "lm_head.weight"}
    path = write_gguf(
        tmp_path / "m.gguf",
        "smollm3",
        tensors,
        4,
        lambda writer: common(writer, reference.config),
        change=lambda key, tensor: interleaved(key, tensor, reference.config),
    )
    for layer, turns in zip(reference.model.layers, (1, 1, 1, 0), strict=True):
        layer.self_attn.use_rope = turns
    want = reference_logits(reference)
    for layer, turns in zip(reference.model.layers, before, strict=True):
        layer.self_attn.use_rope = turns
    assert error(build(open_model(path)), want) < TOLERANCE


def test_rows_that_the_converter_moved_are_moved_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without the converter's permutation the same file is another model."""
    monkeypatch.setitem(FILES, "llama", ("llama", common, as_is, nothing))
    assert error(build(converted("llama", tmp_path)), saved("llama").logits) > 10 * TOLERANCE


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_run_as_they_lie_in_the_file(name: str, tmp_path: Path) -> None:
    """Also where one tensor of blocks is cut into several layers."""
    files = converted(name, tmp_path, stored=lambda key, tensor: "Q8_0" if tensor.shape[-1] % 32 == 0 else "F32")
    packed, expanded = build(files), build(files, expand=True)
    assert not first_weight(packed).is_dense and first_weight(expanded).is_dense
    assert error(packed, logits(expanded)) < TOLERANCE
    assert TOLERANCE < spread(packed, saved(name).logits) < 0.2


def first_weight(model: Decoder) -> QTensor:
    mixer: Any = model.mixers[0]
    weight: QTensor = (mixer.into if isinstance(mixer, MambaMixer) else mixer.q).weight
    return weight
