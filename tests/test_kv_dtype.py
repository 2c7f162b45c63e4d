"""Keys and values in another dtype than the computation: lossy, and lossy in the same way whatever else is switched on.

Tokens equal those of a plain loop without any cache that stores keys and values in the same dtype.
"""

from __future__ import annotations

import pytest
import torch

from bankfull.ops import native
from bankfull.ops.pages.rounded import write_pages_int8
from bankfull.runtime import naive
from bankfull.state.spec import layout_of
from tests.test_exact import SETTINGS, check, pairwise, prompts, refusal
from tests.tiny import DEVICE, model_of

LOSSY = {"int8": torch.int8, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
MOST = {"fp8": 0.1, "int4": 0.3}
HOW = {
    "shape": ("llama", "gemma"),
    **{name: SETTINGS[name] for name in SETTINGS if name not in ("shape", "policy")},
    "strategy": [name for name in SETTINGS["strategy"] if refusal("llama", name) is refusal("gemma", name) is None],
    "kv": tuple(LOSSY),
    "kit": ("bodies", "kernels"),
}


@pytest.mark.few(24)
@pytest.mark.parametrize(",".join(HOW), pairwise(HOW, seed=1))
def test_lossy_pages_lose_the_same_with_every_feature(
    shape: str,
    cache: str,
    chunk: int,
    depth: int,
    preempt: bool,
    mates: int,
    n: int,
    page: int,
    strategy: str,
    resumed: bool,
    tiers: str,
    kv: str,
    kit: str,
) -> None:
    made = (torch.float64, "torch") if kit == "bodies" else (torch.float32, "auto")
    check(shape, cache, chunk, depth, preempt, mates, n, page, strategy, resumed, tiers, "fcfs", *made, LOSSY[kv])


@pytest.mark.parametrize("kv", LOSSY)
def test_lossy_pages_change_the_scores_a_little(kv: str) -> None:
    tokens = prompts()[0]
    exact = naive.logits(model_of("llama"), tokens, DEVICE)
    rounded = naive.logits(model_of("llama", torch.float64, "torch", LOSSY[kv]), tokens, DEVICE)
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert 1e-5 < error < MOST.get(kv, 0.05), error


def test_int8_pages_hold_a_byte_a_number_and_a_scale_a_head() -> None:
    models = [model_of("llama", torch.float32, "torch", kv) for kv in (None, torch.int8)]
    plain, rounded = (layout_of(model.states(), 16) for model in models)
    kv_heads, size, layers = 2, 8, 3
    assert plain.token_bytes == layers * 2 * kv_heads * size * 4
    assert rounded.token_bytes == layers * 2 * kv_heads * (size + 4)
    assert rounded.paged[0].page_tokens == 16 and rounded.frame_bytes < plain.frame_bytes / 2
    paired = layout_of(model_of("llama", torch.float32, "torch", torch.uint8).states(), 16)
    assert paired.token_bytes == layers * 2 * kv_heads * (size // 2 + 2)


def test_rounding_is_within_half_a_step_and_poison_and_overflow_show() -> None:
    new = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-2, 3)[:, None, None]
    new[1] = 0
    new[2, 0, 3], new[3, 1, 0] = float("nan"), float("inf")
    pages, scales = torch.zeros(2, 4, 2, 8, dtype=torch.int8), torch.zeros(2, 4, 2)
    slots = torch.tensor([7, 0, 2, 3, 5])
    write_pages_int8.body(new, pages, scales, slots)
    got = (pages * scales.unsqueeze(-1)).flatten(0, 1)[slots]
    assert not bool(got[2, 0].isfinite().any()) and not bool(got[3, 1].isfinite().any())
    fine = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [2, 1], [3, 0], [4, 0], [4, 1]])
    wanted, found = new[fine[:, 0], fine[:, 1]], got[fine[:, 0], fine[:, 1]]
    assert bool(((wanted - found).abs() <= wanted.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)).all())


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
def test_kernels_read_and_write_every_type_of_pages() -> None:
    from bankfull.layers.build import Build
    from bankfull.models.registry import build_model
    from bankfull.ops import kit_for
    from bankfull.weights.source import open_model
    from tests.tiny import folder_of

    for kv, write in (
        (None, "write_pages"),
        (torch.bfloat16, "write_pages"),
        (torch.int8, "write_pages_int8"),
        (torch.float8_e4m3fn, "write_pages_fp8"),
        (torch.uint8, "write_pages_int4"),
    ):
        files, kit = open_model(folder_of("llama")), kit_for("cpu")
        build_model(files.config, Build(files.source, kit, torch.float32, torch.device("cpu"), kv_dtype=kv))
        assert set(kit.chosen["paged_attention"]) == set(kit.chosen[write]) == {"native"}
