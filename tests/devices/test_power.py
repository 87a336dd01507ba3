"""Energy from the files that real kernels write."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble.devices import PowerMeter
from nybble.devices.power_sources import EnergyCounter, PowerGauge, find_sources

RANGE = 262_143_328_850  # microjoules, of a package on a real machine


def zone(number: str, name: str, microjoules: int) -> dict[str, str]:
    folder = f"sys/class/powercap/intel-rapl:{number}"
    return {
        f"{folder}/name": f"{name}\n",
        f"{folder}/energy_uj": f"{microjoules}\n",
        f"{folder}/max_energy_range_uj": f"{RANGE}\n",
    }


def chip(number: int, name: str, files: Mapping[str, str]) -> dict[str, str]:
    folder = f"sys/class/hwmon/hwmon{number}"
    return {f"{folder}/name": f"{name}\n"} | {f"{folder}/{file}": text for file, text in files.items()}


def rail(channel: int, label: str, millivolts: int, milliamperes: int) -> dict[str, str]:
    return {
        f"in{channel}_label": f"{label}\n",
        f"in{channel}_input": f"{millivolts}\n",
        f"curr{channel}_input": f"{milliamperes}\n",
    }


def names(root: Path) -> list[str]:
    return [source.name for source in find_sources(root)[0]]


def watts(root: Path) -> float:
    return sum(source.watts() for source in find_sources(root)[0] if isinstance(source, PowerGauge))


def test_packages_and_memory_are_added_and_nothing_inside_or_around_them(make_tree):
    tree = make_tree(
        zone("0", "package-0", 1_000_000)
        | zone("0:0", "core", 500_000)
        | zone("0:1", "dram", 300_000)
        | zone("1", "package-1", 2_000_000)
        | zone("2", "psys", 9_000_000)
    )
    assert names(tree) == ["rapl 0 package-0", "rapl 0:1 dram", "rapl 1 package-1"]
    with PowerMeter(tree).measure() as energy:
        for file, microjoules in (("0", 1_500_000), ("0:0", 900_000), ("0:1", 400_000), ("2", 9_900_000)):
            (tree / f"sys/class/powercap/intel-rapl:{file}/energy_uj").write_text(str(microjoules))
    assert energy.joules == pytest.approx(0.5 + 0.1)
    assert energy.watts == pytest.approx(0.6 / energy.seconds)


@given(start=st.integers(0, RANGE - 1), drawn=st.integers(0, RANGE - 1))
def test_a_counter_that_starts_again_loses_nothing(tmp_path_factory, start, drawn):
    file = tmp_path_factory.mktemp("rapl") / "sys/class/powercap/intel-rapl:0/energy_uj"
    file.parent.mkdir(parents=True)
    for name, text in zone("0", "package-0", start).items():
        (file.parents[4] / name).write_text(text)
    with PowerMeter(file.parents[4]).measure() as energy:
        file.write_text(str((start + drawn) % RANGE))
    assert energy.joules == pytest.approx(drawn / 1e6, abs=1e-3)


def test_a_counter_that_goes_down_without_a_known_range_is_not_guessed(make_tree):
    tree = make_tree(zone("0", "package-0", 5_000_000) | zone("1", "package-1", 5_000_000))
    folder = tree / "sys/class/powercap/intel-rapl:0"
    (folder / "max_energy_range_uj").unlink()
    with PowerMeter(tree).measure() as energy:
        (folder / "energy_uj").write_text("10")
    assert (energy.joules, energy.watts) == (None, None)


def test_the_rail_that_feeds_all_others_counts_alone(make_tree):
    orin_nano = (
        rail(1, "VDD_IN", 5000, 1500) | rail(2, "VDD_CPU_GPU_CV", 5000, 600) | rail(3, "VDD_SOC", 5000, 400)
    )
    tree = make_tree(chip(0, "tmp451", {"temp1_input": "40000\n"}) | chip(1, "ina3221", orin_nano))
    assert names(tree) == ["rail VDD_IN"]
    assert watts(tree) == pytest.approx(7.5)


def test_rails_of_several_chips_are_added_where_none_feeds_all(make_tree):
    agx_orin = chip(0, "ina3221", rail(1, "VDD_GPU_SOC", 19000, 300) | rail(2, "VDD_CPU_CV", 19000, 100))
    agx_orin |= chip(1, "ina3221", rail(1, "NC", 0, 0) | rail(2, "VIN_SYS_5V0", 5000, 800))
    tree = make_tree(agx_orin)
    assert names(tree) == ["rail VDD_GPU_SOC", "rail VDD_CPU_CV", "rail VIN_SYS_5V0"]
    assert watts(tree) == pytest.approx(5.7 + 1.9 + 4.0)


def test_a_boards_meter_counts_and_a_graphics_cards_does_not(make_tree):
    board = {"power1_average": "45500000\n", "power1_input": "1\n", "power1_label": "total\n"}
    tree = make_tree(
        chip(0, "amdgpu", {"power1_average": "9000000\n"})
        | chip(1, "power_meter", board)
        | chip(2, "ina226", {"power1_input": "2500000\n"})
    )
    assert names(tree) == ["hwmon power_meter total", "hwmon ina226 power1"]
    assert watts(tree) == pytest.approx(48)


def test_counters_come_before_meters_that_would_count_the_same_again(make_tree):
    meter = chip(0, "power_meter", {"power1_average": "45500000\n"})
    sources, _ = find_sources(make_tree(meter | zone("0", "package-0", 1)))
    assert [type(source) for source in sources] == [EnergyCounter]


def test_gauges_are_looked_at_while_the_work_runs(make_tree):
    tree = make_tree(chip(0, "ina226", {"power1_input": "4000000\n"}))
    with PowerMeter(tree).measure() as energy:
        time.sleep(0.15)
    assert energy.joules is not None
    assert energy.joules >= 4 * energy.seconds * 0.99
    with PowerMeter(tree).measure() as energy:
        (tree / "sys/class/hwmon/hwmon0/power1_input").unlink()
    assert energy.joules is None


def test_an_error_inside_is_not_hidden(make_tree):
    tree = make_tree(chip(0, "ina226", {"power1_input": "4000000\n"}))
    with pytest.raises(KeyError), PowerMeter(tree).measure():
        raise KeyError("work")


@pytest.mark.parametrize("text", ["", "none", "0x12"])
def test_what_cannot_be_read_is_named_and_the_next_kind_is_tried(make_tree, text):
    meter = chip(0, "power_meter", {"power1_average": "45500000\n"})
    tree = make_tree(zone("0", "package-0", 1) | meter)
    (tree / "sys/class/powercap/intel-rapl:0/energy_uj").write_text(text)
    found = PowerMeter(tree)
    assert found.sources == ("hwmon power_meter power1",)
    assert found.note.startswith("rapl 0 package-0 can't be read: ")


def test_a_system_that_tells_nothing_says_so(make_tree):
    meter = PowerMeter(make_tree({}))
    with meter.measure() as energy:
        pass
    assert (meter.sources, energy.joules, energy.watts) == ((), None, None)
    assert meter.note == "no RAPL, Jetson rails or power meters in /sys"
