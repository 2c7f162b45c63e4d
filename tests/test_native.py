"""The C++ kernels: equal to the reference, whatever the instruction set, the threads or the batch-mates."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

_native = pytest.importorskip("bankfull._native", reason="the native extension was not built")

import gguf  # noqa: E402

from bankfull.ops import Kit, embedding, linear, native, rms_norm  # noqa: E402
from bankfull.ops.native.linear import DTYPES, FORMATS, dequantize  # noqa: E402
from bankfull.weights.formats import SCHEMES, dense  # noqa: E402
from bankfull.weights.qtensor import QTensor  # noqa: E402

BLOCKS = sorted(name for name in FORMATS if not SCHEMES[name].is_dense)
ISAS: list[str] = _native.isas()

# Byte positions of the float16 scales in each block.
SCALES = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0],
    "q2_k": [80, 82], "q3_k": [108], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208],
}  # fmt: skip


@pytest.fixture
def any_isa() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.set_isa(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, any_isa: None) -> str:
    _native.set_isa(request.param)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = _native.threads()
    yield
    _native.set_threads(before)


def weight_of(name: str, outputs: int, inner: int, seed: int = 0, scale: float = 0.05) -> QTensor:
    """Every bit pattern of the quants is equally likely; scales are random, of both signs."""
    rng = np.random.default_rng(seed)
    scheme = SCHEMES[name]
    if scheme.is_dense:
        return QTensor.dense(torch.from_numpy(rng.normal(size=(outputs, inner))).to(dense.DTYPES[name]))
    blocks = rng.integers(0, 256, (outputs * inner // scheme.block, scheme.block_bytes), dtype=np.uint8)
    for at in SCALES[name]:
        scales = rng.normal(scale=scale, size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return QTensor(scheme, {"blocks": torch.from_numpy(blocks).reshape(outputs, -1)}, (outputs, inner))


def rows_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def native_linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    kit = Kit("cpu", ("native",))
    run = kit.bind(linear, dtype=x.dtype, weight=weight)
    assert kit.chosen["linear"] == {"native"}
    return run(x, weight, bias)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype == torch.float32
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_the_formats_agree_with_the_schemes() -> None:
    for name, (_, block, block_bytes) in FORMATS.items():
        scheme = SCHEMES[name]
        assert block_bytes * scheme.block == scheme.block_bytes * block
        assert scheme.is_dense or scheme.block == block
    assert set(FORMATS) == set(SCHEMES) - {"f64"}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_dequantized_weights_equal_the_reference_bit_for_bit(name: str, isa: str) -> None:
    weight = weight_of(name, 24, 512)
    assert_same_bits(dequantize(weight), weight.dequantize())


@pytest.mark.parametrize("name", BLOCKS)
def test_dequantized_weights_equal_the_gguf_package_bit_for_bit(name: str, isa: str) -> None:
    weight = weight_of(name, 24, 512, seed=3)
    kind = gguf.GGMLQuantizationType[name.upper()]
    expected = gguf.quants.dequantize(weight.parts["blocks"].numpy(), kind)
    assert_same_bits(dequantize(weight), torch.from_numpy(expected))


def test_every_half_precision_number_is_read_exactly(isa: str) -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16).reshape(256, 256)
    got, expected = dequantize(QTensor.dense(halves)), halves.float()
    finite = torch.isfinite(expected)
    assert_same_bits(got[finite], expected[finite])
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isposinf(), expected.isposinf())
    # As a block's scale too, where another instruction converts it: q4_0 with every quant 9, which stands for 1.
    blocks = torch.full((65536, 18), 0x99, dtype=torch.uint8)
    blocks[:, :2] = halves.reshape(-1, 1).view(torch.uint8)
    scales = dequantize(QTensor(SCHEMES["q4_0"], {"blocks": blocks}, (65536, 32)))[:, 7].reshape(256, 256)
    assert_same_bits(scales[finite], expected[finite])


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_linear_is_the_body_within_float32_rounding(name: str, rows: int, isa: str) -> None:
    weight, x, bias = weight_of(name, 37, 512), rows_of(rows, 512), rows_of(37, seed=2)
    exact = linear.body(x.double(), weight, bias.double())
    # The error of a float32 sum is bounded by the sum of the magnitudes, however much they cancel.
    magnitude = x.double().abs() @ weight.dequantize(torch.float64).abs().T + bias.double().abs()
    assert ((native_linear(x, weight, bias).double() - exact).abs() <= 40 * 2**-24 * magnitude).all()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_row_is_the_same_bits_alone_and_in_any_batch(name: str, isa: str) -> None:
    weight, x = weight_of(name, 21, 256), rows_of(23, 256)
    alone = torch.cat([native_linear(row, weight) for row in x.split(1)])
    for size in (2, 3, 4, 5, 7, 8, 23):
        assert_same_bits(torch.cat([native_linear(rows, weight) for rows in x.split(size)]), alone)


@pytest.mark.parametrize("rows", [1, 6])
def test_the_number_of_threads_never_shows_in_the_bits(rows: int, threads: None) -> None:
    weight, x = weight_of("q4_1", 1003, 576), rows_of(rows, 576)
    _native.set_threads(1)
    expected = native_linear(x, weight)
    for count in (2, 3, 5):
        _native.set_threads(count)
        assert _native.threads() == count
        for _ in range(50):
            assert_same_bits(native_linear(x, weight), expected)


@pytest.mark.skipif("avx512" not in ISAS, reason="this processor has no AVX-512")
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_avx2_and_avx512_agree_bit_for_bit(name: str, any_isa: None) -> None:
    weight, x = weight_of(name, 33, 768), rows_of(7, 768)
    results = {}
    for isa in ("avx2", "avx512"):
        _native.set_isa(isa)
        results[isa] = native_linear(x, weight), native_linear(x[:1], weight)
    for a, b in zip(results["avx2"], results["avx512"], strict=True):
        assert_same_bits(a, b)


@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    outputs=st.integers(1, 19),
    blocks=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    with_bias=st.booleans(),
)
def test_any_shape_stride_and_bias_is_accepted(
    leading: list[int], outputs: int, blocks: int, dtype: torch.dtype, strided: bool, with_bias: bool
) -> None:
    inner = 32 * blocks
    weight = weight_of("q5_1", outputs, inner)
    x = rows_of(*leading, inner * 2).to(dtype)[..., ::2] if strided else rows_of(*leading, inner).to(dtype)
    bias = rows_of(outputs * 3).to(dtype)[::3] if with_bias else None
    got = native_linear(x, weight, bias)
    expected = linear.body(x.float(), weight, None if bias is None else bias.float())
    assert got.shape == (*leading, outputs) and got.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


def test_what_the_kernels_cannot_do_is_left_to_the_body() -> None:
    kit = Kit("cpu", ("native",))
    weight = weight_of("q8_0", 8, 64)
    strided = QTensor.dense(torch.randn(8, 64)[:, ::2])
    ragged = QTensor.dense(torch.randn(8, 20))
    assert kit.bind(linear, dtype=torch.float64, weight=weight) is linear.body
    for unfit in (strided, ragged, None):
        assert kit.bind(linear, dtype=torch.float32, weight=unfit) is linear.body
    assert kit.bind(rms_norm, dtype=torch.float64) is rms_norm.body
    assert kit.bind(linear, dtype=torch.float32, weight=weight) is not linear.body


def test_an_input_of_the_wrong_width_or_type_is_refused() -> None:
    weight = weight_of("q8_0", 8, 64)
    run = linear.providers["native"].run
    with pytest.raises(ValueError, match="96 columns"):
        run(torch.zeros(2, 96), weight)
    with pytest.raises(ValueError, match="float64"):
        run(torch.zeros(2, 64, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match="meta"):
        run(torch.zeros(2, 64, device="meta"), weight)
    with pytest.raises(ValueError, match="bias"):
        run(torch.zeros(2, 64), weight, torch.zeros(7))


@pytest.mark.parametrize("columns", [1, 15, 16, 576, 577])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_the_body_within_float32_rounding(columns: int, offset: float, isa: str) -> None:
    x, weight = rows_of(2, 5, columns).transpose(0, 1), rows_of(columns, seed=2)
    run = Kit("cpu", ("native",)).bind(rms_norm, dtype=torch.float32)
    assert run is not rms_norm.body
    expected = rms_norm.body(x, weight, 1e-5, offset)
    torch.testing.assert_close(run(x, weight, 1e-5, offset), expected, rtol=2e-6, atol=1e-6)
    assert run(x[:0], weight, 1e-5, offset).shape == (0, 2, columns)


def test_rms_norm_of_a_row_does_not_depend_on_its_batch() -> None:
    run = rms_norm.providers["native"].run
    x, weight = rows_of(200, 576), rows_of(576, seed=2)
    assert_same_bits(run(x, weight, 1e-5), torch.cat([run(row, weight, 1e-5) for row in x.split(1)]))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_embedding_gives_the_rows_of_the_table(name: str) -> None:
    table, ids = weight_of(name, 50, 256), torch.tensor([49, 0, 7, 7])
    run = Kit("cpu", ("native",)).bind(embedding, dtype=torch.float32, weight=table)
    assert run is not embedding.body
    assert_same_bits(run(ids, table, torch.float32), table.dequantize()[ids])
    assert run(ids[:0], table, torch.bfloat16).shape == (0, 256)


def test_callers_on_several_threads_do_not_disturb_each_other(threads: None) -> None:
    _native.set_threads(2)
    weight = weight_of("q4_k", 400, 512)
    inputs = [rows_of(1 + i, 512, seed=i) for i in range(4)]
    expected = [native_linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(30):
            if not torch.equal(native_linear(inputs[i], weight), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_computes() -> None:
    # In a process of its own, because forking the test runner with its threads is what this guards against.
    code = (
        "import os, torch\n"
        "from bankfull import _native\n"
        "from bankfull.ops.native.linear import run_linear\n"
        "from bankfull.weights.qtensor import QTensor\n"
        "_native.set_threads(3)\n"
        "w, x = QTensor.dense(torch.randn(999, 256)), torch.randn(2, 256)\n"
        "y = run_linear(x, w)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.equal(run_linear(x, w), y) and _native.threads() >= 1 else 3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr


def run_with_isa(name: str) -> subprocess.CompletedProcess[str]:
    code = "from bankfull.ops import native; native.notify(); print(native.select_isa())"
    environment = {**os.environ, "BANKFULL_ISA": name}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ISAS)
def test_the_environment_forces_an_instruction_set(name: str) -> None:
    assert run_with_isa(name).stdout.strip() == name


def test_an_unknown_instruction_set_is_an_error_sentence() -> None:
    done = run_with_isa("mmx")
    assert done.returncode != 0
    assert "ConfigError: BANKFULL_ISA='mmx' is not available on this machine; use " in done.stderr


def test_thread_counts_out_of_range_are_refused() -> None:
    for count in (0, -1, 4096):
        with pytest.raises(ValueError, match="1 to 1024"):
            native.set_threads(count)
        with pytest.raises(ValueError, match="1 to 1024"):
            _native.set_threads(count)
