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


def mamba2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    ssm(writer, config.conv_kernel, config.num_heads * config.head_dim, config.state_size, config.num_heads)
    writer.add_ssm_group_count(config.n_groups)


def falcon_h1(writer: gguf.GGUFWriter, config: Any) -> None:
    common(writer, config)
    inner = config.mamba_n_heads * config.mamba_d_head
    ssm(writer, config.mamba_d_conv, inner, config.mamba_d_state, config.mamba_n_heads)
    writer.add_ssm_group_count(config.mamba_n_groups)


def hybrid(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads if own else 0 for own in attends])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def jamba(writer: gguf.GGUFWriter, config: Any) -> None:
    hybrid(writer, config)
    inner = config.mamba_expand * config.hidden_size
    ssm(writer, config.mamba_d_conv, inner, config.mamba_d_state, config.mamba_dt_rank)
    if config.num_experts > 1:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def granite_hybrid(writer: gguf.GGUFWriter, config: Any) -> None:
    hybrid(writer, config)
    inner = config.mamba_n_heads * config.mamba_d_head
    ssm(writer, config.mamba_d_conv, inner, config.mamba_d_state, config.mamba_n_heads)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def ssm(writer: gguf.GGUFWriter, width: int, inner: int, state: int, rank: int) -> None:
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)


