"""Tiny random models: written by `transformers`, loaded by us. Weights are drawn wide so that a mistake shows."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.limits.meter.metered import MeteredModel
from bankfull.models.registry import build_model
from bankfull.ops import Kit, kit_for
from bankfull.weights.source import open_model

VOCAB = 97
DEVICE = torch.device(os.environ.get("BANKFULL_TEST_DEVICE", "cpu"))
"""Where the models of the exactness matrix run."""
_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "tie_word_embeddings": False}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}

_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


def config_of(shape: str) -> transformers.PretrainedConfig:
    if shape == "llama":
        return transformers.LlamaConfig(**_COMMON, **_HEADS, max_position_embeddings=256)
    if shape == "gemma":
        return transformers.Gemma3TextConfig(
            **_COMMON,
            **_HEADS,
            max_position_embeddings=256,
            sliding_window=8,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    if shape == "shared":
        sizes = {**_COMMON, **_HEADS, "max_position_embeddings": 256}
        return transformers.HunYuanDenseV1Config(**sizes, use_cla=True, cla_share_factor=3)
    if shape == "latent":
        return transformers.DeepseekV3Config(**_COMMON, **_LATENT, max_position_embeddings=256)
    if shape == "experts":
        return transformers.Qwen3MoeConfig(
            **_COMMON,
            **_HEADS,
            max_position_embeddings=256,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        )
    if shape == "lightning":
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        return transformers.MiniMaxConfig(
            **_COMMON,
            **_HEADS,
            max_position_embeddings=256,
            num_local_experts=3,
            layer_types=kinds,
            mlp_alpha_factor=1.5,
        )
    if shape == "delta":
        return transformers.Qwen3NextConfig(
            **{**_COMMON, **_HEADS, "head_dim": 16},
            max_position_embeddings=256,
            full_attention_interval=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=6,
            num_experts=3,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    if shape == "mamba2":
        return transformers.Mamba2Config(**_COMMON, num_heads=4, head_dim=16, n_groups=2, state_size=4)
    if shape == "hybrid":
        sizes = {**_COMMON, **_HEADS, "max_position_embeddings": 256}
        mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 4, "mamba_rms_norm": True}
        return transformers.FalconH1Config(**sizes, **mamba, ssm_multipliers=[0.5, 0.8, 1.2, 0.9, 1.4])
    assert shape == "mamba", shape
    return transformers.MambaConfig(**_COMMON, state_size=4, conv_kernel=4, expand=2, time_step_rank=2)


_COMPOSED: dict[str, Any] = {
    "s4": {"layers": "3 x s4(state=8)"},
    "based": {"layers": "based(features=4, heads=4), local(8, heads=4), conv(inner=24)"},
    "sparse": {
        "layers": ["dilated", "fixed", "strided"],
        "blocks": {
            "dilated": {"mixer": "attention", "window": 3, "dilation": 2, "global_tokens": 2},
            "fixed": {"mixer": "attention", "window": 6, "stride": 6, "columns": 1, "aligned": True},
            "strided": {"mixer": "attention", "window": 4, "stride": 5},
        },
    },
}
"""Layers that no family of `transformers` has: S4, Longformer's mask, and both masks of the Sparse Transformer."""


def save(shape: str, folder: Path) -> Path:
    """A model of that shape with seeded random weights, in the Hugging Face layout."""
    torch.manual_seed(1)
    if shape in _COMPOSED:
        return _save_composed(shape, folder)
    model = transformers.AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32)
    if shape == "shared":
        for layer in model.model.layers[1:]:
            del layer.self_attn.k_proj, layer.self_attn.v_proj
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(("A_log", "dt_proj.bias", "dt_bias", "D")):
                # A wide head keeps the two best tokens apart: the tests compare arg-max chains.
                spread = 3.0 if "lm_head" in name else 0.3 if weight.dim() > 1 else 0.2
                weight.copy_(torch.randn_like(weight) * spread)
    model.save_pretrained(folder)
    if shape == "latent":
        add_prediction_module(folder)
    return folder


