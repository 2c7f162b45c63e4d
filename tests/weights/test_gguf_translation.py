"""Models read from GGUF get the tensors and the configuration of the Hugging Face checkpoint that was converted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from bankfull.errors import ModelError
from bankfull.weights.source import ModelFiles, normalize_config, open_model

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def common(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def state(model: Any) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, all random including biases and norms, without the tied copy."""
    generator = torch.Generator().manual_seed(3)
    tied = model.config.tie_word_embeddings
    found = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in found.items()}


def assert_same_tensors(files: ModelFiles, want: dict[str, torch.Tensor]) -> None:
    assert sorted(files.source.names()) == sorted(want)
    assert sorted(files.source.unread()) == sorted(want)
    for name, tensor in want.items():
        assert files.source.shape(name) == tuple(tensor.shape)
        got = files.source.get(name)
        assert got.shape == tuple(tensor.shape)
        assert torch.equal(got.dequantize(), tensor), name
    assert files.source.unread() == []


def assert_same_config(files: ModelFiles, config: Any, *fields: str) -> None:
    want = normalize_config(config.to_dict())
    shared = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    for field in (*shared, *fields):
        assert files.config[field] == want[field], field
    assert files.kind == "gguf"


TRANSFORMER = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
)


def permuted(make: Any, config: Any) -> Any:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "q_proj" in name:
            return make.interleave(tensor, config.num_attention_heads)
        return make.interleave(tensor, config.num_key_value_heads) if "k_proj" in name else tensor

    return change


def test_llama_comes_back_with_its_rows_in_order(tmp_path: Path, make: Any) -> None:
    config = transformers.LlamaConfig(
        **SMALL,
        num_hidden_layers=3,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    tensors = state(transformers.LlamaForCausalLM(config))
    assert "model.layers.2.self_attn.k_proj.bias" in tensors and "lm_head.weight" in tensors

    def metadata(writer: gguf.GGUFWriter) -> None:
        common(writer, config)
        writer.add_rope_freq_base(500000.0)
        writer.add_rope_dimension_count(16)

    path = make.write_gguf(tmp_path / "m.gguf", "llama", tensors, 3, metadata, change=permuted(make, config))
    files = open_model(path)
    assert_same_config(files, config, *TRANSFORMER, "head_dim", "attention_bias", "mlp_bias", "hidden_act")
    assert_same_tensors(files, tensors)


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_rows_of_quantized_llama_heads_move_as_they_are(tmp_path: Path, make: Any, stored: str) -> None:
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=1, tie_word_embeddings=True)
    tensors = state(transformers.LlamaForCausalLM(config))
    path = make.write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tensors,
        1,
        lambda writer: common(writer, config),
        change=permuted(make, config),
        stored=lambda name, tensor: stored if tensor.dim() == 2 else "F32",
    )
    files = open_model(path)
    kind = gguf.GGMLQuantizationType[stored]
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            got = files.source.get(name)
            assert got.scheme.name == stored.lower()
            want = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            assert torch.equal(got.dequantize(), torch.from_numpy(want.copy())), name


def test_llama_3_rope_factors_reach_the_config(tmp_path: Path, make: Any) -> None:
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=1)
    factors = torch.tensor([1.0, 1.0, 1.5, 2.0, 8.0, 8.0, 8.0, 8.0])
    path = make.write_gguf(
        tmp_path / "m.gguf",
        "llama",
        state(transformers.LlamaForCausalLM(config)),
        1,
        lambda writer: common(writer, config),
        change=permuted(make, config),
        extra={"rope_freqs.weight": factors},
    )
    files = open_model(path)
    assert files.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert not files.source.has("rope_freqs.weight")


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path, make: Any) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        make.tiny_llama_metadata(writer)
        writer.add_sliding_window(16)

    files = open_model(make.write_gguf(tmp_path / "m.gguf", "llama", make.tiny_llama_tensors(), 1, metadata))
    assert (files.config["model_type"], files.config["sliding_window"]) == ("mistral", 16)


