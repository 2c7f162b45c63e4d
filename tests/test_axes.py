"""Axes: every family names what the dimensions of its weights count, and a rank's share of a fused one follows."""

from __future__ import annotations

import pytest

from bankfull.axes import (
    GROUPS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NEURONS,
    VOCAB,
    AxisKind,
    WeightAxis,
    as_axis,
    joined,
    sizes,
)
from bankfull.limits.meter.metered import MeteredModel
from bankfull.ranks.shard import Shard
from bankfull.weights.source import open_model
from tests.models.cases import CASES
from tests.models.oracle import saved
from tests.parallel.threads import Meeting, ThreadRank


def test_an_axis_is_its_length() -> None:
    queries = HEADS(9, 64)
    assert queries == 576 and isinstance(queries, int) and 2 * queries == 1152
    assert (queries.count, queries.each, queries.text) == (9, 64, "heads 9x64")
    whole = joined(queries, KV_HEADS(3, 64), KV_HEADS(3, 64))
    assert whole == 960 and [part.kind for part in whole.parts] == [HEADS, KV_HEADS, KV_HEADS]
    assert whole.text == "heads 9x64 + kv_heads 3x64 + kv_heads 3x64"
    assert joined(whole, HEADS(9)).parts == (*whole.parts, 9)
    assert whole.counts(KV_HEADS) and not whole.counts(NEURONS)
    assert f"{queries}" == "576", "a message shows the number"
    assert as_axis(7, HIDDEN).kind is HIDDEN and as_axis(queries, HIDDEN) is queries


def share(stored: tuple[int, ...], axes: tuple[int, ...], ranks: int, rank: int) -> object:
    found = Shard(ThreadRank(Meeting(ranks), ranks, rank)).own("layer.weight", stored, axes)
    return None if found is None else found[1]


def test_each_part_of_a_fused_tensor_is_cut_by_itself() -> None:
    axis = joined(HEADS(4, 2), KV_HEADS(1, 2), KV_HEADS(1, 2))
    assert share((24, 5), (axis, HIDDEN(5)), 2, 1) == [(8, 8), (18, 2), (22, 2)]
    few = joined(HEADS(2, 2), KV_HEADS(1, 2), KV_HEADS(1, 2))  # two heads of keys for four ranks
    assert share((24, 5), (few, HIDDEN(5)), 4, 1) == [(4, 4), (16, 2), (20, 2)]
    assert share((24, 5), (few, HIDDEN(5)), 4, 2) == [(8, 4), (18, 2), (22, 2)]
    scan = joined(HEADS(4), GROUPS(1, 3), GROUPS(1, 3))  # one group for all ranks
    assert share((14,), (scan,), 2, 1) == [(4, 4), (8, 3), (11, 3)]
    gate_up = joined(NEURONS(3), NEURONS(3))
    assert share((12, 5), (gate_up, HIDDEN(5)), 2, 1) == [(3, 3), (9, 3)]
    assert share((13, 5), (gate_up, HIDDEN(5)), 2, 1) is None
    assert share((18, 5), (gate_up, HIDDEN(5)), 2, 1) is None, "three shares, but two ranks"


@pytest.mark.few(24)
@pytest.mark.parametrize("name", CASES)
def test_every_family_names_the_axes_of_every_weight(name: str) -> None:
    files = open_model(saved(name).path)
    metered = MeteredModel(files)
    asked, model = metered.build.weights, metered.model
    assert asked.keys() >= metered.shapes.read.keys()
    streams = {model.hidden, model.stream_size or model.hidden}
    for one in asked.values():
        assert sizes(one.axes) == files.source.shape(one.name)
        for axis in one.axes:
            assert isinstance(axis, WeightAxis)
            for part in axis.parts:
                assert part.kind is not AxisKind.SIZE, f"{one.name} has an axis without a name"
                assert part.kind is not HIDDEN or part in streams, f"{one.name} has {part.text}"
                assert part.kind is not VOCAB or part == model.vocab
