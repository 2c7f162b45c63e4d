"""S4: the recurrence that serves it equals the convolution that trains it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.s4 import S4Mixer, S4Shape
from bankfull.ops import RecurrentMeta, native
from tests.models.weights import build_of

HIDDEN, STATE, LENGTH = 12, 16, 300


def weights(seed: int = 4, own_input: bool = False) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    pairs = STATE // 2
    steps = torch.linspace(np.log(0.001), np.log(0.1), HIDDEN)
    found = {
        "log_dt": steps,
        "log_A_real": torch.full((HIDDEN, pairs), 0.5).log() + 0.1 * normal(HIDDEN, pairs),
        "A_imag": np.pi * torch.arange(pairs).float().expand(HIDDEN, pairs).clone(),
        "C": normal(HIDDEN, pairs, 2),
        "D": normal(HIDDEN),
        "out_proj.weight": normal(HIDDEN, HIDDEN) / HIDDEN**0.5,
        "out_proj.bias": normal(HIDDEN),
    }
    return found | ({"B": normal(HIDDEN, pairs, 2)} if own_input else {})


def convolved(tensors: dict[str, Tensor], rule: str, u: Tensor) -> Tensor:
    """The paper's other view: y = K * u + D u with K_i = C A^i B, summed over each pair and its conjugate, through an
    FFT; in double precision."""
    numbers = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    step = np.exp(numbers["log_dt"])[:, None]
    a = -np.exp(numbers["log_A_real"]) + 1j * numbers["A_imag"]
    c = numbers["C"][..., 0] + 1j * numbers["C"][..., 1]
    b = numbers["B"][..., 0] + 1j * numbers["B"][..., 1] if "B" in numbers else np.ones_like(a)
    if rule == "zoh":
        factor = np.exp(step * a)
        enter = b * (factor - 1) / a
    else:
        back = 1 / (1 - step / 2 * a)
        factor, enter = back * (1 + step / 2 * a), back * step * b
    length = len(u)
    powers = factor[None] ** np.arange(length)[:, None, None]
    kernel = (c * enter * powers).sum(-1) + (np.conj(c * enter) * np.conj(powers)).sum(-1)
    assert abs(kernel.imag).max() < 1e-12
    inputs = u.double().numpy()
    spectrum = np.fft.rfft(kernel.real, 2 * length, axis=0) * np.fft.rfft(inputs, 2 * length, axis=0)
    y = np.fft.irfft(spectrum, axis=0)[:length] + numbers["D"] * inputs
    mixed = torch.nn.functional.gelu(torch.from_numpy(y)) @ tensors["out_proj.weight"].double().T
    return mixed + tensors["out_proj.bias"].double()


def recurred(mixer: S4Mixer, u: Tensor, chunks: list[int]) -> Tensor:
    (spec,) = mixer.states
    (part,) = spec.tensors  # type: ignore[union-attr]
    state = {part.name: torch.zeros(3, *part.shape, dtype=getattr(torch, part.dtype))}
    parts, first, read = [], 0, 0
    for turn, count in enumerate(chunks):
        write = 1 + turn % 2
        meta = RecurrentMeta(np.array([0, count]), np.array([1]), torch.tensor([read]), torch.tensor([[write]]))
        parts.append(mixer.run(u[first : first + count], (state,), meta, None))
        first, read = first + count, write
    return torch.cat(parts)


@pytest.mark.parametrize("providers", ["torch", "auto"])
@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_the_recurrence_equals_the_convolution(rule: str, providers: str) -> None:
    if providers == "auto" and native.status() is not None:
        pytest.skip("the kernels are not built")
    tensors = weights(own_input=rule == "bilinear")
    u = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = convolved(tensors, rule, u)
    mixer = S4Mixer(build_of(tensors, providers=providers), S4Shape(HIDDEN, STATE, rule))
    for chunks in ([LENGTH], [7, 1, 92, 200], [1] * LENGTH):
        assert float((recurred(mixer, u, chunks) - expected).abs().max()) < 1e-5


def test_a_missing_factor_of_two_shows() -> None:
    tensors = weights()
    u = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    mixer = S4Mixer(build_of(tensors), S4Shape(HIDDEN, STATE))
    mixer.leave = mixer.leave / 2
    assert float((recurred(mixer, u, [LENGTH]) - convolved(tensors, "zoh", u)).abs().max()) > 1e-2


def test_an_odd_state_and_an_unknown_rule_are_refused() -> None:
    with pytest.raises(ModelError, match="must be even"):
        S4Shape(8, 7)
    with pytest.raises(ModelError, match=r"'euler' .* use zoh or bilinear"):
        S4Shape(8, 8, "euler")