def test_smollm3_comes_back_with_its_layers_without_rotation(tmp_path: Path, make: Any) -> None:
    config = transformers.SmolLM3Config(**SMALL, num_hidden_layers=5)
    tensors = state(transformers.SmolLM3ForCausalLM(config))

    def metadata(writer: gguf.GGUFWriter) -> None:
        common(writer, config)
        writer.add_rope_freq_base(2000000.0)

    path = make.write_gguf(tmp_path / "m.gguf", "smollm3", tensors, 5, metadata, change=permuted(make, config))
    files = open_model(path)
    assert files.config["no_rope_layers"] == [1, 1, 1, 0, 1]
    assert_same_config(files, config, *TRANSFORMER, "no_rope_layers", "no_rope_layer_interval", "layer_types")
    assert_same_tensors(files, tensors)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_comes_back_unpermuted(tmp_path: Path, make: Any, kind: str) -> None:
    if kind == "qwen2":
        config = transformers.Qwen2Config(**SMALL, num_hidden_layers=2)
        tensors = state(transformers.Qwen2ForCausalLM(config))
        assert "model.layers.1.self_attn.q_proj.bias" in tensors
    else:
        config = transformers.Qwen3Config(**SMALL, num_hidden_layers=2, head_dim=32)
        tensors = state(transformers.Qwen3ForCausalLM(config))
        assert "model.layers.1.self_attn.q_norm.weight" in tensors

    def metadata(writer: gguf.GGUFWriter) -> None:
        common(writer, config)
        writer.add_rope_freq_base(10000.0)
        if kind == "qwen3":
            writer.add_key_length(32)
            writer.add_value_length(32)

    files = open_model(make.write_gguf(tmp_path / "m.gguf", kind, tensors, 2, metadata))
    assert_same_config(
        files, config, *TRANSFORMER, "layer_types", "sliding_window", *(["head_dim"] * (kind == "qwen3"))
    )
    assert_same_tensors(files, tensors)


def plus_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_gemma_comes_back_with_its_windows_and_the_one_in_its_norms(tmp_path: Path, make: Any, kind: str) -> None:
    layers = 7
    if kind == "gemma2":
        config = transformers.Gemma2Config(
            **SMALL, num_hidden_layers=layers, head_dim=32, query_pre_attn_scalar=32, sliding_window=8
        )
        tensors = state(transformers.Gemma2ForCausalLM(config))
    else:
        config = transformers.Gemma3TextConfig(
            **SMALL, num_hidden_layers=layers, head_dim=32, query_pre_attn_scalar=32, sliding_window=8
        )
        config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
        tensors = state(transformers.Gemma3ForCausalLM(config))

    def metadata(writer: gguf.GGUFWriter) -> None:
        common(writer, config)
        writer.add_key_length(32)
        writer.add_value_length(32)
        writer.add_sliding_window(8)
        if kind == "gemma2":
            writer.add_attn_logit_softcapping(50.0)
            writer.add_final_logit_softcapping(30.0)
        else:
            writer.add_rope_freq_base(1000000.0)
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(8.0)

    files = open_model(make.write_gguf(tmp_path / "m.gguf", kind, tensors, layers, metadata, change=plus_one))
    assert_same_config(
        files,
        config,
        *TRANSFORMER,
        "head_dim",
        "query_pre_attn_scalar",
        "sliding_window",
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        *(["rope_local_base_freq"] if kind == "gemma3" else []),
    )
    assert files.config["norm_weight_offset"] == 0.0
    assert_same_tensors(files, {name: plus_one(name, tensor) for name, tensor in tensors.items()})


def test_a_pattern_in_the_file_overrules_the_usual_one(tmp_path: Path, make: Any) -> None:
    config = transformers.Gemma3TextConfig(**SMALL, num_hidden_layers=3, head_dim=32, sliding_window=8)
    tensors = state(transformers.Gemma3ForCausalLM(config))

    def metadata(writer: gguf.GGUFWriter) -> None:
        common(writer, config)
        writer.add_key_length(32)
        writer.add_rope_freq_base(1000000.0)
        writer.add_sliding_window(8)
        writer.add_sliding_window_pattern([False, True, False])

    files = open_model(make.write_gguf(tmp_path / "m.gguf", "gemma3", tensors, 3, metadata))
    assert files.config["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]


def test_phi3_keeps_its_fused_tensors_and_long_factors(tmp_path: Path, make: Any) -> None:
    long, short = [float(i + 2) for i in range(6)], [1.0 + i / 8 for i in range(6)]
    config = transformers.Phi3Config(
        **SMALL,
        num_hidden_layers=2,
        original_max_position_embeddings=128,
        sliding_window=99,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": long,
            "short_factor": short,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
        },
    )
    tensors = state(transformers.Phi3ForCausalLM(config))
    factor = math.sqrt(1 + math.log(4) / math.log(128))

    def metadata(writer: gguf.GGUFWriter) -> None:
        common(writer, config)
        writer.add_rope_scaling_orig_ctx_len(128)
        writer.add_rope_dimension_count(12)
        writer.add_rope_freq_base(10000.0)
        writer.add_sliding_window(99)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(factor)

    extra = {"rope_factors_long.weight": torch.tensor(long), "rope_factors_short.weight": torch.tensor(short)}
    files = open_model(make.write_gguf(tmp_path / "m.gguf", "phi3", tensors, 2, metadata, extra=extra))
    assert_same_config(
        files,
        config,
        "sliding_window",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        *(field for field in TRANSFORMER if field != "rope_scaling"),
    )
    scaling = files.config["rope_scaling"]
    assert scaling.pop("attention_factor") == pytest.approx(factor, rel=1e-7)
    assert scaling == {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    }
    assert_same_tensors(files, tensors)


