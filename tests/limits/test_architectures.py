"""Architectures side by side, from the meter alone."""

from __future__ import annotations

import pytest

from bankfull.errors import ConfigError
from bankfull.limits.machine.targets import machine_of
from bankfull.limits.model.architectures import (
    ARCHITECTURES,
    LAYERS,
    PARAMETERS,
    Architecture,
    ArchitectureComparison,
    architectures,
    sized,
)
from bankfull.models.kinds import KINDS

CONTEXTS = (128, 4096, 65536)


@pytest.fixture(scope="module")
def compared() -> ArchitectureComparison:
    return ArchitectureComparison(machine_of("h200"), 1, CONTEXTS)


def test_all_have_equally_many_parameters_and_layers(compared: ArchitectureComparison) -> None:
    for curve in compared.curves:
        assert curve.metered.parameters == pytest.approx(PARAMETERS, rel=0.01), curve.architecture.name
        assert len(curve.metered.model.blocks) == LAYERS, curve.architecture.name


def test_an_architecture_is_left_out_only_where_its_mixers_do_not_exist() -> None:
    assert len({one.name for one in ARCHITECTURES}) == len(ARCHITECTURES)
    assert [one for one in ARCHITECTURES if one not in architectures()] == [
        one for one in ARCHITECTURES if set(one.kinds) - set(KINDS)
    ]


def test_state_grows_as_each_architecture_says(compared: ArchitectureComparison) -> None:
    state = {c.architecture.name: [point.state_bytes for point in c.points] for c in compared.curves}
    token = 2 * 16 * 128 * 2 * LAYERS  # K and V of 16 heads in bfloat16
    assert state["attention, 16 KV heads (MHA)"] == [context * token for context in CONTEXTS]
    assert state["attention, 1 KV head (MQA)"] == [context * token // 16 for context in CONTEXTS]
    assert state["K/V shared by 2 layers (CLA)"] == [context * token // 2 for context in CONTEXTS]
    latent = [context * (512 + 64) * 2 * LAYERS for context in CONTEXTS]
    assert state["latent attention (MLA)"] == latent
    assert 100 < state["attention, 16 KV heads (MHA)"][2] / state["Character.AI: MQA, windows, CLA"][2] < 16 * 2 * 6
    window, mixed = state["window of 1,024"], state["5 windows of 1,024 to 1 full"]
    assert window[1] == window[2] <= (1024 + 64) * token and window[0] == 128 * token
    assert window[2] < mixed[2] < state["attention, 16 KV heads (MHA)"][2] / 4
    for curve in compared.curves:
        if "attention" not in curve.architecture.kinds and "mla" not in curve.architecture.kinds:
            assert len(set(state[curve.architecture.name])) == 1, curve.architecture.name


def test_a_step_takes_at_least_the_time_to_read_weights_and_state(compared: ArchitectureComparison) -> None:
    for curve in compared.curves:
        weights = 2 * curve.metered.parameters
        bandwidth = compared.machine.ceilings.read_at(weights)
        times = [point.seconds for point in curve.points]
        assert times == sorted(times) and times[0] > weights / bandwidth, curve.architecture.name
    by_name = {c.architecture.name: c.points[-1].seconds for c in compared.curves}
    assert by_name["attention, 16 KV heads (MHA)"] > 2 * by_name["attention, 4 KV heads (GQA)"]


def test_the_table_and_the_charts_have_a_row_and_a_line_for_each(compared: ArchitectureComparison) -> None:
    names = [curve.architecture.name for curve in compared.curves]
    table = compared.table()
    assert list(table.columns[0].cells) == names and len(table.columns) == 2 + 2 * len(CONTEXTS)
    for chart in compared.charts().values():
        assert [series.name for series in chart.series] == names
        assert all(len(series.points) == len(CONTEXTS) for series in chart.series)


def test_mixers_that_leave_no_room_for_a_feed_forward_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match="mixers alone have more than 1 M"):
        sized(Architecture("attention", "2 x global"), 1_000_000)
