"""`bankfull explain` for a model with latent attention and routed experts: accounts that add up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers

from bankfull import LLM
from bankfull.limits.explain.explain import explain
from bankfull.limits.explain.recorder import DECODE, PREFILL
from bankfull.limits.explain.run_story import run_followed
from tests.limits.test_explain import adds_up, prompts, watched
from tests.tiny import speaking_folder


def latent_folder(folder: Path) -> Path:
    """A tiny DeepSeek with the vocabulary of the model that speaks."""
    shutil.copytree(speaking_folder(), folder, dirs_exist_ok=True)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = transformers.DeepseekV3Config(
        vocab_size=vocab,
        hidden_size=64,
        num_hidden_layers=2,
        max_position_embeddings=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=96,
        moe_intermediate_size=32,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    )
    torch.manual_seed(3)
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_parts_of_a_request_add_up_for_latents_and_experts(tmp_path: Path) -> None:
    llm = LLM(str(latent_folder(tmp_path)), dtype="float32", memory="8MiB", speculative="off")
    recorder, limit, adviser = watched(llm)
    story, _ = run_followed(llm, recorder, prompts(2), 6)
    found = explain(story, limit, adviser)
    adds_up(story, found)
    parts = {part.part: part for part in found.parts}
    assert parts[PREFILL].tokens == 20 and parts[DECODE].tokens == 5
    detail = parts[DECODE].detail
    assert detail is not None and detail.own_limit is not None and detail.own_limit > 0
