"""The C++ kernels: equal to the reference for any instruction set, number of threads and batch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

_native = pytest.importorskip("bankfull._native", reason="the native extension was not built")

import gguf  # noqa: E402

from bankfull.ops import (  # noqa: E402
    Epilogue,
    Kit,
    Operation,
    PagedMeta,
    RecurrentMeta,
    activate,
    activate_mul,
    causal_conv,
    embedding,
    layer_norm,
    linear,
    native,
    paged_attention,
    rms_norm,
    rotate,
    selective_scan,
    soft_cap,
    write_pages,
    write_pages_int8,
)
from bankfull.ops.products.native.linear import DTYPES, FORMATS, dequantize  # noqa: E402
from bankfull.weights.formats import SCHEMES, dense, kquants, legacy  # noqa: E402
from bankfull.weights.qtensor import QTensor  # noqa: E402

BLOCKS = sorted(name for name in FORMATS if not SCHEMES[name].is_dense)
ISAS: list[str] = _native.isas()

# Byte offsets of the float16 scales in each block.
SCALES = {
    "q4_0": [0],
    "q4_1": [0, 2],
    "q5_0": [0],
    "q5_1": [0, 2],
    "q8_0": [0],
    "q2_k": [80, 82],
    "q3_k": [108],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
}


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
    """Every bit pattern of the codes is equally likely; scales are random, of both signs."""
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
    assert set(kit.chosen["linear"]) == {"native"}
    return run(x, weight, Epilogue(bias))


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype == torch.float32
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_the_formats_agree_with_the_schemes() -> None:
    for name, (_, block, block_bytes) in FORMATS.items():
        scheme = SCHEMES[name]
        assert block_bytes * scheme.block == scheme.block_bytes * block
        assert scheme.is_dense or scheme.block == block
    blocks = {scheme.name for scheme in (*legacy.SCHEMES, *kquants.SCHEMES)}
    assert set(FORMATS) == set(dense.DTYPES) - {"f64"} | blocks


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
    # Also as a block's scale, which another instruction converts: q4_0 with every code 9, which represents 1.
    blocks = torch.full((65536, 18), 0x99, dtype=torch.uint8)
    blocks[:, :2] = halves.reshape(-1, 1).view(torch.uint8)
    scales = dequantize(QTensor(SCHEMES["q4_0"], {"blocks": blocks}, (65536, 32)))[:, 7].reshape(256, 256)
    assert_same_bits(scales[finite], expected[finite])


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_linear_is_the_body_within_float32_rounding(name: str, rows: int, isa: str) -> None:
    weight, x, bias = weight_of(name, 37, 512), rows_of(rows, 512), rows_of(37, seed=2)
    exact = linear.body(x.double(), weight, Epilogue(bias.double()))
    # The error of a float32 sum is bounded by the sum of the magnitudes, regardless of cancellation.
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
    expected = linear.body(x.float(), weight, Epilogue(None if bias is None else bias.float()))
    assert got.shape == (*leading, outputs) and got.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


def test_unsupported_cases_are_left_to_the_body() -> None:
    def chosen(operation: Operation, **facts: object) -> list[str]:
        kit = Kit("cpu", ("native",))
        kit.bind(operation, **facts)
        return list(kit.chosen[operation.name])

    weight = weight_of("q8_0", 8, 64)
    strided = QTensor.dense(torch.randn(8, 64)[:, ::2])
    ragged = QTensor.dense(torch.randn(8, 20))
    assert chosen(linear, dtype=torch.float64, weight=weight) == ["torch"]
    for unfit in (strided, ragged, None):
        assert chosen(linear, dtype=torch.float32, weight=unfit) == ["torch"]
    assert chosen(rms_norm, dtype=torch.float64) == ["torch"]
    assert chosen(linear, dtype=torch.float32, weight=weight) == ["native"]


def test_an_input_of_the_wrong_width_or_type_is_rejected() -> None:
    weight = weight_of("q8_0", 8, 64)
    run = linear.providers["native"].run
    with pytest.raises(ValueError, match="96 columns"):
        run(torch.zeros(2, 96), weight)
    with pytest.raises(ValueError, match="float64"):
        run(torch.zeros(2, 64, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match="meta"):
        run(torch.zeros(2, 64, device="meta"), weight)
    with pytest.raises(ValueError, match="bias"):
        run(torch.zeros(2, 64), weight, Epilogue(torch.zeros(7)))


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
    # In its own process, because forking the test runner with its threads is what this guards against.
    code = (
        "import os, torch\n"
        "from bankfull import _native\n"
        "from bankfull.ops.products.native.linear import run_linear\n"
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
def test_the_environment_forces_an_instruction_set(name: str, any_isa: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_ISA", name)
    assert native.select_isa.__wrapped__() == name == _native.isa()


def test_a_new_process_asks_its_environment_for_the_instruction_set() -> None:
    other = next(name for name in (*ISAS, _native.isa()) if name != _native.isa() or len(ISAS) == 1)
    assert run_with_isa(other).stdout.strip() == other


def test_an_unknown_instruction_set_is_an_error_sentence() -> None:
    done = run_with_isa("mmx")
    assert done.returncode != 0
    assert "ConfigError: BANKFULL_ISA='mmx' is not available on this machine; use " in done.stderr


def test_thread_counts_out_of_range_are_rejected() -> None:
    for count in (0, -1, 4096):
        with pytest.raises(ValueError, match="1 to 1024"):
            native.set_threads(count)
        with pytest.raises(ValueError, match="1 to 1024"):
            _native.set_threads(count)


# ---- attention, recurrences and pointwise operations -----------------------------------------------------------------


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@dataclass(slots=True)
class Sequence:
    """Queries, keys and values of one sequence, whose pages are shuffled frames of a strided buffer."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    page: int
    scales: tuple[Tensor, ...] = ()
    """Scales of int8 keys and values."""
    sinks: Tensor | None = None

    def attend(self, start: int, stop: int, window: int | None = None, cap: float | None = None) -> Tensor:
        """The queries [start, stop), without later tokens."""
        places = torch.arange(start, stop)
        meta = PagedMeta(np.array([0, stop - start]), np.array([stop]), self.table, places, self.page)
        run, scale = paged_attention.providers["native"].run, self.q.shape[-1] ** -0.5
        scales = self.scales or (None, None)
        return run(self.q[start:stop], self.k_pages, self.v_pages, meta, scale, window, cap, *scales, self.sinks)

    def rounded(self) -> Sequence:
        """The same with int8 pages."""
        places = torch.arange(self.k_pages.shape[0] * self.page)
        pages, scales = [], []
        for numbers in (self.k_pages, self.v_pages):
            pages.append(torch.empty(numbers.shape, dtype=torch.int8))
            scales.append(torch.empty(*numbers.shape[:2], 2 * numbers.shape[2])[..., ::2])
            write_pages_int8.body(numbers.flatten(0, 1), pages[-1], scales[-1], places)
        return replace(self, k_pages=pages[0], v_pages=pages[1], scales=tuple(scales))