def test_mamba_comes_back_with_a_for_a_log_and_its_convolution_in_shape(tmp_path: Path, make: Any) -> None:
    config = transformers.MambaConfig(
        vocab_size=40,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        conv_kernel=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    tensors = state(transformers.MambaForCausalLM(config))

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(2**20)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(64)
        writer.add_ssm_state_size(8)
        writer.add_ssm_time_step_rank(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_ssm_dt_b_c_rms(False)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (
            -torch.exp(tensor) if name.endswith(".A_log") else tensor.squeeze() if "conv1d.weight" in name else tensor
        )

    files = open_model(make.write_gguf(tmp_path / "m.gguf", "mamba", tensors, 2, metadata, change=change))
    assert_same_config(
        files,
        config,
        "state_size",
        "conv_kernel",
        "time_step_rank",
        "intermediate_size",
        "use_bias",
        "use_conv_bias",
        "layer_norm_epsilon",
        "expand",
    )
    want = {
        name.replace("A_log", "A"): -torch.exp(tensor) if name.endswith("A_log") else tensor
        for name, tensor in tensors.items()
    }
    assert want["backbone.layers.0.mixer.conv1d.weight"].shape == (64, 1, 4)
    assert_same_tensors(files, want)


def rope(make: Any, path: Path, **values: Any) -> Any:
    def metadata(writer: gguf.GGUFWriter) -> None:
        make.tiny_llama_metadata(writer)
        for key, value in values.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            (writer.add_uint32 if isinstance(value, int) else add)(f"llama.rope.{key.replace('__', '.')}", value)

    return open_model(make.write_gguf(path / "r.gguf", "llama", make.tiny_llama_tensors(), 1, metadata)).config


def test_linear_and_yarn_scaling_are_told_in_the_hugging_face_vocabulary(tmp_path: Path, make: Any) -> None:
    assert rope(make, tmp_path)["rope_scaling"] is None
    assert rope(make, tmp_path, scaling__type="none", scaling__factor=4.0)["rope_scaling"] is None
    linear = {"rope_type": "linear", "factor": 4.0}
    assert rope(make, tmp_path, scaling__type="linear", scaling__factor=4.0)["rope_scaling"] == linear
    assert rope(make, tmp_path, scale_linear=4.0)["rope_scaling"] == linear
    yarn = rope(
        make,
        tmp_path,
        scaling__type="yarn",
        scaling__factor=4.0,
        scaling__original_context_length=32,
        scaling__yarn_beta_fast=16.0,
        scaling__yarn_attn_factor=0.7,
    )
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "attention_factor": 0.7,
    }
    for bad in (
        {"scaling__type": "spiral"},
        {"scaling__type": "longrope"},
        {"scaling__factor": -1.0},
        {"scaling__type": "yarn", "scaling__yarn_log_multiplier": 0.1},
        {"freq_base": float("nan")},
        {"dimension_count": 64},
    ):
        with pytest.raises(ModelError):
            rope(make, tmp_path, **bad)


def test_every_end_token_is_listed(tmp_path: Path, make: Any) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        make.tiny_llama_metadata(writer)
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(2)

    files = open_model(make.write_gguf(tmp_path / "m.gguf", "llama", make.tiny_llama_tensors(), 1, metadata))
    assert files.config["eos_token_id"] == 1 and files.generation == {"eos_token_id": [1, 2]}


def test_an_unknown_architecture_is_named_beside_the_known_ones(tmp_path: Path, make: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    known = r"'falcon'.*gemma2, gemma3, .*llama, mamba, .*phi3, qwen2, .*qwen3, .*smollm3"
    with pytest.raises(ModelError, match=known):
        open_model(tmp_path / "m.gguf")


def test_experts_of_an_architecture_without_them_are_refused(tmp_path: Path, make: Any) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        make.tiny_llama_metadata(writer)
        writer.add_expert_count(8)

    with pytest.raises(ModelError, match="mixture of experts"):
        open_model(make.write_gguf(tmp_path / "m.gguf", "qwen2", make.tiny_llama_tensors(), 1, metadata))


def test_a_tensor_without_a_translation_keeps_its_name_and_stays_unread(tmp_path: Path, make: Any) -> None:
    path = make.write_gguf(
        tmp_path / "m.gguf",
        "llama",
        make.tiny_llama_tensors(),
        1,
        make.tiny_llama_metadata,
        extra={"blk.0.strange.weight": torch.ones(4)},
    )
    files = open_model(path)
    for name in files.source.names():
        if name != "blk.0.strange.weight":
            files.source.get(name)
    assert files.source.unread() == ["blk.0.strange.weight"]


def test_a_missing_tensor_is_named(tiny_gguf: Path) -> None:
    source = open_model(tiny_gguf).source
    assert not source.has("lm_head.weight")
    for ask in (source.get, source.shape):
        with pytest.raises(ModelError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight'"):
            ask("model.layers.0.mlp.up_proj.weight")
