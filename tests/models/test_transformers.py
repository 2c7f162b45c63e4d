"""Every family computes what the reference implementation computes, however a sequence is cut into steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bankfull.layers.batch import Batch
from bankfull.layers.ssm import MambaMixer
from bankfull.models.gemma import GEMMA3
from bankfull.ops import RecurrentMeta
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests.models import cases_latent
from tests.models.cases import CASES
from tests.models.oracle import CPU, PASSES, TOKENS, TOLERANCE, build, error, ours, reference_logits, saved

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("cut", PASSES)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference(name: str, cut: str) -> None:
    assert error(ours(name), saved(name).logits, PASSES[cut]) < TOLERANCE


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 9000.0}),
    ("llama", {"rms_norm_eps": 1e-3}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama-linear", {"rope_scaling": {"rope_type": "linear", "factor": 3.1}}),
    ("llama-llama3", {"rope_scaling": None}),
    (
        "llama-yarn",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    ("llama-yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": 6}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    ("smollm3-window", {"layer_types": [FULL] * 4}),
    ("qwen2-window", {"sliding_window": 10}),
    ("qwen2-window", {"layer_types": [SLIDING] * 3}),
    ("gemma2", {"norm_weight_offset": 0.0}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 12}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2", {"layer_types": [FULL, SLIDING, SLIDING]}),
    ("gemma3-text", {"rope_local_base_freq": 5000.0}),
    ("gemma3-text", {"rope_scaling": None}),
    ("gemma3-text", {"norm_weight_offset": 0.0}),
    ("phi3", {"sliding_window": 12}),
    ("phi3-long", {"partial_rotary_factor": 1.0, "rope_scaling": None}),
    ("opt", {"activation_function": "gelu"}),
    ("mamba", {"layer_norm_epsilon": 1e-2}),
    ("gpt2", {"activation_function": "relu"}),
    ("gpt2-odd", {"scale_attn_by_inverse_layer_idx": False}),
    ("gpt-neox", {"use_parallel_residual": False}),
    ("gpt-neox", {"partial_rotary_factor": 0.25}),
    ("gpt-neox", {"qkv_by_head": False}),
    ("olmo2", {"rms_norm_eps": 1e-3}),
    ("granite", {"residual_multiplier": 0.23}),
    ("granite", {"embedding_multiplier": 3.1}),
    ("granite", {"attention_multiplier": 0.31}),
    ("granite", {"logits_scaling": 0.71}),
    ("granite", {"rms_norm_eps": 1e-3}),
    ("glm4", {"partial_rotary_factor": 1.0}),
    ("hunyuan-v1-dense", {"rope_scaling": None}),
    *cases_latent.WRONG,
    ("minimax", {"hidden_act": "relu"}),
    ("minimax-factors", {"full_attn_alpha_factor": 3.0}),
    ("minimax-factors", {"linear_attn_beta_factor": 0.7}),
    ("minimax-factors", {"mlp_alpha_factor": 2.0}),
    ("minimax-factors", {"sliding_window": 10}),
    ("qwen3-next", {"partial_rotary_factor": 0.5}),
    ("qwen3-next", {"norm_weight_offset": 0.0}),
    ("qwen3-next-mixed", {"norm_topk_prob": True}),
]


@pytest.mark.parametrize(("name", "change"), WRONG, ids=[f"{name}-{'-'.join(change)}" for name, change in WRONG])
def test_a_wrong_reading_of_the_configuration_shows_in_the_logits(name: str, change: dict[str, Any]) -> None:
    """What keeps the test above honest: none of its models is so tame that a mistake would pass."""
    assert error(ours(name, changes=change), saved(name).logits) > 10 * TOLERANCE


def test_a_wrong_position_or_a_lost_state_shows_in_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recurrent = ours("opt"), ours("mamba")
    embed = model.embed
    model.embed = lambda batch: embed(replace(batch, positions=(batch.positions - 1).clamp(min=0)))
    assert error(model, saved("opt").logits) > 10 * TOLERANCE

    def forget(self: MambaMixer, batch: Batch, group: int) -> RecurrentMeta:
        assert batch.read is not None and batch.write is not None
        return RecurrentMeta(batch.q_start, batch.kept, torch.zeros_like(batch.read), batch.write)

    monkeypatch.setattr(MambaMixer, "plan", forget)
    assert error(recurrent, saved("mamba").logits) < TOLERANCE
    assert error(recurrent, saved("mamba").logits, PASSES["chunks"]) > 10 * TOLERANCE


def test_longrope_is_chosen_by_the_longest_sequence_that_will_be_run() -> None:
    """The reference decides anew for every text; here the engine's limit decides once, for all of them."""
    tokens = TOKENS[:16]
    want = reference_logits(saved("phi3-long").reference, tokens)
    short, long = ours("phi3-long", max_len=16), ours("phi3-long")
    assert float((naive.logits(short, tokens, CPU) - want).abs().max()) < TOLERANCE
    assert float((naive.logits(long, tokens, CPU) - want).abs().max()) > 10 * TOLERANCE


def test_the_text_tower_is_found_under_both_of_its_names(tmp_path: Path) -> None:
    """The other layout: everything under `model.`, the head at the top."""
    source = saved("gemma3-untied")
    tensors = load_file(source.path / "model.safetensors")
    assert "language_model.lm_head.weight" in tensors
    renamed = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix("language_model.")
        if inner.startswith("model."):
            inner = "model.language_model." + inner.removeprefix("model.")
        elif not inner.startswith("lm_head"):
            inner = "model." + inner
        renamed[inner] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source.path / "config.json").read_text())
    assert error(build(open_model(tmp_path)), source.logits) < TOLERANCE


def test_sparse_published_files_get_the_family_defaults() -> None:
    """Gemma 3's own files leave out most of what they mean."""
    assert error(ours("gemma3-text", changes={"layer_types": None}), saved("gemma3-text").logits) > 10 * TOLERANCE
    reference = type(saved("gemma3-text").reference.config)()
    for name in (
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "query_pre_attn_scalar",
        "sliding_window",
        "hidden_activation",
        "tie_word_embeddings",
        "attention_bias",
    ):
        assert GEMMA3[name] == getattr(reference, name), name
    assert GEMMA3["rope_theta"] == reference.rope_parameters["full_attention"]["rope_theta"]
    assert GEMMA3["rope_local_base_freq"] == reference.rope_parameters["sliding_attention"]["rope_theta"]
