"""Tuned settings are kept for one model on one CPU, and used nowhere else."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from nybble.devices import probe, resolve_device, save_tuned, with_tuned
from nybble.devices.tuned import tuned_file
from nybble.errors import OutputError

MACHINE = replace(probe(providers=False), usable_cores=4)
PROFILE = replace(
    resolve_device("auto", MACHINE), memory_bytes=4 << 30, memory_budget=2 << 30, threads=4, kv_dtype="f32"
)
TUNED = replace(PROFILE, description="Tuned", threads=3, token_budget=128, kv_dtype="int8", speculation="off")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "nybble"


def test_what_was_found_is_used_and_memory_is_what_it_is_now(caplog: pytest.LogCaptureFixture) -> None:
    file = save_tuned(TUNED, "abc", MACHINE)
    less = replace(PROFILE, memory_budget=1 << 30)
    with caplog.at_level(logging.INFO, "nybble"):
        found = with_tuned(less, "abc", MACHINE)
    assert found == replace(less, threads=3, token_budget=128, kv_dtype="int8", speculation="off")
    assert [record.getMessage() for record in caplog.records] == [f"{file}: Tuned"]
    save_tuned(replace(TUNED, threads=1), "abc", MACHINE)
    assert with_tuned(PROFILE, "abc", MACHINE).threads == 1


@pytest.mark.parametrize(
    "change",
    [{"cpu_brand": "Other"}, {"cpu_brand": None}, {"kernel_isa": "other"}, {"usable_cores": 2}],
)
def test_another_cpu_or_model_finds_nothing(change: dict[str, object]) -> None:
    save_tuned(TUNED, "abc", MACHINE)
    assert with_tuned(PROFILE, "abcd", MACHINE) == PROFILE
    assert with_tuned(PROFILE, "abc", replace(MACHINE, **change)) == PROFILE  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff", b"threads = 3\n", b"[" * 1000, b" " * 70_000, b"threads = 0\n", None],
)
def test_a_damaged_file_is_left_with_one_line(damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    file = save_tuned(TUNED, "abc", MACHINE)
    if damage is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(damage)
    assert with_tuned(PROFILE, "abc", MACHINE) == PROFILE
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{file}: tuned settings are not used: ")


def test_what_cannot_be_kept_is_an_error(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="memory"):
        save_tuned(replace(TUNED, memory_bytes=None, memory_budget=None), "abc", MACHINE)
    config.write_text("a file where the folder would be")
    with pytest.raises(OutputError, match="cannot be kept"):
        save_tuned(TUNED, "abc", MACHINE)
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", "nowhere")
    assert tuned_file("abc", MACHINE) is None
    assert with_tuned(PROFILE, "abc", MACHINE) == PROFILE
    with pytest.raises(OutputError, match="no home folder"):
        save_tuned(TUNED, "abc", MACHINE)
