"""Every Triton kernel compiles for Hopper, and those of a model's start before they are needed. No GPU is used."""

from __future__ import annotations

import pytest

from tests.ops.compiled import report_on

SINES = "rope_angles_kernel"
"""The sine of a large angle takes an array that is indexed, which lies in no register."""
FULL = pytest.mark.full
LONG = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    "group",
    ["start", "quantized", *(pytest.param(name, marks=FULL) for name in ("recurrent", "drafts", "quantized-more"))],
)
def test_the_kernels_of_real_models_compile_ahead_and_keep_to_their_registers(group: str) -> None:
    report = report_on(group)
    assert not report.errors, "\n".join(report.errors)
    assert report.kernels, "nothing was compiled"
    assert not report.late, "compiled when they were launched, not ahead"
    spilled = [kernel for kernel in report.kernels if kernel.stack and kernel.name != SINES]
    assert not spilled


@pytest.mark.parametrize("group", ["generated", pytest.param("generated-more", marks=[FULL, LONG])])
def test_kernels_compile_for_generated_inputs(group: str) -> None:
    report = report_on(group)
    assert not report.errors, "\n".join(report.errors)
    assert len(report.kernels) > 20


def test_a_kernel_that_does_not_compile_is_named_with_the_reason() -> None:
    [error] = report_on("broken").errors
    assert "kernel refused" in error and "power of 2" in error
