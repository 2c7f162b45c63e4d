"""Dense linear layers on a GPU: every plan computes the same."""

from __future__ import annotations

import pytest
import torch

from bankfull.ops import Unnormed, activate_mul
from bankfull.ops.products.triton import linear
from tests.ops.compare import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("plan", [linear.ROWS, linear.LIBRARY, *linear.TILES], ids=lambda plan: plan.name)
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(1, 5, 48), (4, 130, 300), (3, 64, 256), (13, 9, 70), (37, 70, 129)]
)
def test_each_plan_computes_the_product(plan: linear.Plan, rows: int, outputs: int, columns: int) -> None:
    numbers = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns + 2, generator=numbers)[:, 1:-1]
    weight, bias = torch.randn(outputs, columns, generator=numbers), torch.randn(outputs, generator=numbers)
    given = [tensor.to(DEVICE) for tensor in (x, weight, bias)]
    if plan is linear.ROWS and rows > linear.FEW_ROWS:
        with pytest.raises(ValueError, match=f"rows cannot multiply {rows} rows"):
            linear.run_plan(plan, *given)
        return
    assert_close(linear.run_plan(plan, *given), torch.nn.functional.linear(x, weight, bias), torch.float32)
    without = linear.run_plan(plan, *given[:2], None)
    assert_close(without, torch.nn.functional.linear(x, weight), torch.float32)


@pytest.mark.parametrize("rows", [1, 16, 17, 32])
@pytest.mark.parametrize("plan", linear.SPLIT, ids=lambda plan: plan.name)
def test_split_k_programs_reset_their_counters(plan: linear.Plan, rows: int) -> None:
    numbers = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 514, generator=numbers).half()[:, 1:-1].to(DEVICE)
    weight, bias = (torch.randn(shape, generator=numbers).half().to(DEVICE) for shape in ((128, 512), (128,)))
    for shift in (bias, None):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
        found = linear.run_plan(plan, x, weight, shift)
        assert found.shape == expected.shape and (found.double() - expected).norm() < 1e-3 * expected.norm()
        assert torch.equal(linear.run_plan(plan, x, weight, shift), found)
    assert plan.splits == 1 or any(sums.partial.any() for sums in linear._sums.values())
    assert not any(sums.arrivals.any() for sums in linear._sums.values())


@pytest.mark.parametrize("plan", linear.SPLIT, ids=lambda plan: plan.name)
def test_tiles_that_do_not_divide_the_matrix_are_rejected(plan: linear.Plan) -> None:
    def runs(rows: int = 32, outer: int = 128, inner: int = 512, dtype: torch.dtype = torch.float16) -> bool:
        return linear.can_run(plan, rows, outer, inner, dtype, torch.device("meta"))

    assert runs()
    assert not any((runs(rows=33), runs(outer=96), runs(inner=512 + 64), runs(dtype=torch.float32)))
    with pytest.raises(ValueError, match="split"):
        linear.run_plan(plan, torch.zeros(33, 512).half(), torch.zeros(128, 512).half(), None)


