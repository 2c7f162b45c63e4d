"""The benchmark of 2:4 sparse weights, as far as it runs without a GPU."""

from __future__ import annotations

import pytest
import torch

from bankfull.synthetic.random_weights import random_model
from bankfull.synthetic.shapes import shape_config
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.sparse_source import served
from benchmarks.gpu import sparse24
from benchmarks.gpu.__main__ import chosen
from benchmarks.gpu.sparse24 import PrunedWeights


def test_the_works_of_sparse_weights_get_at_most_two_numbers_in_four() -> None:
    config = {**shape_config("qwen3-8b-tiny"), "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    files = random_model("tiny", config, torch.bfloat16, weights=PrunedWeights)
    source = served(files, "cuda", torch.bfloat16, kernels=True, wanted="2:4").source
    inner = [name for name in source.names() if is_inner_matrix(source, name)]
    assert inner and all(source.scheme(name).is_sparse for name in inner)
    for name in inner:
        assert torch.equal(source.get(name).dequantize(), files.source.get(name).dequantize())
    assert {work.setup.quantize for work in chosen("prefill-8b-sparse24,requests-8b-sparse24").values()} == {"2:4"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run on the GPU")
def test_without_a_gpu_the_products_are_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert sparse24.main([]) == 2
    assert capsys.readouterr().err == "This benchmark needs a CUDA GPU, and this machine has none.\n"
