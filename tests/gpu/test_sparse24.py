"""2:4 sparse weights on the device: the library for many rows, captured products, and a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.config import RunConfig
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quantize.at_load import suited_sparsity
from bankfull.runtime import naive
from bankfull.weights.formats import SCHEMES
from tests.gpu.place import DEVICE, no_waiting, only_cuda, require_device

require_device()

from bankfull.ops.products.triton.sparse24 import library as sparse24_library  # noqa: E402
from bankfull.ops.products.triton.sparse24 import linear as sparse24  # noqa: E402
from bankfull.ops.products.triton.sparse24.layout import prepare  # noqa: E402
from tests.gpu.real import weight_of  # noqa: E402
from tests.models.oracle import TOKENS  # noqa: E402
from tests.weights.published.test_masked import twins  # noqa: E402

DTYPE = torch.bfloat16
OUTER, INNER = 4096, 4096


def require_library() -> None:
    if (reason := sparse24_library.missing(DEVICE, DTYPE)) is not None:
        pytest.skip(f"cuSPARSELt cannot be tested, because {reason}")


@only_cuda
def test_our_kernels_and_the_library_share_the_kept_numbers() -> None:
    require_library()
    made = prepare(weight_of(SCHEMES["bf16_2of4"], OUTER, INNER))
    assert made.packed is not None
    assert made.words is not None, "cuSPARSELt keeps numbers in another order: decoding is left to it"
    assert made.words.pairs.data_ptr() == made.packed.data_ptr()
    assert made.nbytes == OUTER * INNER * 2 * 10 // 16


@only_cuda
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 96, 512, 1000, 2048])
def test_a_captured_product_gives_the_bits_of_an_eager_one(rows: int) -> None:
    weight = prepare(weight_of(SCHEMES["bf16_2of4"], OUTER, INNER))
    x = torch.randn(rows, INNER, device=DEVICE, dtype=DTYPE)
    wanted = sparse24.run_linear(x, weight)
    torch.cuda.synchronize()
    with no_waiting():
        again = sparse24.run_linear(x, weight)
    assert torch.equal(again, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse24.run_linear(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(captured, sparse24.run_linear(x, weight))


@pytest.mark.parametrize("chunks", [(), (44, 1)])
def test_a_sparse_model_says_on_the_device_what_its_dense_twin_says(chunks: tuple[int, ...], tmp_path: Path) -> None:
    dense, sparse = twins(tmp_path, DTYPE)
    served = suited_sparsity(sparse, RunConfig(), "cuda", DTYPE)
    kit = kit_for("cuda")
    models = [
        build_model(files.config, Build(files.source, own, DTYPE, DEVICE))
        for files, own in ((dense, kit_for("cuda")), (served, kit))
    ]
    wanted, found = (naive.logits(model, TOKENS, DEVICE, chunks).float() for model in models)
    assert kit.chosen["linear"]["triton-24"]
    assert float((found - wanted).norm() / wanted.norm()) < 0.02