def test_large_layers_of_some_rows_use_our_tiles_if_measured_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(rows: int, outer: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> linear.Plan:
        return linear.heuristic(rows, outer, inner, dtype, torch.device("meta"))

    shapes = ((6144, 4096, linear.WHOLE), (4096, 14336, linear.HALVED), (128256, 4096, linear.MANY_TILES))
    for outer, inner, tiles in shapes:
        assert plan(17, outer, inner) is plan(32, outer, inner) is tiles
        assert plan(4, outer, inner) is linear.ROWS
        assert {plan(5, outer, inner), plan(16, outer, inner), plan(33, outer, inner)} == {linear.LIBRARY}
        assert plan(32, outer, inner, torch.float32) is linear.LIBRARY
    assert plan(32, 4096, 2048) is plan(32, 3072, 8192) is linear.LIBRARY, "too small"
    assert plan(32, 10240, 8192) is plan(32, 8192, 28672) is linear.LIBRARY, "more tiles than multiprocessors"
    assert plan(32, 6144 + 32, 4096) is plan(32, 6144, 4096 + 64) is linear.LIBRARY, "tiles end elsewhere"
    monkeypatch.setattr(linear, "shared_memory", lambda device: 99 << 10)
    assert plan(32, 6144, 4096) is linear.LIBRARY, "no room"


def test_short_rows_use_small_programs_if_measured_faster() -> None:
    """0.6B and 135M; the layers of larger models, and float32, are unchanged."""
    Shape = linear.Shape

    def shape(outputs: int, columns: int, gated: bool = False, wide: bool = False, rows: int = 1) -> linear.Shape:
        return linear.rows_shape(rows, outputs, columns, gated, wide)

    assert shape(3072, 1024, True) == shape(1536, 576, True) == shape(1536, 576, True, rows=4) == Shape(4, 2)
    assert shape(4096, 1024) == Shape(8, 1) and shape(4096, 1024, rows=2) == Shape(8, 4)
    assert shape(960, 576) == shape(49152, 576) == Shape(8, 4)
    assert shape(1024, 3072) == shape(1024, 3072, rows=4) == Shape(8, 8)
    assert shape(4096, 4096) == shape(3072, 3072) == Shape(2, 4)
    assert shape(4096, 1024, wide=True) == Shape(4, 4)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_pipeline_stages_fit_shared_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for memory in (227 << 10, 99 << 10, 48 << 10):
        monkeypatch.setattr(linear, "shared_memory", lambda device, memory=memory: memory)
        for plan in linear.TILES:
            stages = linear.stages_of(plan, dtype, torch.device("cpu"))
            stage = (plan.rows + plan.out) * plan.depth * dtype.itemsize
            assert stages * stage <= memory and (stages == plan.stages or (stages + 1) * stage > memory)
            if memory == 227 << 10:
                assert stages > 1
            if not stages:
                x = torch.zeros(2, 256, dtype=dtype)
                with pytest.raises(ValueError, match=plan.name):
                    linear.run_plan(plan, x, x, None)


def test_a_row_is_the_same_alone_and_among_few() -> None:
    numbers = torch.Generator().manual_seed(3)
    x, weight = torch.randn(4, 100, generator=numbers).to(DEVICE), torch.randn(33, 100, generator=numbers).to(DEVICE)
    together = linear.run_plan(linear.ROWS, x, weight, None)
    for row in range(4):
        assert torch.equal(linear.run_plan(linear.ROWS, x[row : row + 1], weight, None)[0], together[row])


def test_the_persistent_kernel_is_used_if_measured_faster() -> None:
    assert linear.is_persistent(1, 8192, 2048, None, "silu")
    for rows, outputs, width, kind in ((2, 8192, 2048, "silu"), (1, 8191, 2048, "silu"), (1, 8192, 2048, None)):
        assert not linear.is_persistent(rows, outputs, width, None, kind)
    assert not linear.is_persistent(1, 8192, 2048, torch.zeros(8192), "silu")


@pytest.mark.parametrize("normed", [False, True])
def test_the_persistent_kernel_computes_the_body(normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.Generator().manual_seed(5)
    outputs, columns = 8195, 1030  # the last tile is partial, and so is a row of it
    if DEVICE == "cpu":  # interpreted programs are few and slow: as many tiles, of shorter rows
        outputs, columns = 51, 70
        monkeypatch.setattr(linear, "is_persistent", lambda *asked: True)
    turns = (
        outputs / linear.PERSISTENT_OUT / (linear.PERSISTENT_PROGRAMS * linear.multiprocessors(torch.device(DEVICE)))
    )
    assert turns > 3
    made = [torch.randn(shape, generator=numbers) for shape in ((1, columns), (1, columns), (columns,))]
    weight = torch.randn(2 * outputs, columns, generator=numbers) / columns**0.5
    x, delta, gain, there = (tensor.to(DEVICE) for tensor in (*made, weight))
    joined = torch.full_like(x, torch.nan)
    before = Unnormed(x, delta, gain, 1e-5, 0.0, joined) if normed else x
    got = linear.few_rows(before, there, None, "silu")
    host = Unnormed(*made, 1e-5, 0.0, torch.empty(1, columns)) if normed else None
    line = host.read() if host is not None else made[0]
    gate, up = torch.nn.functional.linear(line, weight).chunk(2, -1)
    assert_close(got, torch.nn.functional.silu(gate) * up, torch.float32)
    if host is not None:
        assert_close(joined, host.joined, torch.float32)


def test_a_plan_of_the_table_is_used_only_if_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "lookup", lambda *asked: "rows")
    linear.plan_for.cache_clear()
    facts = torch.float32, torch.device("cpu")
    assert linear.plan_for(4, 2048, 2048, *facts) is linear.ROWS
    assert linear.plan_for(5, 2048, 2048, *facts) is linear.LIBRARY
    monkeypatch.setattr(linear, "lookup", lambda *asked: "tiles-64x32x256")
    for memory, plan in ((96 << 10, linear.TILES[6]), (95 << 10, linear.LIBRARY)):
        monkeypatch.setattr(linear, "shared_memory", lambda device, memory=memory: memory)
        linear.plan_for.cache_clear()
        assert linear.plan_for(17, 8, 64, *facts) is plan
    monkeypatch.setattr(linear, "lookup", lambda *asked: "of another version")
    linear.plan_for.cache_clear()
    assert linear.plan_for(17, 8, 64, *facts) is linear.LIBRARY
    linear.plan_for.cache_clear()


@pytest.mark.parametrize(("rows", "kind"), [(5, "silu"), (16, "gelu_tanh"), (29, "silu")])
def test_a_gated_layer_of_some_rows_is_one_kernel(rows: int, kind: str) -> None:
    numbers = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 258, generator=numbers).half()[:, 1:-1]
    weight = torch.randn(2 * 128, 256, generator=numbers).half() / 16
    gate, up = torch.nn.functional.linear(x, weight).chunk(2, -1)
    expected = activate_mul.body(gate, up, kind).float()
    found = linear.gated_tiles(x.to(DEVICE), weight.to(DEVICE), kind).cpu().float()
    assert found.shape == expected.shape and (found - expected).norm() < 2e-3 * expected.norm()


def test_gated_tiles_are_used_if_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(
        rows: int = 32,
        outputs: int = 14336,
        columns: int = 4096,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> bool:
        return linear.fits_gated_tiles.__wrapped__(rows, outputs, columns, bias, dtype, torch.device("meta"))

    assert takes() and takes(rows=5)
    assert not any(
        (
            takes(rows=4),
            takes(rows=33),
            takes(outputs=8191),
            takes(columns=4100),
            takes(bias=True),
            takes(dtype=torch.float32),
        )
    )
    monkeypatch.setattr(linear, "shared_memory", lambda device: 99 << 10)
    assert not takes()
