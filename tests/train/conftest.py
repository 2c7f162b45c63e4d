"""The model with a language of loops, loaded once."""

from __future__ import annotations

import pytest
import torch

from bankfull import LLM
from tests.conftest import THREADS
from tests.train.looping import looping_folder


@pytest.fixture(scope="session")
def llm() -> LLM:
    made = LLM(str(looping_folder()), device="cpu", rows=8, memory="16MiB")
    torch.set_num_threads(THREADS)  # other fixtures train with it, and repeat a training after tests with this number
    return made