def sequence_of(
    length: int,
    heads: int = 6,
    kv: int = 2,
    size: int = 24,
    values: int = 20,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Sequence:
    random = torch.Generator().manual_seed(seed)
    used = -(-length // page)
    frames = torch.randn(used + 2, 2, page, kv * (size + values), generator=random).to(dtype)
    k_pages = frames[:, 1, :, : kv * size].unflatten(-1, (kv, size))
    v_pages = frames[:, 1, :, kv * size :].unflatten(-1, (kv, values))
    table = (torch.randperm(used, generator=random) + 1)[None]
    return Sequence(torch.randn(length, heads, size, generator=random), k_pages, v_pages, table, page)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (45, None), (200, 30.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_attention_of_a_query_is_the_same_bits_alone_in_chunks_and_in_one_pass(
    window: int | None, cap: float | None, dtype: torch.dtype, isa: str
) -> None:
    sequence = sequence_of(300).rounded() if dtype is torch.int8 else sequence_of(300, dtype=dtype)
    whole = sequence.attend(0, 300, window, cap)
    for size in (1, 7, 64, 131):
        cut = [sequence.attend(at, min(at + size, 300), window, cap) for at in range(0, 300, size)]
        assert same_bits(torch.cat(cut), whole), size


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (4, 4), (40, 1)])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 17), (64, 64), (100, 80)])
def test_attention_of_any_head_shape_is_the_body_and_keeps_its_bits(
    heads: tuple[int, int], sizes: tuple[int, int], isa: str
) -> None:
    sequence = sequence_of(140, *heads, *sizes, page=5)
    whole = sequence.attend(0, 140)
    assert same_bits(torch.cat([sequence.attend(i, i + 1) for i in range(140)]), whole)
    meta = PagedMeta(np.array([0, 140]), np.array([140]), sequence.table, torch.arange(140), 5)
    wide = (t.double() for t in (sequence.q, sequence.k_pages, sequence.v_pages))
    expected = paged_attention.body(*wide, meta, sizes[0] ** -0.5)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (40, 1)])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 17), (48, 80)])
