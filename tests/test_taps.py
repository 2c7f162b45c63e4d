"""Hidden states that enter chosen layers: those of the same model without the layers behind them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import ComputedStep
from bankfull.errors import ConfigError
from bankfull.layers.batch import Batch
from bankfull.layers.decoder import Decoder
from bankfull.ops import Kit, native
from bankfull.runtime.forward import Eager, plan_mixers
from bankfull.state.spec import Layout, layout_of
from bankfull.state.storage import Storage
from tests.kit import Bench, Guess, GuessTree, device_of
from tests.tiny import VOCAB, kit_of, model_of

if native.status() is not None:
    pytest.skip("the kernels are not built", allow_module_level=True)

from bankfull.runtime.taped import Taped
from tests.test_tape import ARITHMETIC, CONFIGS, PAGE, Sides, built

CPU = torch.device("cpu")


class TappedSides(Sides):
    """The same sequences without taps, eager with taps, and captured with taps."""

    def __init__(self, model: Decoder, kit: Kit, sequences: int, taps: tuple[int, ...]) -> None:
        super().__init__(model, kit, sequences)
        layout = layout_of(model.states(), PAGE)
        storages = [Storage(layout, 200, 2 * sequences + 2, CPU) for _ in range(2)]
        for storage in storages:
            storage.frames.zero_()
        self.tapping = Eager(model, layout, storages[0].layers, taps=taps)
        self.captured = Taped(Eager(model, layout, storages[1].layers, taps=taps), kit)


def entering(model: Decoder, layout: Layout, eager: Eager, batch: Batch, layer: int) -> Tensor:
    """The stream after the layers before `layer`."""
    metas = plan_mixers(model, layout, batch)
    x, pending = replace(model, blocks=model.blocks[:layer])._stream(batch, eager.states, metas, None)
    return x if pending is None else x + pending


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("family", CONFIGS)
def test_taps_are_the_same_bits_on_the_tape_and_change_no_other(family: str, arithmetic: str) -> None:
    model, kit = built(family, arithmetic)
    sides = TappedSides(model, kit, 2, (0, 1))
    assert not sides.captured.tape.breaks
    for counts in ([5, 0], [1, 9], [1, 1], [4, 20]):
        batch = sides.batch(counts)
        with torch.inference_mode():
            plain = sides.eager(batch).clone()
            expected = {
                layer: entering(model, sides.layout, sides.eager, batch, layer).clone()
                for layer in (0, 1)
                if sides.layout.recurrent is None or not layer
            }
            eager, taped = sides.tapping(batch), sides.captured(batch)
        assert torch.equal(plain, eager) and torch.equal(plain, taped)
        for layer in (0, 1):
            ours = sides.captured.tapped[layer]
            assert torch.equal(sides.tapping.tapped[layer], ours) and ours.abs().sum() > 0
            if layer in expected:
                torch.testing.assert_close(ours, expected[layer])


class Tapping:
    """Mixed into a strategy: the taps of every step must be those of its tokens."""

    follows, taps = True, (2, 0)
    model: Decoder
    followed = 0

    def follow(self, step: ComputedStep) -> None:
        assert sorted(step.tapped) == [0, 2]
        tokens = self.model.embed(step.batch)
        assert torch.equal(step.tapped[0], tokens), "the embeddings enter the first layer"
        assert step.tapped[2].shape == step.hidden.shape and step.tapped[2].isfinite().all()
        assert not torch.equal(step.tapped[2], step.tapped[0])
        self.followed += 1


class TappingChains(Tapping, Guess):
    pass


class TappingTrees(Tapping, GuessTree):
    pass


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("captured", (True, False))
@pytest.mark.parametrize(("shape", "kind"), [("llama", TappingTrees), ("gemma", TappingChains)])
def test_a_strategy_gets_the_taps_of_every_step(shape: str, kind: type[Guess], captured: bool, depth: int) -> None:
    how = (torch.float32, "auto")
    strategy = kind([], width=3)
    assert isinstance(strategy, Tapping)
    strategy.model = model_of(shape, *how)
    bench = Bench(
        strategy.model,
        device_of(depth, seed=depth),
        depth,
        SchedConfig(rows=3, step_tokens=9),
        StateConfig(page_tokens=4),
        strategy,  # type: ignore[arg-type]
        kit=kit_of(shape, *how) if captured else None,
    )
    assert isinstance(bench.runner.run_model, Taped) == captured
    rng = random.Random(1)
    for i in range(4):
        bench.add(i, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))], 6)
    bench.run()
    assert strategy.followed > 6


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    class Deep(Plain):
        taps = (1, 7)

    with pytest.raises(ConfigError, match=r"Deep reads the layers 1, 7, but the model's layers go from 0 to 2"):
        Bench(model_of("llama"), device_of(0), 0, strategy=Deep())
