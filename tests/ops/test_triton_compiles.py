"""Every Triton kernel compiles for Hopper, those of a model's start ahead of time. No GPU is used."""

from __future__ import annotations

import pytest

from tests.ops.compiled import Report, fits_twice, overflows, report_on, reports_on

SINES = ("rope_angles_kernel", "gather_kernel", "gather_chunks_kernel")
"""The sine of a large angle uses an indexed array, which is not in registers."""
TWO_AT_A_TIME = "attention_prefill"
"""One program runs its GEMM during the other's softmax: both must fit into a multiprocessor's shared memory."""
FULL = pytest.mark.full
LONG = pytest.mark.timeout(1800)


@FULL
@pytest.mark.parametrize(
    "group",
    [
        "start",
        "quantized",
        "heads",
        "quantized-experts",
        "two-of-four",
        "experts",
        "quantized-experts-more",
        "recurrent",
        "drafts",
        "quantized-more",
        "outliers",
        "heads-more",
        "rounded-pages",
        "partial-pages",
    ],
)
def test_the_kernels_of_real_models_compile_ahead_and_keep_to_their_registers(group: str) -> None:
    report = report_on(group)
    assert not report.errors, "\n".join(report.errors)
    assert report.kernels, "nothing was compiled"
    assert not report.overflowing
    assert not report.late, "compiled when they were launched, not ahead"
    spilled = [kernel for kernel in report.kernels if kernel.stack and kernel.name not in SINES]
    assert not spilled
    alone = [kernel for kernel in report.kernels if kernel.name == TWO_AT_A_TIME and not fits_twice(kernel)]
    assert not alone


def check_generated(report: Report) -> None:
    assert not report.errors, "\n".join(report.errors)
    assert len(report.kernels) > 10
    assert not report.overflowing


def test_kernels_compile_for_generated_inputs_and_a_broken_one_is_named_with_the_reason() -> None:
    generated, broken = reports_on("edges", "broken").values()
    check_generated(generated)
    [error] = broken.errors
    assert "kernel refused" in error and "power of 2" in error


@pytest.mark.full
@pytest.mark.parametrize(
    "group",
    ["plans", "linear-recurrences", "state-spaces", "sparse", "generated", pytest.param("generated-more", marks=LONG)],
)
def test_kernels_compile_for_more_generated_inputs(group: str) -> None:
    check_generated(report_on(group))


def test_an_overflowing_pair_is_detected() -> None:
    """As it was found: the lower value, which was unused, was multiplied in 64 bits."""
    packed = """
	{} 	%rd50, %r61, {};
	cvt.u64.u32 	%rd51, %r59;
	shl.b64 	%rd52, %rd51, 33;
	or.b64 	%rd53, %rd50, %rd52;
	mov.b64 	{{_, %r64}}, %rd53;
"""
    assert overflows(packed.format("mul.wide.u32", 1 << 30))
    assert overflows(packed.format("shl.b64", 30))
    assert not overflows(packed.format("shl.b64", 32))
    assert not overflows(packed.format("cvt.u64.u32", 0))
    of_threads = "mov.u32 	%r61, %tid.x;" + packed
    assert overflows(of_threads.format("mul.wide.u32", 1 << 30))
    assert not overflows(of_threads.format("mul.wide.u32", 2))
