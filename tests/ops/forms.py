"""Operations as layers bind them: alone, and with each thing that a provider fuses with them."""

from __future__ import annotations

from collections.abc import Iterator

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import OPERATIONS, Operation
from bankfull.ops.registry import TRAIN, Provider


def _forms() -> Iterator[Operation]:
    for operation in OPERATIONS.values():
        yield operation
        for fused in sorted({fused for provider in operation.providers.values() for fused in provider.fuses}):
            yield operation.bound_with(dict.fromkeys(fused.split("_"), True))


FORMS = {form.label: form for form in _forms()}
"""By their labels in ledgers."""


def providers_of(form: Operation) -> list[Provider]:
    """Those that read and write pages and slots as the body does; `tests/train/test_gradients.py` has the others."""
    found = [one for one in form.providers.values() if one.name != TRAIN]
    return [one for one in found if not form.fused or form.fused in one.fuses]
