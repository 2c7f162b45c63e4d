"""Layers that share keys and values: one KV cache, no writes, the owner's window, and the reference's logits."""

from __future__ import annotations

import pytest
import torch

from bankfull.errors import ModelError
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.shared import SharedAttention, owner_of
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime.forward import plan_mixers
from bankfull.runtime.naive import single_batch
from bankfull.state.spec import Paged, Shared, layout_of
from bankfull.state.storage import Storage
from bankfull.weights.source import open_model
from tests.models.cases_shared import share
from tests.models.oracle import CPU, PASSES, TOKENS, TOLERANCE, error, ours, reference_logits, saved


def tied(name: str, factor: int, dtype: torch.dtype = torch.float32, providers: str = "torch") -> Decoder:
    """A saved model in which every `factor`-th layer's keys and values serve the layers after it, too."""
    files = open_model(saved(name).path)
    build = Build(files.source, kit_for("cpu", providers), dtype, CPU)
    model = build_model(files.config, build)
    for number, block in enumerate(model.blocks):
        if number % factor:
            owner = owner_of(model.mixers, number, number - number % factor)
            mixer = block.mixer
            assert isinstance(mixer, Attention) and isinstance(mixer.out, type(mixer.q))
            block.mixer = SharedAttention(
                build, owner, number - number % factor, mixer.q, mixer.out, rope=mixer.rope, q_norm=mixer.q_norm
            )
    return model


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
@pytest.mark.parametrize("providers", ["torch", "auto"])
@pytest.mark.parametrize("cut", PASSES)
def test_tied_layers_compute_what_the_reference_computes_with_its_keys_and_values_replaced(
    name: str, providers: str, cut: str
) -> None:
    """Mistral's layers have a window, Qwen's a norm of queries."""
    reference = type(saved(name).reference)(saved(name).reference.config).eval()
    reference.load_state_dict(saved(name).reference.state_dict())
    share(reference, 2)
    if name == "qwen3":
        reference.model.layers[1].self_attn.k_norm = reference.model.layers[0].self_attn.k_norm
    want = reference_logits(reference)
    assert error(tied(name, 2, providers=providers), want, PASSES[cut]) < TOLERANCE
    assert float((want - saved(name).logits).abs().max()) > 10 * TOLERANCE, "sharing changes the model"


def test_tied_layers_have_one_cache_and_half_of_the_bytes_per_token() -> None:
    alone = layout_of(ours("hunyuan-v1-dense").states(), 16)
    layout = layout_of(ours("hunyuan-shared").states(), 16)
    assert len(layout.paged) == 1 and 2 * layout.token_bytes == alone.token_bytes
    assert layout.paged[0].layers == (0, 2) and alone.paged[0].layers == (0, 1, 2, 3)
    layers = Storage(layout, 4, 0, CPU).layers
    assert layers[0][0]["k"] is layers[1][0]["k"] and layers[2][0]["v"] is layers[3][0]["v"]
    assert layers[0][0]["k"] is not layers[2][0]["k"]


def test_a_sharing_layer_writes_no_page() -> None:
    model = ours("hunyuan-shared")
    layout = layout_of(model.states(), 16)
    storage = Storage(layout, 4, 0, CPU)
    storage.frames.fill_(0)
    batch = single_batch(layout, TOKENS, 0, 20, 0, CPU)
    metas = plan_mixers(model, layout, batch)
    before = storage.frames.clone()
    with torch.inference_mode():
        for number in (1, 3):
            angles = {name: rope(batch.positions) for name, rope in model.ropes.items()}["global"]
            model.mixers[number].run(torch.randn(20, 48), storage.layers[number], metas[number], angles)
    assert torch.equal(storage.frames, before)
    with torch.inference_mode():
        model.mixers[0].run(torch.randn(20, 48), storage.layers[0], metas[0], angles)
    assert not torch.equal(storage.frames, before)


def test_impossible_owners_are_refused_in_one_sentence() -> None:
    model = tied("mistral", 2)
    owner = model.mixers[0]
    assert isinstance(owner, Attention)
    for layer, wanted, message in (
        (1, 1, "does not come before it"),
        (1, 5, "does not come before it"),
        (2, 1, "has none of its own"),
    ):
        with pytest.raises(ModelError, match=message) as found:
            owner_of(model.mixers, layer, wanted)
        assert str(found.value).count(".") == 1
    build = Build(open_model(saved("mistral").path).source, kit_for("cpu", "torch"), torch.float32, CPU)
    with pytest.raises(ModelError, match="2 heads of size 8 do not fit its 41 query dimensions"):
        SharedAttention(build, owner, 0, model.blocks[0].feed.gate, owner.q)  # type: ignore[union-attr, arg-type]
    pages = Paged(owner.states[0].tensors)  # type: ignore[union-attr]
    for cycle in ([(Shared(1),), (Shared(0),)], [(pages,), (Shared(2),), (Shared(1),)], [(Shared(0),)]):
        with pytest.raises(ModelError, match="which owns none or comes later") as found:
            layout_of(cycle, 16)
        assert str(found.value).count(".") == 1