def test_attention_over_int8_pages_is_the_body_and_keeps_its_bits(
    heads: tuple[int, int], sizes: tuple[int, int], isa: str
) -> None:
    """For head sizes without tiles."""
    sequence = sequence_of(140, *heads, *sizes, page=5).rounded()
    whole = sequence.attend(0, 140)
    assert same_bits(torch.cat([sequence.attend(i, i + 1) for i in range(140)]), whole)
    meta = PagedMeta(np.array([0, 140]), np.array([140]), sequence.table, torch.arange(140), 5)
    pages, scale = (sequence.k_pages, sequence.v_pages), sizes[0] ** -0.5
    expected = paged_attention.body(sequence.q.double(), *pages, meta, scale, None, None, *sequence.scales)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_sink_takes_its_share_of_every_row_and_keeps_its_bits(dtype: torch.dtype, isa: str) -> None:
    sequence = sequence_of(300, size=32, values=32)
    sequence = (
        sequence.rounded()
        if dtype is torch.int8
        else replace(sequence, k_pages=sequence.k_pages.to(dtype), v_pages=sequence.v_pages.to(dtype))
    )
    plain = sequence.attend(0, 300)
    sequence.sinks = torch.tensor([0.5, -3.0, 4.0, 0.0, -1e9, 1e9])
    whole = sequence.attend(0, 300)
    for size in (1, 64):
        cut = [sequence.attend(at, min(at + size, 300)) for at in range(0, 300, size)]
        assert same_bits(torch.cat(cut), whole), size
    meta = PagedMeta(np.array([0, 300]), np.array([300]), sequence.table, torch.arange(300), sequence.page)
    held = (sequence.k_pages, sequence.v_pages, meta, 32**-0.5, None, None, *(sequence.scales or (None, None)))
    expected = paged_attention.body(sequence.q.double(), *held, sequence.sinks)
    bound = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(whole.double(), expected, rtol=bound, atol=bound)
    assert same_bits(whole[:, 4], plain[:, 4]) and not whole[:, 5].any(), "an extreme sink takes nothing, or everything"


