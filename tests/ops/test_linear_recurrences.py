"""The CPU kernels of linear attention and the delta rule: the same bits in any chunks, on any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.ops import RecurrentMeta, delta_rule, linear_attention, native, taylor_features
from tests.quick import examples

pytestmark = pytest.mark.skipif(native.status() is not None, reason="the extension was not built")
TOKENS = 23
Run = Callable[[list[Tensor], list[Tensor], RecurrentMeta], Tensor]


@pytest.fixture(scope="module")
def threads() -> Iterator[None]:
    before = native.threads()
    yield
    native.set_threads(before)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(run: Run, inputs: list[Tensor], shapes: list[tuple[int, ...]], cuts: list[int]) -> list[Tensor]:
    """The outputs and the last states of a sequence in pieces that end at `cuts`."""
    states = [torch.zeros(len(cuts) + 1, *shape) for shape in shapes]
    out, begin = [], 0
    for slot, end in enumerate(cuts):
        meta = RecurrentMeta(
            np.array([0, end - begin]), np.array([1]), torch.tensor([slot]), torch.tensor([[slot + 1]])
        )
        out.append(run([x[begin:end] for x in inputs], states, meta))
        begin = end
    return [torch.cat(out), *(state[-1] for state in states)]


def kernels(name: str, key: int, value: int) -> tuple[Run, list[Tensor], list[tuple[int, ...]]]:
    """The operation with a sequence's inputs, and the shapes of its states; four heads."""
    heads = 4
    v, matrix = drawn(3, TOKENS, heads, value), (heads, key, value)
    if name == "delta":
        q, k = drawn(1, TOKENS, 2 * 2 * key + 5)[:, 5:].split(2 * key, 1)
        a, b, rate, shift = drawn(4, TOKENS, heads), drawn(5, TOKENS, heads), -drawn(6, heads).exp(), drawn(7, heads)

        def correct(parts: list[Tensor], states: list[Tensor], meta: RecurrentMeta) -> Tensor:
            q, k = (part.unflatten(1, (2, key)) for part in parts[:2])
            return delta_rule.providers["native"].run(q, k, *parts[2:], rate, shift, states[0], meta)

        return correct, [q, k, v, a, b], [matrix]
    q, k, slopes = drawn(1, TOKENS, heads, key), drawn(2, TOKENS, heads, key), drawn(4, heads).abs() * 0.2
    normalized = name == "normalized"
    if normalized:
        q, k = q.abs(), k.abs()

    def mix(parts: list[Tensor], states: list[Tensor], meta: RecurrentMeta) -> Tensor:
        sums = states[1] if normalized else None
        return linear_attention.providers["native"].run(*parts, slopes, states[0], sums, meta)

    return mix, [q, k, v], [matrix, (heads, key)] if normalized else [matrix]


@pytest.mark.parametrize("name", ["decay", "normalized", "delta"])
@examples(12)
@given(
    sizes=st.tuples(st.sampled_from((1, 5, 16, 40)), st.sampled_from((1, 16, 17, 40, 64))),
    cuts=st.lists(st.integers(1, TOKENS - 1), unique=True, max_size=8).map(sorted),
    count=st.integers(1, 3),
)
def test_the_same_bits_in_any_chunks(
    name: str, sizes: tuple[int, int], cuts: list[int], count: int, threads: None
) -> None:
    run, inputs, shapes = kernels(name, *sizes)
    native.set_threads(1)
    whole = stepped(run, inputs, shapes, [TOKENS])
    native.set_threads(count)
    for got, want in zip(stepped(run, inputs, shapes, [*cuts, TOKENS]), whole, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["decay", "normalized", "delta"])
def test_wrong_slots_and_shapes_are_refused(name: str) -> None:
    run, inputs, shapes = kernels(name, 5, 7)
    states = [torch.zeros(3, *shape) for shape in shapes]
    one = [x[:1] for x in inputs]
    for read, write in ((3, 1), (-1, 1), (0, 3)):
        meta = RecurrentMeta(np.array([0, 1]), np.array([1]), torch.tensor([read]), torch.tensor([[write]]))
        with pytest.raises(ValueError, match="out of range"):
            run(one, states, meta)
    meta = RecurrentMeta(np.array([0, 1]), np.array([1]), torch.tensor([0]), torch.tensor([[1]]))
    with pytest.raises(ValueError, match="do not match a state"):
        run(one, [torch.zeros(3, 4, 5, 8), *states[1:]], meta)
    assert all((state == 0).all() for state in states)


def test_the_product_of_two_feature_vectors_is_the_taylor_series() -> None:
    q, k = drawn(1, 6, 3, 16), drawn(2, 6, 3, 16)
    run = taylor_features.providers["native"].run
    x = (q * k).sum(-1) / 4
    torch.testing.assert_close((run(q) * run(k)).sum(-1), 1 + x + x * x / 2, rtol=1e-4, atol=1e-4)
