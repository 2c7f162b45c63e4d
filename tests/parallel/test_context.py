"""Context ranks and sequence parallelism: ranks that divide tokens compute what the whole model computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.ops import native, partial_attention
from bankfull.runtime import naive
from bankfull.state.mask import Mask
from bankfull.synthetic.random_weights import random_model
from bankfull.weights.source import open_model
from tests.models import diffusion
from tests.models.cases import CASES
from tests.models.composed import LAYERS, config_of
from tests.models.oracle import CPU, PASSES, TOKENS, TOLERANCE, saved
from tests.parallel.even import even_model
from tests.parallel.spread import WHOLE, Mesh, Step, error, run
from tests.parallel.threads import ThreadRank, on_mesh

CONTEXT, ULYSSES, MEGATRON = Mesh(cp=2), Mesh(cp=2, sp="ulysses"), Mesh(tp=2, sp="megatron")
LAYOUTS = (CONTEXT, ULYSSES, MEGATRON)
COMBINED = (Mesh(2, 2), Mesh(2, 2, "ulysses"), Mesh(2, 2, "megatron"))
APART = ("gemma3", "gemma3-untied", "hunyuan-shared", "hunyuan-shared-biased")
"""Cases whose configuration cannot be changed from outside."""
KINDS = (
    "llama",
    "mistral",
    "gemma2",
    "opt-350m",
    "gpt-neox",
    "gpt-oss",
    "qwen2-moe",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3-next",
    "jamba",
    "falcon-h1",
    "minimax",
    "olmo2",
)
"""One of each kind of attention, block and hybrid."""
RECURRENT = ("mamba", "mamba-odd", "mamba2", "mamba2-odd", "mamba2-one-group")
"""Cases without attention; below, composed ones."""
WITHOUT_ATTENTION = ("mamba", "mamba2", "s4", "lightning", "delta")
SEQUENCES = [TOKENS[:23], TOKENS[5:17], TOKENS[11:12], TOKENS[20:39]]
STEPS: list[Step] = [
    [(0, 9)],  # fresh
    [(0, 1), (1, 7), (2, 1)],  # paged beside fresh, one of a single token
    [(1, 1)],  # fewer tokens than ranks
    [(3, 5), (0, 8), (1, 2)],
    [(0, 5), (3, 14), (1, 2)],
]


def differs(name: str, mesh: Mesh, cut: str) -> float:
    files = [open_model(even_model(name)[0]) for _ in range(mesh.tp * mesh.cp)]

    def work(tp: ThreadRank, cp: ThreadRank) -> Tensor:
        model = mesh.build(files[cp.index * mesh.tp + tp.index], tp, cp)
        return naive.logits(model, TOKENS, CPU, PASSES[cut])

    expected = even_model(name)[1]
    return max(float((found - expected).abs().max()) for found in on_mesh((mesh.tp, mesh.cp), work))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_ranks_that_divide_tokens_compute_the_logits_of_the_reference(name: str, mesh: Mesh) -> None:
    assert differs(name, mesh, "chunks") < TOLERANCE


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("cut", ["whole", "single"])
@pytest.mark.parametrize("name", ["gemma2", "deepseek-v3", "falcon-h1"])
def test_ranks_compute_the_same_in_one_pass_and_token_by_token(name: str, cut: str, mesh: Mesh) -> None:
    assert differs(name, mesh, cut) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name not in (*APART, *KINDS)])
def test_ranks_compute_the_logits_of_every_case(name: str, mesh: Mesh) -> None:
    if name in RECURRENT and mesh.cp > 1:
        pytest.skip("refused: see below")
    for cut in PASSES:
        assert differs(name, mesh, cut) < TOLERANCE, cut


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", COMBINED, ids=str)
@pytest.mark.parametrize("name", ["llama-tied-biased", "gpt-oss", "deepseek-v3", "falcon-h1"])
def test_tensor_and_context_ranks_together_compute_the_logits_of_the_reference(name: str, mesh: Mesh) -> None:
    if name != "llama-tied-biased" and mesh.sp == "ulysses":
        pytest.skip("3 heads of a tensor rank cannot be divided")
    if name == "llama-tied-biased" and mesh.sp == "ulysses":
        mesh = Mesh(2, 3, "ulysses")
    assert differs(name, mesh, "chunks") < TOLERANCE


@pytest.mark.parametrize("mesh", [Mesh(cp=3), Mesh(cp=5), Mesh(cp=3, sp="ulysses"), Mesh(tp=3, sp="megatron")], ids=str)
def test_more_ranks_than_pages_or_tokens_compute_the_same(mesh: Mesh) -> None:
    """Ranks without a page or without a token take part in every exchange. 6 heads; 6 heads of keys and values."""
    config: dict[str, Any] = dict(config_of("window"), num_attention_heads=6, num_key_value_heads=6)
    config |= {"hidden_size": 36, "intermediate_size": 42}
    files = partial(random_model, "tiny", config, torch.float32)
    assert_same(files, mesh)


def assert_same(files: Any, mesh: Mesh, **more: Any) -> None:
    (expected,) = run(WHOLE, files, SEQUENCES, STEPS, **more)
    assert expected.logits.std() > 0.01
    found = run(mesh, files, SEQUENCES, STEPS, **more)
    assert len(found) == mesh.tp * mesh.cp and error(found, expected.logits) < TOLERANCE
    assert all(torch.equal(one.logits, found[0].logits) for one in found), "every rank must choose the same tokens"


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "case", [name for name in LAYERS if name not in ("mamba", "mamba2", "s4", "lightning", "delta")]
)
def test_several_sequences_over_pages_in_any_order_compute_the_same(case: str, mesh: Mesh) -> None:
    """Over windows, sparse masks, shared keys, latents and parallel mixers. A rank's pool has its share of the frames,
    and pages that nobody wrote are NaN."""
    assert_same(partial(random_model, "tiny", config_of(case), torch.float32), mesh)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [*LAYOUTS, Mesh(2, 2)], ids=str)
@pytest.mark.parametrize("case", ["window", "mla", "experts"])
def test_kernels_compute_the_same_on_ranks(case: str, mesh: Mesh) -> None:
    assert_same(partial(random_model, "tiny", config_of(case), torch.float32), mesh, providers="auto")


@pytest.mark.skipif(native.status() is not None, reason="the native extension was not built")
@pytest.mark.parametrize("case", ["attention", "window", "mla", "shared", "sparse"])
def test_context_ranks_attend_to_their_pages_with_the_native_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, calls = partial_attention.providers["native"], []

    def noting(*args: Any) -> Tensor:
        calls.append(provider.run)
        return provider.run(*args)

    monkeypatch.setitem(partial_attention.providers, "native", replace(provider, run=noting))
    assert_same(partial(random_model, "tiny", config_of(case), torch.float32), CONTEXT, providers="auto")
    assert calls


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", ["attention", "window", "mla", "shared", "sparse"])
def test_a_tree_of_drafts_is_verified_by_ranks(case: str, mesh: Mesh) -> None:
    files = partial(random_model, "tiny", config_of(case), torch.float32)
    tree, steps = (-1, 0, 0, 1, 1, 2, 3), [[(0, 9)], [(0, 2)], [(0, 7)]]
    (expected,) = run(WHOLE, files, [TOKENS[:18]], steps, tree=tree)
    assert error(run(mesh, files, [TOKENS[:18]], steps, tree=tree), expected.logits) < TOLERANCE
    chain = run(WHOLE, files, [TOKENS[:18]], steps)
    assert error(chain, expected.logits) > 100 * TOLERANCE  # the tree matters


@pytest.mark.parametrize("case", WITHOUT_ATTENTION)
def test_recurrences_compute_the_same_between_tokens_that_tensor_ranks_divide(case: str) -> None:
    assert_same(partial(random_model, "tiny", config_of(case), torch.float32), MEGATRON)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [CONTEXT, ULYSSES], ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_rounded_keys_and_values_are_the_same_on_every_rank(kind: torch.dtype, mesh: Mesh) -> None:
    config = dict(config_of("attention"))
    assert_same(partial(random_model, "tiny", config, torch.float32), mesh, kv_dtype=kind)


@pytest.mark.parametrize("mesh", [CONTEXT, ULYSSES], ids=str)
def test_evicted_tokens_are_evicted_on_every_rank(mesh: Mesh) -> None:
    files = partial(random_model, "tiny", config_of("attention"), torch.float32)
    assert_same(files, mesh, kv_evict=Mask(6, global_tokens=2))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [CONTEXT, ULYSSES], ids=str)
@pytest.mark.parametrize("name", ["hunyuan-shared", "hunyuan-shared-biased"])
def test_layers_that_share_keys_compute_the_logits_of_the_reference(name: str, mesh: Mesh) -> None:
    files = lambda: open_model(saved(name).path)  # noqa: E731
    found = run(mesh, files, [TOKENS], [[(0, 20)], [(0, 1)], [(0, len(TOKENS) - 21)]])
    assert error(found, saved(name).logits) < TOLERANCE


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [CONTEXT, ULYSSES], ids=str)
@pytest.mark.parametrize("kind", ["llada", "sdar"])
def test_tokens_that_see_later_ones_compute_the_logits_of_the_reference(kind: str, mesh: Mesh, tmp_path: Path) -> None:
    reference = diffusion.make(kind, tmp_path)
    steps: list[Step] = [[(0, 45)]] if kind == "llada" else [[(0, 12)], [(0, 4)], [(0, 29)]]
    found = run(mesh, lambda: open_model(tmp_path), [TOKENS], steps)
    assert error(found, reference.logits(TOKENS)) < TOLERANCE


def test_a_model_without_attention_is_refused_for_context_ranks() -> None:
    files = partial(random_model, "tiny", config_of("delta"), torch.float32)
    with pytest.raises(ConfigError, match="this model has none; leave out cp"):
        run(CONTEXT, files, SEQUENCES, STEPS)


def test_heads_that_ulysses_cannot_divide_are_refused() -> None:
    files = partial(random_model, "tiny", config_of("attention"), torch.float32)
    with pytest.raises(ConfigError, match=r"4 heads.*cannot be divided over 3 context ranks"):
        run(Mesh(cp=3, sp="ulysses"), files, SEQUENCES, STEPS)
