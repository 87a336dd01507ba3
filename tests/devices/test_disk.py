"""How fast a disk is read, from files that are there and without leaving any."""

import errno
import os
from pathlib import Path

import pytest

from nybble.devices import disk_read_rate
from nybble.devices.disk import BLOCK
from nybble.errors import SettingError

LARGE = 9 * BLOCK + 1000  # of which the last part is never read


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(LARGE))
    (tmp_path / "config.json").write_text("{}")
    return file


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_what_is_there_is_read_and_nothing_is_written(large_file: Path, name: str) -> None:
    before = sorted(large_file.parent.iterdir())
    rate = disk_read_rate(large_file.parent / name, seconds=0.05)
    assert rate.bytes_read >= BLOCK
    assert rate.bytes_read % BLOCK == 0
    assert rate.bytes_per_second > 0
    assert sorted(large_file.parent.iterdir()) == before


def test_a_folder_of_small_files_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert disk_read_rate(tmp_path, seconds=0.05).bytes_read >= BLOCK
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_file_system_without_direct_reads_is_read_all_the_same(
    large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, direct = os.open, getattr(os, "O_DIRECT", 0)

    def refuse(path: str, flags: int, *mode: int, **keywords: int) -> int:
        if direct and flags & direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    rate = disk_read_rate(large_file, seconds=0.05)
    assert not rate.direct
    assert rate.bytes_read >= BLOCK


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="absent"):
        disk_read_rate(tmp_path / "absent")
