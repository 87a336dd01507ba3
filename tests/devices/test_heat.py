"""What a CPU says about having been slowed down."""

import pytest

from nybble.devices import read_heat, slowed

CPU = "sys/devices/system/cpu/cpu{}"
PI = "sys/devices/platform/soc/soc:firmware/get_throttled"


def counts(cpu: int, core: int, package: int) -> dict[str, str]:
    folder = f"{CPU.format(cpu)}/thermal_throttle"
    return {f"{folder}/core_throttle_count": f"{core}\n", f"{folder}/package_throttle_count": f"{package}\n"}


def clock(cpu: int, now: int, highest: int, allowed: int) -> dict[str, str]:
    """In kHz, as the kernel writes them."""
    folder = f"{CPU.format(cpu)}/cpufreq"
    return {
        f"{folder}/scaling_cur_freq": f"{now}\n",
        f"{folder}/cpuinfo_max_freq": f"{highest}\n",
        f"{folder}/scaling_max_freq": f"{allowed}\n",
    }


def between(make_tree, before: dict[str, str], after: dict[str, str]) -> tuple[str, ...]:
    first = read_heat(make_tree(before))
    return slowed(first, read_heat(make_tree(after)))


def test_counters_that_rose_are_heat_and_old_ones_are_not(make_tree):
    before = counts(0, 5, 20) | counts(1, 7, 20)
    assert between(make_tree, before, before) == ()
    after = counts(0, 8, 20) | counts(1, 7, 20)
    assert between(make_tree, before, after) == ("the CPU was throttled by heat (3 events)",)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("0", "0", None),
        ("50000", "50000", None),  # in the past
        ("0", "50000", "under-voltage, throttling"),  # meanwhile
        ("0", "80008", "soft temperature limit"),
        ("e0000", "e0002", "capped frequency"),
    ],
)
def test_the_bits_of_a_raspberry_pi(make_tree, before, after, said):
    expected = () if said is None else (f"the firmware reports {said}",)
    assert between(make_tree, {PI: before + "\n"}, {PI: after + "\n"}) == expected


@pytest.mark.parametrize(
    ("now", "allowed", "said"),
    [
        (2_400_000, 2_400_000, None),
        (2_000_000, 2_400_000, None),
        (1_500_000, 2_400_000, "the clock was at 1.50 GHz of 2.40 GHz"),
        (1_500_000, 1_500_000, "the clock is limited to 1.50 GHz of 2.40 GHz"),
    ],
)
def test_clocks(make_tree, now, allowed, said):
    tree = clock(0, now, 2_400_000, allowed) | clock(1, now, 2_400_000, allowed)
    assert between(make_tree, tree, tree) == (() if said is None else (said,))


@pytest.mark.parametrize("text", ["", "none\n", "-\n"])
def test_what_is_not_told_is_no_reason(make_tree, text):
    names = [*counts(0, 1, 1), *clock(0, 1, 1, 1), PI]
    before = dict.fromkeys(names, "1\n")
    assert between(make_tree, {}, {}) == ()
    assert between(make_tree, before, dict.fromkeys(names, text)) == ()
