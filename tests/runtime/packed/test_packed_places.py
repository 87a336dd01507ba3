"""Where files of packed weights go, and what full disks, killed writers and several at once leave behind."""

import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoders import Weights
from packed_files import DIGEST, assert_same, mapped, names, with_preamble

from nybble.errors import ModelFormatError
from nybble.export import atomic_file
from nybble.export.weights import LogicalTensor
from nybble.runtime.packed_cache import cache_files, load_packed
from nybble.runtime.packed_weights import FreshlyPacked


def test_where_the_artifact_cannot_be_written_the_users_folder_is_used(
    weights: Weights, good: bytes, tmp_path: Path, user_cache: Path
) -> None:
    (tmp_path / "cache").write_text("a file, so that no folder can be made")
    assert_same(load_packed(tmp_path, DIGEST, weights.spec, lambda: weights), weights)
    assert (user_cache / "nybble" / f"{DIGEST}-packed.bin").read_bytes() == good
    assert_same(mapped(tmp_path, weights), weights)
    assert names(tmp_path) == ["cache"]


def test_no_link_leads_the_writer_elsewhere(weights: Weights, tmp_path: Path, user_cache: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact/cache").symlink_to(tmp_path / "elsewhere")
    load_packed(tmp_path / "artifact", DIGEST, weights.spec, lambda: weights)
    assert names(tmp_path) == []
    assert len(names(user_cache)) == 1


def test_where_nothing_can_be_written_the_weights_are_packed_each_time(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache/below a file"))
    with caplog.at_level(logging.INFO, "nybble"):
        for _ in range(2):
            source = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
            assert isinstance(source, FreshlyPacked)
    assert len(caplog.records) == 4
    assert all(record.levelno == logging.INFO for record in caplog.records)
    assert all("cannot be kept" in message for message in caplog.messages)


def test_a_full_disk_leaves_nothing_behind(weights: Weights, tmp_path: Path, user_cache: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        source = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(source, FreshlyPacked)
    assert names(tmp_path) == []
    assert names(user_cache) == []


def test_an_error_of_the_weights_is_raised_and_leaves_nothing(weights: Weights, tmp_path: Path) -> None:
    class Damaged(Weights):
        def tensor(self, name: str) -> LogicalTensor:
            if "layers.1" in name:
                raise ModelFormatError(f"{name}: damaged")
            return super().tensor(name)

    with pytest.raises(ModelFormatError, match=r"layers\.1"):
        load_packed(tmp_path, DIGEST, weights.spec, lambda: Damaged(weights.spec, weights.tensors))
    assert names(tmp_path) == []


def child(run: Callable[[], None]) -> int:
    """Runs in a forked process; its number."""
    number = os.fork()
    if number == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return number


def killed(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("place", ["tensor", "fsync", "replace", "_sync_folder"])
@pytest.mark.parametrize("before", [False, True])
def test_a_killed_writer_leaves_the_old_file_or_the_new_one(
    weights: Weights, good: bytes, tmp_path: Path, place: str, before: bool, caplog: Any
) -> None:
    file = cache_files(tmp_path, DIGEST)[0]
    old = with_preamble(good, digest=bytes(32))
    file.parent.mkdir()
    if before:
        file.write_bytes(old)

    class Killed(Weights):
        def tensor(self, name: str) -> LogicalTensor:
            if place == "tensor" and "layers.1" in name:
                killed()
            return super().tensor(name)

    def write() -> None:
        if place != "tensor":
            setattr(atomic_file if place.startswith("_") else os, place, killed)
        load_packed(tmp_path, DIGEST, weights.spec, lambda: Killed(weights.spec, weights.tensors))

    _, status = os.waitpid(child(write), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    if place == "_sync_folder":
        assert file.read_bytes() == good
    else:
        assert (file.read_bytes() if file.exists() else None) == (old if before else None)
    file.unlink(missing_ok=True)
    load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    assert names(tmp_path) == ["cache/packed.bin"]
    assert file.read_bytes() == good


def test_several_processes_that_write_at_once_all_work(
    weights: Weights, good: bytes, tmp_path: Path, user_cache: Path
) -> None:
    def start() -> None:
        for _ in range(10):
            (tmp_path / "cache/packed.bin").unlink(missing_ok=True)
            assert_same(load_packed(tmp_path, DIGEST, weights.spec, lambda: weights), weights)

    children = [child(start) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in children] == [0, 0, 0]
    load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    assert names(tmp_path) == ["cache/packed.bin"]
    assert names(user_cache) == []  # none had to give way
    assert (tmp_path / "cache/packed.bin").read_bytes() == good
