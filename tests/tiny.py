"""Tiny random models: written by `transformers`, loaded by us. Weights are drawn wide so that a mistake shows."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch
import transformers

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import Kit, kit_for
from bankfull.weights.source import open_model

VOCAB = 97
DEVICE = torch.device(os.environ.get("BANKFULL_TEST_DEVICE", "cpu"))
"""Where the models of the exactness matrix run."""
_COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "tie_word_embeddings": False}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}


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
    assert shape == "mamba", shape
    return transformers.MambaConfig(**_COMMON, state_size=4, conv_kernel=4, expand=2, time_step_rank=2)


def save(shape: str, folder: Path) -> Path:
    """A model of that shape with seeded random weights, in the Hugging Face layout."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(("A_log", "dt_proj.bias", "D")):
                # A wide head keeps the two best tokens apart: the tests compare arg-max chains.
                spread = 3.0 if "lm_head" in name else 0.3 if weight.dim() > 1 else 0.2
                weight.copy_(torch.randn_like(weight) * spread)
    model.save_pretrained(folder)
    return folder


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
