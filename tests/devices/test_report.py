import json

import pytest

from nybble.devices import (
    describe,
    describe_profile,
    list_profiles,
    machine_json,
    probe,
    profile_json,
)


def test_what_cannot_be_read_says_so(make_tree):
    rows = dict(describe(probe(make_tree({}), providers=False)))
    for label in ("CPU", "Instruction sets", "Caches", "Memory"):
        assert rows[label] == "can't be read here"


def test_limits_are_shown_beside_what_is_usable(make_tree):
    tree = make_tree(
        {
            "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n",
            "proc/self/status": "Cpus_allowed_list:\t0-7\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory.max": "4000000000\n",
            "sys/fs/cgroup/memory.current": "1000000000\n",
            "sys/fs/cgroup/cpu.max": "250000 100000\n",
        }
    )
    rows = dict(describe(probe(tree, providers=False)))
    assert rows["Memory"] == "3.00 GB usable now (16.4 GB in all, a limit of 4.00 GB)"
    assert rows["Cores"] == "2 usable (8 logical, a quota of 2.5)"


@pytest.mark.parametrize("name", ["", "scalar", "avx9000"])
def test_the_kernels_instruction_set_is_shown(name, monkeypatch):
    kernels = pytest.importorskip("nybble._kernels")
    monkeypatch.setenv("NYBBLE_ISA", name)
    sets, machine = kernels.supported_kernels(), probe(providers=False)
    assert machine.kernel_sets == tuple(sets)
    shown = dict(describe(machine))["C++ kernels"]
    if name == "avx9000":
        assert machine.kernel_isa is None
        assert shown == f"NYBBLE_ISA names none of {', '.join(sets)}"
        assert any("NYBBLE_ISA is 'avx9000'" in note for note in machine.notes)
    else:
        assert machine.kernel_isa == (name or sets[0])
        assert shown.startswith(f"{machine.kernel_isa} (of {', '.join(sets)})")
        assert ("NYBBLE_ISA" in shown) == bool(name)


def test_json_holds_what_the_rows_show(make_tree):
    machine = probe(make_tree({"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 500 kB\n"}), providers=False)
    data = json.loads(json.dumps(machine_json(machine)))
    assert data["usable_memory"] == 512_000
    assert data["caches"] is None
    assert data["notes"] == list(machine.notes)
    json.dumps(machine_json(probe()))


def test_every_profile_can_be_shown():
    for profile in list_profiles():
        assert dict(describe_profile(profile))["Profile"] == profile.name
        data = json.loads(json.dumps(profile_json(profile)))
        assert data["memory_budget"] == profile.memory_budget
        assert [p["name"] for p in data["providers"]] == [p.name for p in profile.providers]