def layer_normed(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if writer.arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    size, rope = config.hidden_size // config.num_attention_heads, config.rope_parameters
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_rope_dimension_count(int(size * rope["partial_rotary_factor"]))
    writer.add_parallel_residual(config.use_parallel_residual)


def granite(writer: gguf.GGUFWriter, config: Any) -> None:
    common(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


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


def decayed_heads(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Vectors of Mamba-2 have a second dimension; a norm has one row per group."""
    if name.endswith((".A_log", ".D")):
        return (decayed(name, tensor, config))[:, None]
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        return tensor.view(getattr(config, "n_groups", None) or config.mamba_n_groups, -1)
    return decayed(name, tensor, config)


def transposed(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Only the matrices of the blocks are stored as (inputs, outputs)."""
    return tensor.T if tensor.dim() == 2 and ".c_" in name else tensor


def by_part(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Queries, keys and values of all heads one after the other, instead of head by head."""
    if "query_key_value" not in name:
        return tensor
    heads = config.num_attention_heads
    split = tensor.view(heads, 3, config.hidden_size // heads, *tensor.shape[1:])
    return split.transpose(0, 1).reshape(tensor.shape)


def divisors(reference: Any) -> dict[str, Tensor]:
    """What the converter bakes in for Llama 3: by how much each frequency is slowed."""
    rotary, config = reference.model.rotary_emb, reference.config
    plain, _ = rotary.compute_default_rope_parameters(config)
    return {"rope_freqs.weight": plain / rotary.original_inv_freq}


def long_factors(reference: Any) -> dict[str, Tensor]:
    rope = reference.config.rope_parameters
    return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}


def granite_feeds(reference: Any) -> dict[str, Tensor]:
    """The feed-forward tensors as the converter splits and names them."""
    made = {}
    for layer, block in enumerate(reference.model.layers):
        moe, mlp = block.block_sparse_moe, block.shared_mlp
        kind = "" if moe is None else "_shexp"
        gate, up = mlp.input_linear.weight.chunk(2)
        made |= {f"ffn_gate{kind}": gate, f"ffn_up{kind}": up, f"ffn_down{kind}": mlp.output_linear.weight}
        if moe is not None:
            gates, ups = moe.experts.gate_up_proj.chunk(2, 1)
            made |= {"ffn_gate_inp": moe.router.weight, "ffn_gate_exps": gates, "ffn_up_exps": ups}
            made["ffn_down_exps"] = moe.experts.down_proj
        made = {name if "." in name else f"blk.{layer}.{name}.weight": made[name] for name in made}
    return {name: tensor.detach().contiguous() for name, tensor in made.items()}


def interleaved_heads(name: str, tensor: Tensor, config: Any) -> Tensor:
    return decayed_heads(name, interleaved(name, tensor, config), config)


def nothing(reference: Any) -> dict[str, Tensor]:
    return {}


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference holds an expert's gate and up as one tensor, files hold two. gpt-oss's rows alternate."""
    made = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if f"{stem}.gate_up_proj_bias" in tensors:
            kind = "bias" if last.endswith("_bias") else "weight"
            rows = tensor if kind == "bias" else tensor.transpose(1, 2)
            if last.startswith("gate_up"):
                made[f"{stem}.gate_proj.{kind}"], made[f"{stem}.up_proj.{kind}"] = rows[:, 0::2], rows[:, 1::2]
            else:
                made[f"{stem}.down_proj.{kind}"] = rows
            continue
        if last == "gate_up_proj" and tensor.dim() == 3:
            made[f"{stem}.gate_proj.weight"], made[f"{stem}.up_proj.weight"] = tensor.chunk(2, 1)
        elif last == "down_proj" and tensor.dim() == 3:
            made[f"{stem}.down_proj.weight"] = tensor
        elif last == "dt_bias":
            made[f"{stem}.dt_proj.bias"] = tensor
        else:
            made[name] = tensor
    return made


def experts(writer: gguf.GGUFWriter, config: Any) -> None:
    common(writer, config)
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    windowed_experts(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


def windowed_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    experts(writer, config)
    writer.add_sliding_window(config.sliding_window)


def delta(writer: gguf.GGUFWriter, config: Any) -> None:
    experts(writer, config)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 2)


def delta_decayed(name: str, tensor: Tensor, config: Any) -> Tensor:
    return decayed(name, tensor if "linear_attn" in name else plus_one(name, tensor, config), config)


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
    "gpt-oss": ("gpt-oss", gpt_oss, as_is, nothing),
    "mixtral": ("llama", windowed_experts, interleaved, nothing),
    "olmoe": ("olmoe", experts, as_is, nothing),
    "qwen2-moe": ("qwen2moe", experts, as_is, nothing),
    "qwen3-moe": ("qwen3moe", experts, as_is, nothing),
    "qwen3-next": ("qwen3next", delta, delta_decayed, nothing),
    "mamba": ("mamba", mamba, decayed, nothing),
    "mamba-odd": ("mamba", mamba, decayed, nothing),
    "mamba2-one-group": ("mamba2", mamba2, decayed_heads, nothing),
    "falcon-h1-unscaled": ("falcon-h1", falcon_h1, decayed_heads, nothing),
    "falcon-h1-gated": ("falcon-h1", falcon_h1, decayed_heads, nothing),
    "jamba": ("jamba", jamba, decayed, nothing),
    "jamba-dense": ("jamba", jamba, decayed, nothing),
    "granitemoehybrid-one-group": ("granitehybrid", granite_hybrid, interleaved_heads, granite_feeds),
    "granitemoehybrid-turned": ("granitehybrid", granite_hybrid, interleaved_heads, granite_feeds),
    "gpt2": ("gpt2", layer_normed, transposed, nothing),
    "gpt-neox": ("gptneox", layer_normed, by_part, nothing),
    "olmo2": ("olmo2", common, as_is, nothing),
    "granite": ("granite", granite, interleaved, nothing),
    "glm4": ("glm4", common, as_is, nothing),
    "glm4-whole": ("glm4", common, as_is, nothing),
}


def converted(name: str, path: Path, **how: Any) -> ModelFiles:
    architecture, metadata, change, extra = FILES[name.removesuffix("-blocks")]
    reference = saved(name).reference
    config = reference.config
    # The converter calls the bias of Mamba-2's time steps that of their projection.
    tensors = {key.replace(".dt_bias", ".dt_proj.bias"): tensor for key, tensor in reference.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    tensors = stacked(tensors)
    if architecture == "granitehybrid":  # `granite_feeds` has these
        tensors = {key: tensor for key, tensor in tensors.items() if ".shared_mlp." not in key and "_moe." not in key}
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


@pytest.mark.few(16)
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