def test_attention_does_not_depend_on_threads_nor_on_batch_mates(threads: None) -> None:
    """A long decode is split over threads, and differently beside a prefill: neither affects the bits."""
    lengths, queries = [3000, 200, 1, 777], [1, 200, 1, 3]
    sequences = [sequence_of(n, 9, 3, 64, 64, seed=i) for i, n in enumerate(lengths)]
    _native.set_threads(1)
    alone = [s.attend(n - q, n) for s, n, q in zip(sequences, lengths, queries, strict=True)]
    k_pages, v_pages = (torch.cat([getattr(s, name) for s in sequences]) for name in ("k_pages", "v_pages"))
    first, table = 0, torch.zeros(4, -(-3000 // 16), dtype=torch.long)
    for i, s in enumerate(sequences):
        table[i, : s.table.shape[1]] = s.table[0] + first
        first += len(s.k_pages)
    meta = PagedMeta(np.cumsum([0, *queries]), np.array(lengths), table, torch.zeros(205, dtype=torch.long), 16)
    q = torch.cat([s.q[n - c : n] for s, n, c in zip(sequences, lengths, queries, strict=True)])
    for count in (1, 2, 3):
        _native.set_threads(count)
        assert all(
            same_bits(s.attend(n - c, n), one) for s, n, c, one in zip(sequences, lengths, queries, alone, strict=True)
        )
        together = paged_attention.providers["native"].run(q, k_pages, v_pages, meta, 64**-0.5)
        assert same_bits(together, torch.cat(alone))


@pytest.mark.skipif("avx512" not in ISAS, reason="this processor has no AVX-512")
def test_avx2_and_avx512_attend_bit_for_bit_alike(any_isa: None) -> None:
    sequence, results = sequence_of(300), []
    for name in ("avx2", "avx512"):
        _native.set_isa(name)
        results.append(sequence.attend(0, 300, 100, 20.0))
    assert same_bits(*results)


def test_masked_keys_do_not_affect_a_query(isa: str) -> None:
    """Pages before the window and tokens after the query hold NaN, also within the same page and tile."""
    sequence = sequence_of(200)
    expected = sequence.attend(180, 190, 30)
    for at in [*range(151), *range(190, 200)]:
        frame, offset = int(sequence.table[0, at // 16]), at % 16
        sequence.k_pages[frame, offset] = sequence.v_pages[frame, offset] = float("nan")
    assert same_bits(sequence.attend(180, 190, 30), expected)
    frame = int(sequence.table[0, 185 // 16])
    sequence.v_pages[frame, 185 % 16] = float("nan")  # the sixth query's own value
    spoilt = sequence.attend(180, 190, 30)
    assert same_bits(spoilt[:5], expected[:5]) and spoilt[5:].isnan().all()


def test_attention_rejects_invalid_page_tables_and_shapes() -> None:
    sequence = sequence_of(40)
    sequence.table[0, 1] = 99
    with pytest.raises(ValueError, match="out of range"):
        sequence.attend(39, 40)
    sequence.attend(39, 40, 3)  # entries before the window may be invalid
    with pytest.raises(ValueError, match="longer than its pages"):
        replace(sequence, table=sequence.table[:, :2]).attend(39, 40)
    with pytest.raises(ValueError, match="contiguous"):
        replace(sequence, k_pages=sequence.k_pages.repeat_interleave(2, -1)[..., ::2]).attend(0, 4)
    with pytest.raises(ValueError, match="float16"):
        replace(sequence, k_pages=sequence.k_pages.half()).attend(0, 4)
    rounded = sequence_of(40).rounded()
    with pytest.raises(ValueError, match="no scales"):
        replace(rounded, scales=()).attend(0, 4)
    with pytest.raises(ValueError, match="passed scales"):
        replace(sequence, scales=rounded.scales).attend(0, 4)
    with pytest.raises(ValueError, match="a float32 per token and head"):
        replace(rounded, scales=(rounded.scales[0], rounded.scales[1][..., :1])).attend(0, 4)
    with pytest.raises(ValueError, match="one sink each"):
        replace(rounded, sinks=torch.zeros(5)).attend(0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_write_pages_copies_bytes_and_rejects_invalid_slots(dtype: torch.dtype, threads: None) -> None:
    run = write_pages.providers["native"].run
    frames = torch.zeros(9, 2, 16, 12, dtype=dtype)
    pages = frames[:, 1].unflatten(-1, (3, 4))
    new, slots = torch.randn(100, 3, 4).to(dtype), torch.randperm(9 * 16)[:100]
    expected = pages.clone()
    write_pages.body(new, expected, slots)
    run(new, pages, slots)
    assert torch.equal(pages, expected) and not frames[:, 0].any()
    for wrong in (-1, 9 * 16):
        with pytest.raises(ValueError, match="out of range"):
            run(new[:2], pages, torch.tensor([0, wrong]))
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("size", [1, 15, 16, 64, 100])
def test_int8_pages_are_written_as_the_body_does_bit_for_bit(size: int, isa: str) -> None:
    """Every magnitude, including subnormals; zeros, and values that are not finite."""
    random = torch.Generator().manual_seed(size)
    new = torch.randn(100, 3, size, generator=random) * 10.0 ** torch.randint(-44, 37, (100, 3, 1), generator=random)
    new[:20] = torch.randint(-254, 255, (20, 3, size), generator=random) / 2  # ties
    new[:20, :, 0] = 127.0
    new[20], new[21, 1], new[22], new[23, :, -1] = 0.0, 1e-45, -3e-45, float("nan")
    new[24, 0, 0], new[25, 1, -1], new[26, 2] = float("inf"), -float("inf"), float("-inf")
    new[27, 0, 0], new[27, 0, -1] = float("inf"), float("nan")
    slots = torch.randperm(9 * 16, generator=random)[:100]
    found, expected = (
        (torch.full((9, 16, 3, size + 2), 7, dtype=torch.int8)[..., 1:-1], torch.ones(9, 2, 16, 3)[:, 1])
        for _ in range(2)
    )
    write_pages_int8.body(new, *expected, slots)
    run = write_pages_int8.providers["native"].run
    run(new, *found, slots)
    assert torch.equal(found[0], expected[0])
    finite = expected[1].isfinite()
    assert torch.equal(found[1].isnan(), expected[1].isnan()) and torch.equal(found[1].isfinite(), finite)
    assert same_bits(found[1][finite], expected[1][finite])
    for wrong in (-1, 9 * 16):
        with pytest.raises(ValueError, match="out of range"):
            run(new[:2], *found, torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="does not match"):
        run(new[:, :2], *found, slots)


def test_rotate_is_the_body_bit_for_bit(isa: str) -> None:
    for half, size in ((32, 64), (5, 10), (8, 23), (40, 80)):
        x, cos, sin = rows_of(7, 3, size), rows_of(7, half, seed=2), rows_of(7, half, seed=3)
        assert same_bits(rotate.providers["native"].run(x, cos, sin), rotate.body(x, cos, sin))


def ulps(got: Tensor, exact: Tensor) -> float:
    """The largest error in ulps of the exact result."""
    unit = 2.0 ** (exact.abs().clamp_min(2.0**-126).log2().floor() - 23)
    return float(((got.double() - exact) / unit).abs().max())


@pytest.mark.parametrize("kind", ["silu", "softplus", "relu"])
def test_activations_are_exact_to_a_few_units_in_the_last_place(kind: str, isa: str) -> None:
    x = torch.cat((torch.linspace(-8, 8, 40001), torch.linspace(-1e-3, 1e-3, 1001)))
    wide = x.double()
    exact = wide.exp().log1p() if kind == "softplus" else activate.body(wide, kind)
    assert ulps(activate.providers["native"].run(x, kind), exact) <= 4


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gelu_is_exact_to_a_few_units_of_its_input(kind: str, isa: str) -> None:
    x = torch.linspace(-8, 8, 40001)
    exact = activate.body(x.double(), kind)
    error = (activate.providers["native"].run(x, kind).double() - exact).abs()
    assert (error <= 4 * 2.0**-24 * x.double().abs()).all()


def test_the_scan_s_exponential_is_exact_to_two_units_over_its_whole_range(isa: str) -> None:
    """With h = 1, b = 0, c = 1, d = 0 the scan is exp(delta a)."""
    delta = torch.linspace(-87, 88.7, 4000)
    one, zero = torch.ones(1, 4000), torch.zeros(1, 1)
    meta = RecurrentMeta(np.array([0, 1]), np.array([0]), torch.tensor([0]), torch.zeros(1, 0, dtype=torch.long))
    scan = selective_scan.providers["native"].run
    state = torch.ones(1, 4000, 1)
    got = scan(one, delta[None], torch.ones(4000, 1), zero, zero + 1, torch.zeros(4000), state, meta)[0]
    assert ulps(got, delta.double().exp()) <= 2.0
    for value, expected in ((-200.0, 0.0), (200.0, math.inf), (-math.inf, 0.0), (math.nan, math.nan), (0.0, 1.0)):
        found = scan(
            one[:, :1], one[:, :1], torch.tensor([[value]]), zero, zero + 1, torch.zeros(1), state[:, :1].clone(), meta
        )
        torch.testing.assert_close(found, torch.tensor([[expected]]), equal_nan=True, rtol=0, atol=0)


def test_soft_cap_is_exact_to_a_few_units_and_odd(isa: str) -> None:
    x = torch.linspace(-300, 300, 60001)
    run = soft_cap.providers["native"].run
    assert ulps(run(x, 30.0), soft_cap.body(x.double(), 30.0)) <= 4
    assert same_bits(run(-x, 30.0), -run(x, 30.0))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "softplus", "sigmoid"])
def test_activations_pass_extremes_on_and_keep_their_bits_wherever_an_element_lies(kind: str, isa: str) -> None:
    x = torch.tensor([-math.inf, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, math.inf, math.nan])
    run, gated = activate.providers["native"].run, activate_mul.providers["native"].run
    # In float64: on some CPUs torch's float32 GELU of infinity is not a number.
    torch.testing.assert_close(run(x, kind), activate.body(x.double(), kind).float(), equal_nan=True)
    y = rows_of(9001)
    whole = run(y, kind)
    assert same_bits(torch.cat([run(part, kind) for part in y.split(7)]), whole)
    torch.testing.assert_close(gated(y, y.flip(0), kind), whole * y.flip(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 15, 16, 577])
def test_layer_norm_is_the_body_within_float32_rounding(columns: int, isa: str) -> None:
    x, weight, bias = 50 + rows_of(70, columns), rows_of(columns, seed=2), rows_of(columns, seed=3)
    run = layer_norm.providers["native"].run
    exact = layer_norm.body(x.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(run(x, weight, bias, 1e-5).double(), exact, rtol=1e-4, atol=2e-5)
    assert same_bits(torch.cat([run(row, weight, bias, 1e-5) for row in x.split(1)]), run(x, weight, bias, 1e-5))


def stepped(run: Callable[..., Tensor], inputs: list[Tensor], state: Tensor, cuts: list[int]) -> Tensor:
    """Runs tokens in pieces that end at `cuts`; the state moves from slot to slot."""
    out, slot, begin = [], 0, 0
    for end in cuts:
        meta = RecurrentMeta(
            np.array([0, end - begin]), np.array([1]), torch.tensor([slot]), torch.tensor([[slot + 1]])
        )
        out.append(run([x[begin:end] for x in inputs], state, meta))
        slot, begin = slot + 1, end
    return torch.cat([*out, state[slot].reshape(-1, out[0].shape[1])])


@pytest.mark.parametrize("channels", [5, 16, 700])
def test_recurrences_are_the_same_bits_in_one_pass_in_chunks_and_token_by_token(
    channels: int, isa: str, threads: None
) -> None:
    tokens, size, width = 24, 16 if channels == 16 else 5, 4
    x, delta = rows_of(tokens, channels), rows_of(tokens, channels, seed=2).exp()
    b, c = rows_of(tokens, 2 * size + 3, seed=3)[:, 3:].split(size, 1)
    a, d = -rows_of(channels, size, seed=4).exp(), rows_of(channels, seed=5)
    weight, bias = rows_of(channels, width, seed=6), rows_of(channels, seed=7)

    def scan(parts: list[Tensor], state: Tensor, meta: RecurrentMeta) -> Tensor:
        return selective_scan.providers["native"].run(parts[0], parts[1], a, parts[2], parts[3], d, state, meta)

    def conv(parts: list[Tensor], state: Tensor, meta: RecurrentMeta) -> Tensor:
        return causal_conv.providers["native"].run(parts[0], weight, bias, state, meta)

    for run, inputs, shape in ((scan, [x, delta, b, c], (channels, size)), (conv, [x], (channels, width - 1))):
        results = []
        for cuts in ([tokens], [7, 9, tokens], list(range(1, tokens + 1))):
            for count in (1, 2, 3):
                _native.set_threads(count)
                results.append(stepped(run, inputs, torch.zeros(tokens + 1, *shape), cuts))
        assert all(same_bits(one, results[0]) for one in results)


def test_recurrences_reject_invalid_slots() -> None:
    x, state, run = rows_of(1, 4), torch.zeros(3, 4, 1), causal_conv.providers["native"].run
    for read, write in ((3, 1), (-1, 1), (0, 3)):
        meta = RecurrentMeta(np.array([0, 1]), np.array([1]), torch.tensor([read]), torch.tensor([[write]]))
        with pytest.raises(ValueError, match="out of range"):
            run(x, rows_of(4, 2), None, state, meta)
    meta = RecurrentMeta(np.array([0, 1]), np.array([2]), torch.tensor([0]), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="more states"):
        run(x, rows_of(4, 2), None, state, meta)


@pytest.mark.parametrize("columns", (1, 15, 16, 100, 576))
def test_fused_residual_add_and_norm_are_bitwise_equal(columns: int, isa: str) -> None:
    from bankfull.ops.norm.native import run_add_rms_norm, run_rms_norm

    generator = torch.Generator().manual_seed(columns)
    x, delta = (torch.randn(7, columns, generator=generator) for _ in range(2))
    weight = torch.randn(columns, generator=generator)
    joined, normed = run_add_rms_norm(x, delta, weight, 1e-5, 1.0)
    assert torch.equal(joined, x + delta)
    assert torch.equal(normed, run_rms_norm(x + delta, weight, 1e-5, 1.0))
    alone = [run_add_rms_norm(x[i : i + 1], delta[i : i + 1], weight, 1e-5, 1.0)[1] for i in range(7)]
    assert torch.equal(normed, torch.cat(alone))
