"""Random weights: determined by name and seed, and sane for every family."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from time import sleep

import pytest
import torch

from bankfull.errors import ModelError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.synthetic import random_weights
from bankfull.synthetic.ahead import ahead
from bankfull.synthetic.random_weights import RandomWeights, draws, random_model
from bankfull.synthetic.shapes import shape_config
from benchmarks.gpu.engine import Session, Setup
from tests.synthetic.test_shapes import KNOWN

CPU = torch.device("cpu")
ONE_OF_EACH = list({shape_config(name)["model_type"]: name for name in KNOWN}.values())


def values(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.cat([part() for part in draws(name, shape, torch.float32, CPU, seed)])


def test_a_weight_follows_from_its_name_and_the_seed() -> None:
    one = values("a.weight", (20, 30))
    assert torch.equal(one, values("a.weight", (20, 30)))
    assert not torch.equal(one, values("b.weight", (20, 30)))
    assert not torch.equal(one, values("a.weight", (20, 30), seed=1))


def test_a_tensor_that_is_made_in_parts_is_whole_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "ELEMENTS_AT_ONCE", 7 * 32)
    parts = [part() for part in draws("a.weight", (50, 32), torch.float32, CPU, 0)]
    assert len(parts) > 5 and max(map(len, parts)) <= 7
    whole = RandomWeights({"a.weight": (50, 32)}, torch.float32).get("a.weight").dequantize()
    assert torch.equal(whole, torch.cat(parts)) and len(whole.unique(dim=0)) == 50


def test_parts_that_threads_draw_come_in_order_and_few_at_a_time() -> None:
    begun: list[int] = []

    def call(number: int) -> Callable[[], int]:
        def run() -> int:
            begun.append(number)
            sleep(0.002 * (number % 3))
            return number

        return run

    results = ahead((call(number) for number in range(40)), workers=3)
    assert next(results) == 0 and len(begun) <= 5
    assert list(results) == list(range(1, 40)) and sorted(begun) == list(range(40))


def test_a_part_that_cannot_be_drawn_ends_the_others() -> None:
    def fails() -> int:
        raise ModelError("no numbers are left")

    with pytest.raises(ModelError, match="no numbers are left"):
        list(ahead([fails, *[lambda: 1] * 9], workers=2))


@pytest.mark.parametrize("shape", [(64, 256), (4, 64, 256), (64, 1, 4)], ids=["matrix", "experts", "convolution"])
def test_products_keep_the_size_of_what_they_multiply(shape: tuple[int, ...]) -> None:
    assert values("w.weight", shape).std() * shape[-1] ** 0.5 == pytest.approx(1.0, abs=0.1)


def test_parameters_of_recurrences_are_in_their_range() -> None:
    decay = values("layers.0.mixer.A_log", (64, 16)).exp()
    assert decay.min() >= 1 and decay.max() <= 16 and decay.std() > 1
    for name in ("dt_proj.bias", "mixer.dt_bias"):
        step = torch.nn.functional.softplus(values(name, (500,)))
        assert step.min() >= 0.99e-3 and step.max() <= 0.101
    assert torch.equal(values("mixer.D", (8,)), torch.ones(8)) and torch.equal(
        values("norm.weight", (8,)), torch.ones(8)
    )
    assert values("q_proj.bias", (500,)).std() == pytest.approx(0.02, rel=0.2)


def test_a_source_has_what_the_family_requests_and_nothing_else() -> None:
    config = shape_config("qwen3-8b-tiny")
    source = random_model("tiny", config, torch.float32).source
    assert sum(prod(source.shape(name)) for name in source.names()) == MeteredModel(config).parameters
    with pytest.raises(ModelError, match="has no tensor nothing"):
        source.get("nothing")


@pytest.mark.few(15)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_random_model_of_every_family_generates_tokens_that_depend_on_the_prompt(name: str) -> None:
    session = Session(Setup(f"{name}-tiny", dtype="float32", rows=4, step_tokens=64, max_len=128), "cpu")
    ids = session.run(session.prompts(3, 40), 12).ids
    # Tokens that are not finite would end the request with an error. A model whose scaled embedding dominates repeats
    # its input, so only the answers to different prompts differ.
    assert len(ids) == 36 and len(set(ids)) > 1
