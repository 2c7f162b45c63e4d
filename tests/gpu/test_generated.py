"""The generated inputs of every operation, odd sizes and layouts among them, on the device itself."""

from __future__ import annotations

from tests.gpu.place import require_device

require_device()

from tests.test_ops import test_a_provider_computes_what_the_body_means  # noqa: E402, F401
