"""The benchmark of decode attention: what it times is attention over whole contexts of every type of pages."""

from __future__ import annotations

import json

import pytest
import torch

from bankfull.layers.attention import Heads
from bankfull.ops import native, paged_attention
from benchmarks import cpu_attention
from benchmarks.cpu_attention import KINDS, meta_of, pages_of

pytestmark = pytest.mark.skipif(native.status() is not None, reason="the native kernels are not built")


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_pages_has_finite_numbers_and_the_bytes_it_counts(kind: str) -> None:
    heads = Heads(4, 2, 64, 0.125)
    pages = pages_of(kind, heads, sequences=3, context=40, layers=2)
    assert len(pages.layers) == 2
    q, meta = torch.randn(3, 4, 64), meta_of(3, 40)
    ((state,), _) = pages.layers
    scales = state.get("k_scale"), state.get("v_scale")
    made = paged_attention.body(q, state["k"], state["v"], meta, heads.scale, None, None, *scales)
    assert bool(made.isfinite().all()) and float(made.std()) > 0
    bits = {"bf16": 16, "int8": 8, "fp8": 8, "int4": 4}[kind]
    assert 1 <= pages.nbytes / (3 * 40 * 2 * 2 * 64 * bits / 8) < 1.2, "codes, and scales beside them"


def test_types_are_compared_with_the_first_one(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--heads", "4/2", "--sizes", "64", "--contexts", "32,48", "--sequences", "2", "--megabytes", "1"]
    cpu_attention.main([*small, "--rounds", "2", "--pages", "int8,int4", "--json"])
    records = json.loads(capsys.readouterr().out)["records"]
    assert [record["context"] for record in records] == [32, 48] and records[0]["sequences"] == 2
    for record in records:
        assert set(record["pages"]) == {"int8", "int4"} and record["pages"]["int8"]["speedup"] == 1.0
    cpu_attention.main([*small, "--rounds", "2"])
    assert "bf16: GB/s, x bf16" in capsys.readouterr().out
