"""The kernels' C++ tests, built without the bindings: on this machine, under sanitizers, and on other CPUs.

An emulated AArch64 CPU must give the digest that this machine's scalar kernels give; an old x86-64 CPU must
get by with what it has.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sanitized import SANITIZERS, compiled_kernels
from shared import kept

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "runtime" / "kernels"
X86 = platform.machine() in ("x86_64", "AMD64")
NATIVE = "x86_64" if X86 else "aarch64"
COMMON = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-fno-math-errno"]
WRAPPED = "-Wl,--wrap=malloc,--wrap=calloc,--wrap=mmap"  # so that allocations are counted
JOBS = 2
PROGRAM = "kernel_test"
# The program's parts: what an instruction set does alone, and what threads do together.
ALONE = ("elementwise", "linear", "attention", "experts", "sampler")
TOGETHER = ("head", "decoder", "stream", "pool")

Build = Callable[..., Path]


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command[0]}: {result.stdout}{result.stderr}"
    return result.stdout


def instruction_sets(architecture: str) -> dict[str, list[str]]:
    """The sets of an architecture and their flags, as CMakeLists.txt has them."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    found = {m[1]: m[2].split() for m in re.finditer(r"^\s+nybble_isa\((\w+)\s([^)]*)\)", text, re.MULTILINE)}
    neon = {"neondot"}
    return {name: flags for name, flags in found.items() if (name in neon) == (architecture == "aarch64")}


