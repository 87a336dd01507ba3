"""A folder appears whole or not at all: exceptions, a full disk, and `kill -9` at every file operation."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nybble.errors import OutputError
from nybble.export import atomic
from nybble.export.atomic import check_output, check_space, new_folder, recover

# Writes a folder of version "new" over one of version "old", and is killed at its N-th file operation, for
# every N from 1 until it survives; after each death prints what an open finds.
KILLED_AT_EVERY_OPERATION = """
import os, signal, sys
from pathlib import Path
from nybble.export import atomic

parent, exchange, exists_before = Path(sys.argv[1]), sys.argv[2] == "exchange", sys.argv[3] == "replace"
if not exchange:
    atomic._exchange = lambda first, second: False
countdown = None

def count(event, arguments):
    global countdown
    if countdown is not None and event.split(".")[0] in ("open", "os", "shutil", "ctypes", "fcntl"):
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)

def write(out, version, overwrite=False):
    with atomic.new_folder(out, overwrite) as folder:
        (folder / "sub").mkdir()
        for name in ("nybble.json", "sub/weights.bin"):
            (folder / name).write_text(version)

def version(out):
    if not out.exists():
        return "none"
    files = ("nybble.json", "sub/weights.bin")
    found = {(out / n).read_text() if (out / n).is_file() else "damaged" for n in files}
    return found.pop() if len(found) == 1 else "mixed"

survived, n = False, 0
while not survived:
    n += 1
    out = parent / f"case-{n}" / "artifact"
    out.parent.mkdir()
    if exists_before:
        write(out, "old")
    child = os.fork()
    if child == 0:
        countdown = n
        write(out, "new", overwrite=True)
        countdown = None
        os._exit(0)
    survived = os.waitpid(child, 0)[1] == 0
    atomic.recover(out)
    after_death = version(out)
    # The next write cleans up what the dead process left.
    write(out, "newer", overwrite=True)
    left = sorted(p.name for p in out.parent.iterdir())
    print(after_death, version(out), ",".join(left))
"""


@pytest.mark.parametrize("how", ["exchange", "two renames"])
@pytest.mark.parametrize("before", ["replace", "create"])
def test_killed_at_any_moment_the_old_folder_or_the_new_one_is_there(
    tmp_path: Path, how: str, before: str
) -> None:
    command = [sys.executable, "-c", KILLED_AT_EVERY_OPERATION, str(tmp_path), how, before]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    cases = [line.split() for line in result.stdout.splitlines()]
    assert len(cases) > 20
    previous = "old" if before == "replace" else "none"
    assert {found for found, _, _ in cases} == {previous, "new"}
    assert [found for found, _, _ in cases][-1] == "new"
    assert {(after, left) for _, after, left in cases} == {("newer", "artifact")}


@pytest.mark.parametrize("exchange", [True, False])
def test_a_process_killed_from_outside_leaves_the_old_folder_and_its_remains_are_cleaned(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "artifact"
    _write(out, "old")
    script = (
        "import sys, time; from pathlib import Path; from nybble.export.atomic import new_folder\n"
        "with new_folder(Path(sys.argv[1]), overwrite=True) as folder:\n"
        "    (folder / 'nybble.json').write_text('half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    # While it lives, another writer leaves its folder alone.
    _write(out, "by another", overwrite=True)
    assert len(list(tmp_path.iterdir())) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    assert (out / "nybble.json").read_text() == "by another"
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    _write(out, "new", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]
    assert (out / "nybble.json").read_text() == "new"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError, MemoryError])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, stop: type[BaseException]) -> None:
    out = tmp_path / "artifact"
    with pytest.raises(stop):
        _write(out, "new", stop=stop)
    assert list(tmp_path.iterdir()) == []
    _write(out, "old")
    with pytest.raises(stop):
        _write(out, "new", overwrite=True, stop=stop)
    assert (out / "nybble.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_one_line_and_leaves_nothing(small_disk: Path) -> None:
    out = small_disk / "artifact"
    with pytest.raises(OutputError, match="the disk is full") as error, new_folder(out) as folder:
        (folder / "weights.bin").write_bytes(bytes(2 << 20))
    assert str(error.value).startswith(str(out))
    assert "\n" not in str(error.value)
    assert list(small_disk.iterdir()) == []
    with pytest.raises(OutputError, match=r"2\.1 MB are needed"):
        check_space(out, 2 << 20)
    check_space(out, 100_000)


def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OutputError, match="the disk is full"), new_folder(tmp_path / "out") as folder:
            (folder / "weights.bin").write_bytes(bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_an_artifact_is_never_replaced(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_text("cat")
    file = tmp_path / "file"
    file.write_text("text")
    empty, artifact = tmp_path / "empty", tmp_path / "artifact"
    empty.mkdir()
    _write(artifact, "old")
    for out in (photos, file, empty, artifact):
        with pytest.raises(OutputError, match="exists already"):
            check_output(out)
    for out, reason in ((photos, "holds other files"), (file, "is a file"), (Path("/"), "root folder")):
        with pytest.raises(OutputError, match=reason):
            check_output(out, overwrite=True)
        with pytest.raises(OutputError, match=reason):
            _write(out, "new", overwrite=True)
    assert (photos / "cat.jpg").read_text() == "cat"
    for out in (empty, artifact):
        _write(out, "new", overwrite=True)
        assert (out / "nybble.json").read_text() == "new"


def test_a_parent_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        check_output(tmp_path / "missing" / "artifact")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="does not exist"):
        check_output(tmp_path / "file" / "artifact")
    with pytest.raises(OutputError, match=r"not writable|cannot be written"):
        _write(Path("/proc/artifact"), "new")


def test_a_name_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    for name in ("nul\0nul", "x" * 300):
        with pytest.raises(OutputError) as error:
            _write(tmp_path / name, "new")
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_an_artifact_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "artifact", tmp_path / "link"
    real.parent.mkdir()
    _write(real, "old")
    link.symlink_to(real)
    _write(link, "new", overwrite=True)
    assert link.is_symlink()
    assert (real / "nybble.json").read_text() == "new"


def test_files_beside_the_output_are_left_alone(tmp_path: Path) -> None:
    for name in (".artifact.nybble-tmp-note", ".artifact", ".artifact2.nybble-tmp-1-0"):
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.iterdir())
    _write(tmp_path / "artifact", "new")
    recover(tmp_path / "artifact")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "artifact"])


def test_an_exchange_is_one_step_on_this_file_system(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("renameat2 is Linux's")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    if not atomic._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system has no RENAME_EXCHANGE")
    assert os.listdir(tmp_path / "a") == ["b"]
    assert os.listdir(tmp_path / "b") == ["a"]


def _write(out: Path, version: str, overwrite: bool = False, stop: type[BaseException] | None = None) -> None:
    with new_folder(out, overwrite) as folder:
        (folder / "sub").mkdir()
        for name in ("nybble.json", "sub/weights.bin"):
            (folder / name).write_text(version)
        if stop is not None:
            raise stop
