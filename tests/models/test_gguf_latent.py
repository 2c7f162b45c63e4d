"""DeepSeek models from GGUF files of both layouts compute what the checkpoint computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.source import ModelFiles, open_model
from tests.models.oracle import PASSES, TOLERANCE, build, error, saved
from tests.models.test_gguf import stacked
from tests.weights.conftest import write_gguf


def metadata(writer: gguf.GGUFWriter, config: Any, split: bool, gating: int | None = None) -> None:
    third = config.model_type == "deepseek_v3"
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if split else config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if split else key)
    writer.add_value_length(config.kv_lora_rank if split else config.v_head_dim)
    if split:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(bool(config.norm_topk_prob))
    writer.add_uint32("deepseek2.expert_gating_func", gating or (2 if third else 1))
    writer.add_uint32("deepseek2.expert_group_count", config.n_group)
    writer.add_uint32("deepseek2.expert_group_used_count", config.topk_group)


def converted(name: str, path: Path, split: bool, **how: Any) -> ModelFiles:
    reference = saved(name).reference
    config, extra = reference.config, dict[str, Tensor]()
    tensors = stacked(dict(reference.state_dict()))
    for key in [key for key in tensors if key.endswith("e_score_correction_bias")]:
        extra[f"blk.{key.split('.')[2]}.exp_probs_b.bias"] = tensors.pop(key)
    if split:
        for key in [key for key in tensors if key.endswith("kv_b_proj.weight")]:
            whole = tensors.pop(key).unflatten(0, (config.num_attention_heads, -1))
            at = key.removesuffix("kv_b_proj.weight")
            tensors[f"{at}k_b_proj.weight"] = whole[:, : config.qk_nope_head_dim].transpose(1, 2)
            tensors[f"{at}v_b_proj.weight"] = whole[:, config.qk_nope_head_dim :]
    made = write_gguf(
        path / f"{name}.gguf",
        "deepseek2",
        tensors,
        config.num_hidden_layers,
        lambda writer: metadata(writer, config, split, **how),
        extra=extra,
    )
    return open_model(made)


@pytest.mark.parametrize(("name", "split"), [("deepseek-v2", False), ("deepseek-v3", True)])
def test_logits_equal_those_of_the_checkpoint(name: str, split: bool, tmp_path: Path) -> None:
    model = build(converted(name, tmp_path, split))
    assert error(model, saved(name).logits) < TOLERANCE
    assert error(model, saved(name).logits, PASSES["chunks"]) < TOLERANCE


def test_an_unknown_gating_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither softmax"):
        converted("deepseek-v2", tmp_path, False, gating=7)
