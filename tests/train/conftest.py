"""The model with a language of loops, loaded once."""

from __future__ import annotations

import pytest

from bankfull import LLM
from tests.train.looping import looping_folder


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(str(looping_folder()), device="cpu", rows=8, memory="16MiB")
