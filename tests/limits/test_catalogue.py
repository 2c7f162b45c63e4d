"""The catalogue: every packaged entry, and files written by users."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from bankfull.errors import ConfigError
from bankfull.limits.machine.catalogue import KINDS, TYPES, Catalogue, load
from bankfull.limits.machine.charts import chart_of

ASKED_FOR = (
    "a10",
    "l4",
    "l40s",
    "a100-40gb",
    "a100-80gb",
    "h100",
    "h200",
    "b200",
    "mi300x",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "gaudi-2",
    "gaudi-3",
    "wse-3",
    "m4-max",
    "m3-ultra",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "epyc-9654",
    "xeon-8480",
    "graviton4",
    "cpu-desktop",
    "cpu-laptop",
)
WHOLE = """
[[device]]
name = "mine"
title = "My device"
vendor = "me"
kind = "npu"
flops = { bfloat16 = 1e12 }
memory_bytes = 8e9
bytes_per_s = 1e11
source = "the box"
date = 2026-01-31
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    monkeypatch.setenv("BANKFULL_CONFIG", str(folder))
    return folder


@pytest.fixture(scope="module")
def known() -> Catalogue:
    return load()


def refusal(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert "bad.toml" in message and "\n" not in message
    return message


@pytest.mark.parametrize("name", ASKED_FOR)
def test_every_device_that_was_asked_for_is_there(known: Catalogue, name: str) -> None:
    assert known.find(name).name == name


def test_every_entry_is_plausible_and_says_where_it_comes_from(known: Catalogue) -> None:
    for device in known:
        assert device.kind in KINDS and set(device.flops) <= set(TYPES), device.name
        assert date(2026, 1, 1) <= device.date and device.source, device.name
        assert device.source.startswith("https://") or device.unverified, device.name
        assert device.note or not device.unverified, f"{device.name}: lacks a note on what is unverified"
        assert 1e9 < device.memory_bytes < 1e13 and 1e10 < device.bytes_per_s < 1e17, device.name
        assert device.price_source == "" or device.price_source.startswith("https://"), device.name
        assert device.dollars_per_hour is None or 0.1 < device.dollars_per_hour < 100, device.name
        # Narrower operands are never slower. A rate doubled by sparsity would mostly show here.
        order = [device.flops[t] for t in ("float32", "bfloat16", "float8", "float4") if t in device.flops]
        assert order == sorted(order), device.name
        if {"bfloat16", "float8"} <= set(device.flops):
            assert device.flops["float8"] <= 2.05 * device.flops["bfloat16"], device.name


@pytest.mark.parametrize(
    ("name", "ridge"), [("a100", 153), ("h100", 295), ("h200", 206), ("b200", 281), ("rtx-4090", 164), ("tpu-v5e", 240)]
)
def test_ridges_are_the_known_ones(known: Catalogue, name: str, ridge: float) -> None:
    """Dense bfloat16 peak over bandwidth, compared with values from the literature."""
    assert known.find(name).ridge("bfloat16") == pytest.approx(ridge, rel=0.01)


def test_a_device_is_found_by_any_of_its_names(known: Catalogue) -> None:
    for spelled in ("a100", "A100-80GB", "a100 80gb", "A100_80"):
        assert known.find(spelled).name == "a100-80gb"
    with pytest.raises(ConfigError, match="did you mean h100"):
        known.find("h1000")
    with pytest.raises(ConfigError, match="it has a10, l4"):
        known.find("zzzzz")


def test_an_entry_becomes_ceilings_that_a_roofline_can_be_drawn_of(known: Catalogue) -> None:
    device = known.find("h200")
    found = device.ceilings()
    assert found.read_at(1e9) == found.read_bytes_per_s == 4.8e12
    assert found.flops_of("torch.bfloat16") == found.rates("bfloat16").own == 989.4e12
    assert found.cpu == device.title and device.source in found.instrument
    chart = chart_of(found)
    roofs = {series.name: series.points for series in chart.series}
    assert roofs["bfloat16, float16"][1] == (pytest.approx(206.1, rel=1e-3), 989.4e12)
    with pytest.raises(ConfigError, match="no float32 rate for tpu-v5e"):
        known.find("tpu-v5e").flops_of("float32")


def test_caveats_are_reported(known: Catalogue) -> None:
    assert known.find("h100").caveats == []
    (figures,) = known.find("wse-3").caveats
    assert "wse-3" in figures and "unverified" in figures and "sparse" in figures
    (price,) = known.find("tpu-v5e").caveats
    assert "$1.20" in price and "assumption" in price
    assert [known.find(name).supported for name in ("h100", "cpu-laptop", "mi300x", "m4-max", "tpu-v5e")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_json_has_every_field(known: Catalogue) -> None:
    found = known.find("h200").as_json()
    assert found["flops"]["float8"] == 1978.9e12 and found["date"] == "2026-11-15" and found["supported"] is True
    assert found["aliases"] == ("h200-sxm",) and found["unverified"] is False


def test_a_users_file_adds_and_corrects(own_folder: Path, tmp_path: Path) -> None:
    (own_folder / "catalogue.toml").write_text(
        WHOLE + '[[device]]\nname = "tpu-v5e"\ndollars_per_hour = 0.5\n[[device]]\nname = "h100"\nwatts = 500\n'
    )
    found = load()
    assert found.find("mine").memory_bytes == 8e9 and found.find("mine").caveats == []
    assert found.find("h100").watts == 500 and found.find("h100").bytes_per_s == 3.35e12
    corrected = found.find("tpu-v5e")
    assert corrected.dollars_per_hour == 0.5 and "catalogue.toml" in corrected.price_source and corrected.caveats == []
    named = tmp_path / "named.toml"
    named.write_text('[[device]]\nname = "mine"\ntitle = "Named last"\n')
    assert load(named).find("mine").title == "Named last"


def test_without_a_home_there_is_only_what_comes_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("BANKFULL_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert load().find("h100")


def test_the_users_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BANKFULL_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "bankfull").mkdir()
    (tmp_path / "bankfull" / "catalogue.toml").write_text(WHOLE)
    assert load().find("mine")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("device = [", "is not TOML"),
        (b"\xff\xfe", "not UTF-8"),
        ("a = " + "[" * 5000, "is not TOML"),
        ("devices = 3", "the top-level key 'devices'"),
        ("[device]\nname = 'x'", "[[device]], in double brackets"),
        ("[[device]]\ntitle = 'x'", "device 1 has no name"),
        ("[[device]]\nname = 'My Device'", "lower-case"),
        (WHOLE + WHOLE, "'mine' twice"),
        ("[[device]]\nname = 'new'\nwatts = 3", "'new' lacks title, vendor, kind, flops"),
        (WHOLE + "wats = 5", "unknown field 'wats'; did you mean 'watts'?"),
        (WHOLE + "zzz = 5", "unknown field 'zzz'."),
        (WHOLE.replace("8e9", '"8 GB"'), "memory_bytes must be a number above 0, not '8 GB'"),
        (WHOLE.replace("8e9", "-1"), "memory_bytes must be a number above 0, not -1"),
        (WHOLE.replace("8e9", "true"), "memory_bytes must be a number above 0, not True"),
        (WHOLE.replace("8e9", "inf"), "memory_bytes must be a number above 0, not inf"),
        (WHOLE.replace("8e9", "nan"), "memory_bytes must be a number above 0, not nan"),
        (WHOLE.replace('"npu"', '"car"'), "kind must be one of cpu, gpu"),
        (WHOLE.replace('"me"', "7"), "vendor must be text in quotes, not 7"),
        (WHOLE.replace("{ bfloat16 = 1e12 }", "{}"), "flops must be a table"),
        (WHOLE.replace("{ bfloat16 = 1e12 }", "5"), "flops must be a table"),
        (WHOLE.replace("bfloat16", "bf16"), "unknown type 'bf16'; use one of float64"),
        (WHOLE.replace("1e12", "0"), "flops.bfloat16 must be operations per second, above 0, not 0"),
        (WHOLE.replace("2026-01-31", '"2026"'), "date must be a day"),
        (WHOLE.replace("2026-01-31", "2026-01-31T10:00:00"), "date must be a day"),
        (WHOLE + "unverified = 1", "unverified must be true or false"),
        (WHOLE + "aliases = 'm'", "aliases must be a list"),
        (WHOLE + "aliases = ['h100']", "'h100' names both 'h100' and 'mine'"),
        (WHOLE + "aliases = ['h100-sxm']", "'h100-sxm' names both 'h100' and 'mine'"),
        (b"#" * (1 << 21), "larger than 1 MiB"),
    ],
    ids=range(29),
)
def test_a_mistake_gets_one_clear_sentence(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_the_example_in_the_documentation_is_a_catalogue(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()
    (tmp_path / "own.toml").write_text(page.partition("```toml")[2].partition("```")[0])
    found = load(tmp_path / "own.toml")
    assert found.find("my-server").watts == 300 and found.find("h100").dollars_per_hour == 2.10


def test_a_folder_is_not_a_catalogue(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