def _save_composed(shape: str, folder: Path) -> Path:
    config = {"model_type": "bankfull", **_COMMON, **_HEADS, **_COMPOSED[shape], "max_position_embeddings": 256}
    tensors = {}
    for name, stored in MeteredModel(config).shapes.read.items():
        spread = 3.0 if "lm_head" in name else 0.3 if len(stored.shape) > 1 else 0.2
        tensors[name] = torch.randn(stored.shape) * spread
        if name.endswith("log_dt"):
            tensors[name] = torch.linspace(-4.0, -1.0, *stored.shape)
        if name.endswith("A_imag"):
            tensors[name] += torch.pi * torch.arange(stored.shape[1])
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_prediction_module(folder: Path) -> None:
    """A multi-token-prediction module like the model's last layer, which `transformers` does not save."""
    path = folder / "model.safetensors"
    tensors, drawn = load_file(path), torch.Generator().manual_seed(2)
    last, hidden = _COMMON["num_hidden_layers"] - 1, _COMMON["hidden_size"]
    at = f"model.layers.{last + 1}."
    module = {
        name.replace(f"model.layers.{last}.", at): torch.randn(tensor.shape, generator=drawn) * 0.3
        for name, tensor in tensors.items()
        if name.startswith(f"model.layers.{last}.")
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        module[f"{at}{name}.weight"] = torch.randn(hidden, generator=drawn) * 0.2 + 1
    module[f"{at}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=drawn) * 0.3
    module[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    module[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **module}, path, metadata={"format": "pt"})


@lru_cache
def folder_of(shape: str) -> Path:
    import atexit
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix=f"bankfull-{shape}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save(shape, folder)


def kit_of(
    shape: str, dtype: torch.dtype = torch.float64, providers: str = "torch", kv_dtype: torch.dtype | None = None
) -> Kit:
    """The kit that `model_of` builds with: the same object, however the arguments are given."""
    return _kit_of(shape, dtype, providers, kv_dtype)


@lru_cache
def _kit_of(shape: str, dtype: torch.dtype, providers: str, kv_dtype: torch.dtype | None) -> Kit:
    return kit_for(DEVICE.type, providers)


@lru_cache
def reference_of(shape: str) -> Decoder:
    """The bodies in float64 on the host, whatever device is tested."""
    files = open_model(folder_of(shape))
    return build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float64, torch.device("cpu")))


@lru_cache
def model_of(
    shape: str, dtype: torch.dtype = torch.float64, providers: str = "torch", kv_dtype: torch.dtype | None = None
) -> Decoder:
    files = open_model(folder_of(shape))
    kit = kit_of(shape, dtype, providers, kv_dtype)
    return build_model(files.config, Build(files.source, kit, dtype, DEVICE, kv_dtype=kv_dtype))


CORPUS = 'The river runs at the full capacity of its channel, and the engine fills it. {"name": [1, 2.5, true]} ' * 3
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache
def speaking_folder(seed: int = 5) -> Path:
    """A tiny Llama with a byte-level tokenizer and a chat template: a whole model, text to text. Another `seed` gives
    other weights with the same tokenizer."""
    import atexit
    import shutil
    import tempfile

    import tokenizers

    folder = Path(tempfile.mkdtemp(prefix="bankfull-speaking-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([CORPUS], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_id=backend.token_to_id("<|im_end|>"),
        bos_token_id=None,
        **_HEADS,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(folder)
    return folder


def with_other_weights(folder: Path, into: Path, seed: int = 3, spread: float = 0.3) -> Path:
    """A copy of a model in another folder: the same names, shapes and dtypes, with other numbers."""
    import shutil

    shutil.copytree(folder, into)
    drawn = torch.Generator().manual_seed(seed)
    for path in sorted(into.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=drawn)
                tensors[name] = (tensor.float() * (1 + spread * noise)).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return into
