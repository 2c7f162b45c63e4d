"""The generated inputs of every operation, odd sizes and layouts among them, and sampling, on the device itself."""

from __future__ import annotations

from tests.gpu.place import CUDA, require_device

require_device()

from tests.test_ops import test_a_provider_computes_what_the_body_means  # noqa: E402, F401

if CUDA:
    from tests.sample.test_cuda import (  # noqa: F401
        test_equal_scores_go_to_the_lowest_id,
        test_nothing_waits_for_the_device_and_a_row_does_not_depend_on_its_mates,
        test_random_numbers_have_the_same_bits_on_every_device,
        test_tokens_are_those_of_the_cpu,
    )
