"""Folders of Debian packages, of any suite and architecture, unpacked and not installed: this needs no root
and changes nothing of the system. apt resolves dependencies and checks signatures, with a state of its own.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class DebianRootError(Exception):
    """The packages can't be had; the message is one line that says why."""


def unpack(folder: Path, suite: str, architecture: str, packages: Sequence[str]) -> Path:
    """`folder`, in which `packages` and what they depend on lie unpacked; made once, then reused.

    `architecture` is Debian's name for it ("amd64", "arm64"). Raises `DebianRootError` where apt, the
    archive's keys or a package can't be had.
    """
    contents = " ".join((suite, architecture, *packages))
    finished = folder / ".contents"
    if finished.is_file() and finished.read_text(encoding="utf-8") == contents:
        return folder
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DebianRootError(f"{tool} is missing; Debian packages are unpacked with it")
    if not KEYRING.is_file():
        raise DebianRootError(f"{KEYRING} is missing; it is in the package debian-archive-keyring")
    shutil.rmtree(folder, ignore_errors=True)
    state = folder / ".apt"
    options = _private_state(state.absolute(), suite, architecture)
    _run("apt-get", *options, "update")
    _run("apt-get", *options, "install", "--yes", "--download-only", *packages)
    for archive in sorted((state / "archives").glob("*.deb")):
        _run("dpkg-deb", "--extract", str(archive), str(folder))
    shutil.rmtree(state)
    _make_links_relative(folder)
    finished.write_text(contents, encoding="utf-8")
    return folder


def _private_state(state: Path, suite: str, architecture: str) -> list[str]:
    """apt's options for a state of its own in which nothing is installed yet."""
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    sources = state / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n", encoding="utf-8")
    settings = {
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "APT::Get::AllowUnauthenticated": "false",
        "APT::Update::Error-Mode": "any",  # a list that can't be had is an error
        "APT::Sandbox::User": "",  # apt's own user may not be let into this folder
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    return [option for key, value in settings.items() for option in ("-o", f"{key}={value}")]


def _make_links_relative(root: Path) -> None:
    """Absolute links mean the system that the packages would be installed in, which is `root`."""
    for path in root.rglob("*"):
        if path.is_symlink() and (target := path.readlink()).is_absolute():
            path.unlink()
            path.symlink_to(os.path.relpath(root / target.relative_to("/"), path.parent))


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        problems = [line for line in result.stderr.splitlines() if line.startswith("E:")] or [result.stderr]
        raise DebianRootError(f"{command[0]}: {problems[0].removeprefix('E:').strip()}")
