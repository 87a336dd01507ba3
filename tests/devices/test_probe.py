import os

import pytest

from nybble.devices import probe
from nybble.devices.cpu import read_cpu

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    12000000 kB\n"
KIB = 1024


def status(cpus: str) -> str:
    return f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0\n"


def topology(siblings: dict[int, str]) -> dict[str, str]:
    folder = "sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    return {folder.format(cpu): f"{text}\n" for cpu, text in siblings.items()}


def cgroup(files: dict[str, str]) -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    } | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}


def test_affinity_narrows_the_cores(make_tree):
    tree = make_tree({"proc/self/status": status("0-1,4")} | topology({0: "0", 1: "1", 4: "4"}))
    machine = probe(tree, providers=False)
    assert (machine.logical_cores, machine.physical_cores, machine.usable_cores) == (3, 3, 3)


def test_hyper_threads_of_one_core_count_once(make_tree):
    tree = make_tree({"proc/self/status": status("0-3")} | topology({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}))
    machine = probe(tree, providers=False)
    assert (machine.logical_cores, machine.physical_cores, machine.usable_cores) == (4, 2, 2)


@pytest.mark.parametrize(("quota", "usable"), [("250000", 2), ("50000", 1), ("9900000", 4), ("max", 4)])
def test_a_quota_narrows_the_cores_and_one_always_stays(make_tree, quota, usable):
    tree = make_tree({"proc/self/status": status("0-3")} | cgroup({"cpu.max": f"{quota} 100000\n"}))
    assert probe(tree, providers=False).usable_cores == usable


def test_without_a_topology_every_logical_core_counts_and_a_note_says_so(make_tree):
    machine = probe(make_tree({"proc/self/status": status("0-7")}), providers=False)
    assert (machine.physical_cores, machine.usable_cores) == (None, 8)
    assert any("topology" in note for note in machine.notes)


def test_usable_memory_is_what_is_available_not_the_total(make_tree):
    machine = probe(make_tree({"proc/meminfo": MEMINFO}), providers=False)
    assert machine.memory_total == 16000000 * KIB
    assert machine.usable_memory == 12000000 * KIB


def test_a_control_group_narrows_the_memory(make_tree):
    tree = make_tree(
        {"proc/meminfo": MEMINFO} | cgroup({"memory.max": "600000000\n", "memory.current": "200000000\n"})
    )
    machine = probe(tree, providers=False)
    assert (machine.memory_limit, machine.usable_memory) == (600000000, 400000000)


def test_a_limit_above_what_is_available_changes_nothing(make_tree):
    tree = make_tree({"proc/meminfo": MEMINFO} | cgroup({"memory.max": str(2**50), "memory.current": "0\n"}))
    assert probe(tree, providers=False).usable_memory == 12000000 * KIB


def test_a_limit_of_address_space_is_an_upper_bound(make_tree):
    pages = 50
    tree = make_tree(
        {
            "proc/meminfo": MEMINFO,
            "proc/self/limits": "Limit  Soft Limit  Hard Limit\n"
            "Max address space  1000000000  unlimited  bytes\n",
            "proc/self/statm": f"{pages} 10 5 1 0 20 0\n",
        }
    )
    assert probe(tree, providers=False).usable_memory == 1000000000 - pages * os.sysconf("SC_PAGE_SIZE")


def test_a_machine_that_tells_nothing_is_still_probed(make_tree):
    machine = probe(make_tree({}), providers=False)
    assert machine.usable_cores >= 1
    for value in (
        machine.cpu_brand,
        machine.isa,
        machine.caches,
        machine.memory_total,
        machine.usable_memory,
    ):
        assert value is None
    for what in ("CPU name", "instruction sets", "caches", "memory"):
        assert any(note.startswith(what) for note in machine.notes), what


def test_an_arm_machine_without_the_extension(make_tree):
    tree = make_tree(
        {
            "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd aes asimdhp asimddp\nCPU part\t: 0xd0b\n\n"
            "Hardware\t: BCM2835\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n",
            "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n",
            "sys/devices/system/cpu/cpu0/cache/index0/size": "64K\n",
            "sys/devices/system/cpu/cpu0/cache/index0/type": "Data\n",
            "sys/devices/system/cpu/cpu0/cache/index0/coherency_line_size": "64\n",
            "sys/devices/system/cpu/cpu0/cache/index0/shared_cpu_map": "00000000,0000000f\n",
        }
    )
    cpu = read_cpu(tree)
    assert cpu.brand == "Raspberry Pi 5 Model B Rev 1.0"
    assert cpu.isa == ("neon", "fp16", "dotprod")
    assert cpu.caches is not None
    assert [(c.level, c.type, c.bytes, c.line_bytes, c.shared_by) for c in cpu.caches] == [
        (1, "data", 65536, 64, 4)
    ]


def test_this_machine():
    machine = probe()
    assert 1 <= machine.usable_cores <= (os.cpu_count() or 1)
    assert machine.usable_memory is None or machine.usable_memory > 0
    if machine.providers is not None:
        assert "CPUExecutionProvider" in machine.providers
