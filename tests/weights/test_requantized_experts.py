"""Quantization at load of mixtures of experts: experts are rounded, routers are not."""

from __future__ import annotations

import torch

from bankfull.layers.experts import Experts
from bankfull.weights.requantized import Requantized, bits_per_weight, block_types, is_inner_matrix
from bankfull.weights.source import open_model
from tests.models.oracle import build, error, saved, spread


def test_experts_are_rounded_and_routers_kept() -> None:
    files = open_model(saved("qwen3-moe-blocks").path)
    rounded = Requantized(files.source, ("q8_0", "keep"))
    assert block_types(rounded) == ["q8_0"]
    assert rounded.scheme("model.layers.0.mlp.gate.weight").is_dense
    assert rounded.scheme("model.layers.0.mlp.experts.3.down_proj.weight").name == "q8_0"
    assert 8 < bits_per_weight(rounded) < 32
    model = build(type(files)(files.path, files.kind, files.config, rounded, {}, {}))
    feed = model.blocks[0].feed
    assert isinstance(feed, Experts) and feed.gate.scheme.name == "q8_0" and feed.gate.shape == (5, 32, 64)
    assert 1e-4 < spread(model, saved("qwen3-moe-blocks").logits) < 0.2


def test_a_stacked_tensor_is_rounded_like_its_parts() -> None:
    files = open_model(saved("qwen3-moe-blocks").path)

    class Whole:
        """The same file with the experts' matrices as single tensors."""

        def __getattr__(self, name: str) -> object:
            return getattr(files.source, name)

        def names(self) -> list[str]:
            return [*files.source.names(), "model.layers.0.mlp.experts.up_proj.weight"]

        def shape(self, name: str) -> tuple[int, ...]:
            return (5, 32, 64) if name.endswith("experts.up_proj.weight") else files.source.shape(name)

        def get(self, name: str) -> object:
            from bankfull.weights.qtensor import QTensor

            if not name.endswith("experts.up_proj.weight"):
                return files.source.get(name)
            parts = [files.source.get(name.replace("experts.", f"experts.{i}.")) for i in range(5)]
            return QTensor.stacked(parts).reshape_leading(5, 32)

    whole = Requantized(Whole(), ("q4_0",)).get("model.layers.0.mlp.experts.up_proj.weight")  # type: ignore[arg-type]
    part = Requantized(files.source, ("q4_0",)).get("model.layers.0.mlp.experts.2.up_proj.weight")
    assert whole.scheme.name == "q4_0" and torch.equal(whole.parts["blocks"][2], part.parts["blocks"])
    assert error(build(files), saved("qwen3-moe-blocks").logits) < 1e-4


def test_every_family_names_its_experts_and_routers() -> None:
    stem = "model.layers.0."
    shapes = {
        f"{stem}block_sparse_moe.input_linear.weight": (4, 64, 32),  # Granite stacks gate and up
        f"{stem}block_sparse_moe.output_linear.weight": (4, 32, 32),
        f"{stem}block_sparse_moe.router.layer.weight": (4, 32),
        f"{stem}feed.gate.weight": (4, 32),  # the router of a model as data
        f"{stem}feed.gate_proj.weight": (64, 32),
    }

    class Shapes:
        def shape(self, name: str) -> tuple[int, ...]:
            return shapes[name]

    inner = [name.removeprefix(stem) for name in shapes if is_inner_matrix(Shapes(), name)]  # type: ignore[arg-type]
    assert inner == [
        "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.output_linear.weight",
        "feed.gate_proj.weight",
    ]
