"""NVML through its C interface: a library with two GPUs is compiled here, since few machines have one."""

import shutil
import subprocess
from pathlib import Path

import pytest

from nybble.devices import describe, probe
from nybble.devices.gpu import Gpu, Nvml, NvmlError, read_gpus

# The second has no memory of its own and tells no power.
TWO_GPUS = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
static int started;
int nvmlInit_v2(void) { started = 1; return 0; }
int nvmlShutdown(void) { return started-- == 1 ? 0 : 1; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return started ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
    *handle = (void*)(0x7f0000000000ull + index);
    return index < 2 ? 0 : 2;
}
static int integrated(void* handle) { return handle == (void*)0x7f0000000001ull; }
int nvmlDeviceGetName(void* handle, char* name, unsigned length) {
    strncpy(name, integrated(handle) ? "Integrated" : "Discrete", length);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
    if (integrated(handle)) return 3;
    memory->total = 8ull << 30;
    memory->free = 6ull << 30;
    return 0;
}
int nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) {
    *milliwatts = 61500;
    return integrated(handle) ? 3 : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* millijoules) {
    *millijoules = 5000000000123ull;
    return 0;
}
"""


def compiled(folder: Path, source: str) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "nvml.c").write_text(source)
    library = folder / "libnvml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    return str(library)


def test_every_gpu_is_read(tmp_path: Path) -> None:
    notes: list[str] = []
    gpus = read_gpus(notes, compiled(tmp_path, TWO_GPUS))
    assert gpus == (Gpu("Discrete", 8 << 30, 6 << 30, 61.5), Gpu("Integrated", None, None, None))
    assert notes == []


def test_power_and_energy_have_their_units(tmp_path: Path) -> None:
    with Nvml(compiled(tmp_path, TWO_GPUS)) as nvml:
        assert nvml.watts(0) == 61.5
        assert nvml.joules(0) == 5000000000.123
        with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByIndex_v2 returned 2"):
            nvml.watts(2)
    with pytest.raises(NvmlError, match="nvmlDeviceGetCount_v2 returned 1"):
        _ = nvml.count


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("int nvmlInit_v2(void) { return 9; }", "nvmlInit_v2 returned 9"),
        ("int unrelated;", "NVML has no nvmlInit_v2"),
        (None, "is not there"),
    ],
)
def test_without_a_driver_a_note_says_so(tmp_path: Path, source: str | None, why: str) -> None:
    notes: list[str] = []
    library = str(tmp_path / "absent.so") if source is None else compiled(tmp_path, source)
    assert read_gpus(notes, library) is None
    assert len(notes) == 1
    assert why in notes[0]


def test_this_machine_says_which_gpus_it_has() -> None:
    machine = probe()
    shown = dict(describe(machine))
    if machine.gpus is None:
        assert any(note.startswith("GPU memory:") for note in machine.notes)
    else:
        assert all(f"GPU {number}" in shown for number in range(len(machine.gpus)))
