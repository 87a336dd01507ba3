"""The extension built under AddressSanitizer and UndefinedBehaviorSanitizer."""

from pathlib import Path

from wheels import pip_wheel

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def build_sanitized(folder: Path) -> None:
    """A wheel into `folder`, and what it is built of into `folder/build`."""
    settings = {
        "cmake.build-type": "Debug",
        "cmake.define.CMAKE_CXX_COMPILER": "g++",
        "cmake.define.CMAKE_CXX_FLAGS": " ".join(["-O1", *SANITIZERS]),
        "cmake.define.CMAKE_CXX_FLAGS_DEBUG": "-g1",
    }
    built = pip_wheel(folder, [f"{name}={value}" for name, value in settings.items()])
    assert built.returncode == 0, built.stdout + built.stderr


def compiled_kernels(folder: Path) -> list[Path]:
    """What the kernels' sources were compiled to, without the bindings; all of it watched."""
    found = sorted(folder.glob("build/CMakeFiles/_kernels.dir/runtime/kernels/**/*.o"))
    assert found
    assert [path.name for path in found if b"__asan_init" not in path.read_bytes()] == []
    return [path for path in found if "bindings" not in path.name]