def listed_sources() -> list[Path]:
    """The extension's sources for every architecture, as CMakeLists.txt has them."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    return [KERNELS / name for name in re.findall(r"\$\{KERNELS\}/([\w/]+\.cpp)", text)]


def build(
    folder: Path, architecture: str, compiler: str, flags: Sequence[str], made: Sequence[Path] = ()
) -> None:
    """The test program into a folder, from the kernels' sources without the bindings, or from `made`, what
    those were compiled to with the same flags."""
    sets = instruction_sets(architecture)
    assert sets
    sources, jobs = sorted(Path(__file__).parent.glob("*.cpp")), list[tuple[Path, list[str]]]()
    if not made:
        sources += [path for path in listed_sources() if "bindings" not in path.name]
        # The slowest first; linked last, as CMake links them.
        jobs = [(KERNELS / "isa" / f"{name}.cpp", own) for name, own in sets.items()]
    linked = [(source, list[str]()) for source in sources] + jobs
    assert len({source.stem for source, _ in linked}) == len(linked), "object files are named by stem"
    defines = [f"-DNYBBLE_WITH_{name.upper()}" for name in sets]

    def compile_one(job: tuple[Path, list[str]]) -> None:
        source, own = job
        out = folder / f"{source.stem}.o"
        run(compiler, *COMMON, *flags, *defines, *own, "-c", source, "-o", out)

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(compile_one, jobs[::-1] + linked[: len(sources)]))
    objects = [*(folder / f"{source.stem}.o" for source, _ in linked), *made]
    run(compiler, *flags, *objects, "-o", folder / PROGRAM, "-pthread", WRAPPED)


@pytest.fixture(scope="module")
def built() -> Build:
    """`built(architecture, compiler, *flags)`: the program, built once for the same sources and arguments."""

    def make(architecture: str, compiler: str, *flags: str) -> Path:
        name = "-".join(("kernels", architecture, *(re.sub(r"\W+", "-", flag) for flag in flags)))
        files = [path for folder in (KERNELS, Path(__file__).parent) for path in folder.rglob("*")]
        sources = [path for path in files if path.suffix in (".cpp", ".h")]
        settings = [run(compiler, "--version"), *COMMON, *flags, str(instruction_sets(architecture)), WRAPPED]
        return kept(name, sources, settings, lambda out: build(out, architecture, compiler, flags)) / PROGRAM

    return make


@pytest.fixture(scope="module")
def program(built: Build) -> Path:
    return built(NATIVE, found("c++"))


@pytest.fixture(scope="module")
def scalar_digest(program: Path) -> str:
    digest = run(program, "--digest", "scalar")
    assert re.fullmatch(r"[0-9a-f]{16}\n", digest)
    return digest


def found(tool: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    return tool


def test_every_source_is_in_the_extension() -> None:
    sets = [KERNELS / "isa" / f"{name}.cpp" for a in ("x86_64", "aarch64") for name in instruction_sets(a)]
    assert sorted(listed_sources() + sets) == sorted(KERNELS.rglob("*.cpp"))


def test_every_set_of_this_cpu_gives_the_bits_of_scalar(program: Path) -> None:
    sets = run(program, "--list").split()
    assert sets[-1] == "scalar"
    lines = run(program).splitlines()
    assert [line.split(":")[0] for line in lines] == sets
    assert all(int(line.split()[1]) > 50 for line in lines)


def test_sets_share_no_compiled_function(program: Path) -> None:
    """Of an inline function that several files compile the linker keeps one: were it that of a newer set, an
    old CPU would meet instructions it lacks."""
    for name in instruction_sets(NATIVE):
        symbols = run(found("nm"), "-C", program.parent / f"{name}.o").splitlines()
        weak = [line.split(" ", 2)[2] for line in symbols if line[17:18] in "WVu"]
        assert weak
        assert [symbol for symbol in weak if f"nybble::{name}::" not in symbol] == []


@pytest.mark.slow
def test_no_address_or_undefined_behaviour_error(sanitized: Path, tmp_path: Path) -> None:
    """Of scalar, which sanitizers make slow, only what is its own."""
    build(tmp_path, NATIVE, "g++", SANITIZERS, compiled_kernels(sanitized))
    program = tmp_path / PROGRAM
    for name in run(program, "--list").split():
        parts = ALONE if name == "scalar" else ALONE + TOGETHER
        run(program, "--digest", name, *parts, ASAN_OPTIONS="detect_stack_use_after_return=1")


@pytest.mark.slow
def test_no_data_race(built: Build) -> None:
    program = built(NATIVE, found("c++"), "-fsanitize=thread")
    best = run(program, "--list").split()[0]
    run(program, "--digest", best, *TOGETHER, TSAN_OPTIONS="halt_on_error=1")


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="compares an emulated AArch64 CPU with x86-64")
def test_neon_gives_the_bits_of_scalar_on_x86(built: Build, scalar_digest: str) -> None:
    program = built("aarch64", found("aarch64-linux-gnu-g++"), "-static")
    emulator = found("qemu-aarch64")
    assert run(emulator, "-cpu", "max", program, "--list").split() == ["neondot", "scalar"]
    assert run(emulator, "-cpu", "max", program, "--digest", "neondot") == scalar_digest
    # Without the dot product instruction the scalar set does it.
    assert run(emulator, "-cpu", "cortex-a72", program, "--list").split() == ["scalar"]


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="runs this machine's program on an older x86-64 CPU")
def test_an_old_x86_cpu_runs_scalar(program: Path) -> None:
    assert run(found("qemu-x86_64"), "-cpu", "Nehalem", program, "--list").split() == ["scalar"]
    digest = ("--digest", "scalar", "elementwise", "linear")  # the rest would take a minute
    assert run("qemu-x86_64", "-cpu", "Nehalem", program, *digest) == run(program, *digest)


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="runs this machine's program on another x86-64 CPU")
def test_a_cpu_without_avx512_runs_avx2(program: Path) -> None:
    assert run(found("qemu-x86_64"), "-cpu", "Haswell", program, "--list").split() == ["avx2", "scalar"]
    parts = ("elementwise", "linear")
    digest = run("qemu-x86_64", "-cpu", "Haswell", program, "--digest", "avx2", *parts)
    assert digest == run(program, "--digest", "scalar", *parts)
