"""Latent attention as a layer: the bytes of its cache, expansion in mixed steps, and what is refused."""

from __future__ import annotations

import pytest
import torch

from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.limits.meter.closed_form import closed_form
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ops.latent import body as latent
from bankfull.state.spec import layout_of
from bankfull.weights.source import open_model
from tests.models.oracle import PASSES, TOLERANCE, error, ours, saved
from tests.test_exact import check
from tests.tiny import folder_of, model_of


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_the_cache_holds_a_latent_and_a_key_per_token_and_layer(dtype: torch.dtype, size: int) -> None:
    model = model_of("latent", dtype)
    rank, rope, layers = 16, 4, 3
    assert layout_of(model.states(), 16).token_bytes == (rank + rope) * size * layers


@pytest.mark.parametrize("cut", ("whole", "chunks"))
def test_expanded_chunks_equal_the_reference(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "EXPAND_FROM", 2)
    ran = []
    body = latent.expanded_attention.body
    monkeypatch.setattr(latent.expanded_attention, "body", lambda *args: ran.append(1) or body(*args))
    assert error(ours("deepseek-v3"), saved("deepseek-v3").logits, PASSES[cut]) < TOLERANCE
    assert ran, "nothing was expanded"


def test_expansion_beside_decodes_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "EXPAND_FROM", 2)
    check("latent", "warm", 64, 0, True, 4, 1, 4, "drafts")


def test_an_int8_cache_is_refused_in_one_sentence() -> None:
    files = open_model(folder_of("latent"))
    build = Build(files.source, kit_for("cpu"), torch.float32, torch.device("cpu"), kv_dtype=torch.int8)
    with pytest.raises(ConfigError, match="floating point, which kv_dtype=int8 would round; use kv_dtype=bfloat16"):
        build_model(files.config, build)


LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""DeepSeek-V2-Lite."""


def test_a_model_without_weights_has_its_cache_and_its_cost_as_a_formula() -> None:
    metered = MeteredModel(LITE, dtype="bfloat16")
    assert metered.layout.token_bytes == (512 + 64) * 2 * 27
    assert 15.6e9 < metered.parameters < 15.8e9
    form = closed_form(metered)
    step = StepShape.decode(32, 4096)
    assert form.cost(step).read == pytest.approx(metered.cost(step).sum().read, rel=1e-6)
    longer = metered.cost(StepShape.decode(32, 4097)).sum().read - metered.cost(step).sum().read
    assert longer == 32 * (512 + 64) * 2 * 27
