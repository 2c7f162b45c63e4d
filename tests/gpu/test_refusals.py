"""What a device does not have is said in one sentence, with the numbers."""

from __future__ import annotations

import gc

import pytest
import torch

from bankfull import LLM
from bankfull.errors import ConfigError
from bankfull.runtime.device import open_device
from tests.gpu.place import DEVICE, only_cuda, require_device, the_device
from tests.tiny import speaking_folder

require_device()


def test_a_device_that_is_not_there_is_an_error() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"'cuda:{count + 6}' is not available: torch finds {count} CUDA devices"):
        open_device(f"cuda:{count + 6}")


@pytest.mark.parametrize("name", ("gpu", "cuda:x", "cuda:-1", ""))
def test_a_name_that_is_no_device_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; use auto, cpu, cuda or cuda:N"):
        open_device(name)


@only_cuda
def test_auto_is_the_gpu_where_there_is_one() -> None:
    assert open_device("auto").kind == "cuda"


def test_more_memory_than_the_device_has_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"asks for [\d.]+ GiB, but only [\d.]+ [MG]iB are free"):
        LLM(str(speaking_folder()), device=str(DEVICE), memory="100000GiB")


def test_too_little_memory_for_one_sequence_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"needs [\d.]+ \w+ of state, but the memory budget is [\d.]+ \w+"):
        LLM(str(speaking_folder()), device=str(DEVICE), memory="1KiB")


@only_cuda
def test_weights_that_do_not_fit_are_an_error_with_the_numbers() -> None:
    """Only this process is kept short: others may use the device meanwhile."""
    index = the_device().torch.index
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0, index)
    held: list[torch.Tensor] = []
    try:
        fill_what_is_left(held, index)
        with pytest.raises(ConfigError, match=r"The weights of .* do not fit: [\d.]+ [MG]iB were free"):
            LLM(str(speaking_folder()), device=str(DEVICE))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def fill_what_is_left(held: list[torch.Tensor], index: int) -> None:
    """Memory that other tests still hold has gaps in which the weights of a small model would find room."""
    size = 1 << 30
    while size >= 512:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=index))
        except torch.OutOfMemoryError:
            size //= 2
