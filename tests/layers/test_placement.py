"""A build asks its placement for the home of each module, and reads nothing for one that lives elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bankfull.axes import EXPERTS, HIDDEN, NEURONS
from bankfull.layers.build import Build
from bankfull.layers.placement import Home, Mode, Role
from bankfull.ops.registry import Kit
from bankfull.ranks.stage import Stage
from bankfull.spread.apart import OneSide
from bankfull.weights.qtensor import QTensor
from tests.models.weights import Tensors

CPU = torch.device("cpu")
AXES = (NEURONS(3), HIDDEN(2))


class Unread(Tensors):
    """A file of which nothing may be read."""

    def get(self, name: str) -> QTensor:
        raise AssertionError(name)


@dataclass(frozen=True, slots=True)
class Named:
    """Reads the modules of one name."""

    module: str
    roles: frozenset[Role] = frozenset(Role)

    def home(self, module: str, role: Role, here: Home) -> Home:
        return here if module == self.module else here.elsewhere


def build_of(source: object) -> Build:
    return Build(source, Kit("cpu", ("native",)), torch.float32, CPU)  # type: ignore[arg-type]


def test_a_module_elsewhere_has_tensors_without_data() -> None:
    build = build_of(Unread({})).placed(Named("here"))
    there = build.at("there")
    assert not there.reads and there.home.mode is Mode.ELSEWHERE and there.kit.prefer == ()
    found = [
        there.weight("weight", AXES, for_linear=True),
        there.table("table.weight", AXES),
        there.rows_of("rows.weight", AXES, torch.arange(2)),
        there.stacked("experts.{}.up.weight", EXPERTS(4), AXES),
        there.stacked("experts.{}.gate.weight", EXPERTS(4), AXES, held=(1, 3)),
    ]
    assert [one.shape for one in found] == [(3, 2), (3, 2), (2, 2), (4, 3, 2), (2, 3, 2)]
    assert all(one.device.type == "meta" for one in found)
    assert there.tensor("bias", (HIDDEN(2),), torch.float64).dtype is torch.float64
    assert there.bias_of_experts("experts.up.bias", EXPERTS(4), NEURONS(3), held=(1, 3)).shape == (2, 3)
    assert build.elsewhere == {"there", "there.table", "there.rows", "there.experts", "there.experts.up"}
    assert build.weights["there.weight"].axes == AXES
    assert build.weights["there.experts.up.weight"].axes == (4, 3, 2)


def test_a_module_below_one_that_is_elsewhere_may_be_read_here() -> None:
    build = build_of(Tensors({"layer.mlp.weight": torch.ones(3, 2)}))
    layer = build.placed(OneSide(Role.FEED)).at("layer")
    assert not layer.reads and not layer.at("mlp").reads
    feed = layer.at("mlp").of(Role.FEED)
    assert feed.reads and feed.kit is build.kit and feed.device == CPU
    assert feed.weight("weight", AXES).dequantize().sum() == 6
    assert (feed.split, layer.together.reads) == ((1, 1), True)
    assert build.weights["layer.mlp.weight"].role is Role.FEED and build.weights["layer.mlp.weight"].home == build.home


def test_what_a_stage_lacks_is_elsewhere_whatever_the_placement() -> None:
    build = Build(Unread({}), Kit("cpu", ()), torch.float32, CPU, stage=Stage(0, 1, None, None))  # type: ignore[arg-type]
    layers = build.at("model").at("layers")
    assert layers.at(0).reads and not layers.at(1).reads and not layers.at(1).at("mlp").of(Role.FEED).reads
    assert build.blank.weight("weight", AXES).device.type == "meta" and not build.blank.at("model").reads
