"""What Linux control groups leave to this process: v1, v2, or both at once.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ..records import dataclass

# v1 writes "no limit" as the largest multiple of a page under 2**63; no machine has this much.
_UNLIMITED = 2**60


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits of the process's groups and all their ancestors; None is not limited."""

    memory_limit: int | None  # bytes
    memory_headroom: int | None  # bytes that may still be taken before a limit is met
    cpu_quota: float | None  # CPUs' worth of time


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: frozenset[str]  # v1 only
    root: PurePosixPath  # the group that is visible at `point`
    point: PurePosixPath


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits of this process, read under `root`. Missing or strange files count as no limit."""
    limits: list[int] = []
    headrooms: list[int] = []
    quotas: list[float] = []
    for group, version in _groups(root, "memory"):
        limit, used = _memory(group, version)
        if limit is not None:
            limits.append(limit)
            headrooms.append(max(0, limit - used))
    for group, version in _groups(root, "cpu"):
        quota = _quota(group, version)
        if quota is not None:
            quotas.append(quota)
    return CgroupLimits(min(limits, default=None), min(headrooms, default=None), min(quotas, default=None))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's group and its ancestors, for each mount that may hold the controller."""
    paths = _own_paths(root)
    for mount in _mounts(root):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        own = paths.get("" if mount.version == 2 else controller)
        if own is None:
            continue
        # In a container without a namespace of its own, the path is the host's and only the container's own
        # group is mounted: then the mount point is that group.
        relative = own.relative_to(mount.root) if own.is_relative_to(mount.root) else PurePosixPath()
        if ".." in relative.parts:  # a group outside the namespace's root: its ancestors can't be seen
            relative = PurePosixPath()
        top = root / mount.point.relative_to("/")
        for parts in range(len(relative.parts), -1, -1):
            yield top.joinpath(*relative.parts[:parts]), mount.version


def _own_paths(root: Path) -> dict[str, PurePosixPath]:
    """Controller to path from /proc/self/cgroup; v2's has the empty name."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) == 3 and fields[2].startswith("/"):
            for controller in fields[1].split(","):
                paths[controller] = PurePosixPath(fields[2])
    return paths


def _mounts(root: Path) -> Iterator[_Mount]:
    """The cgroup mounts of /proc/self/mountinfo: `id parent major:minor root point options... - type
    source super-options`."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, separator, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if not separator or len(fields) < 5 or len(tail) < 3 or tail[0] not in ("cgroup", "cgroup2"):
            continue
        mounted, point = PurePosixPath(fields[3]), PurePosixPath(fields[4])
        if mounted.is_absolute() and point.is_absolute() and ".." not in point.parts:
            version = 2 if tail[0] == "cgroup2" else 1
            yield _Mount(version, frozenset(tail[2].split(",")), mounted, point)


def _memory(group: Path, version: int) -> tuple[int | None, int]:
    """A group's limit and what it uses that can't be reclaimed at once, in bytes."""
    if version == 2:
        # memory.high slows a group down rather than killing it, so it's a limit to stay under all the same.
        found = [_number(group / name) for name in ("memory.max", "memory.high")]
        limit = min((n for n in found if n is not None), default=None)
        used, reclaimable = _number(group / "memory.current"), _stat(group, "inactive_file")
    else:
        limit = _number(group / "memory.limit_in_bytes")
        used, reclaimable = _number(group / "memory.usage_in_bytes"), _stat(group, "total_inactive_file")
    if limit is not None and limit >= _UNLIMITED:
        limit = None
    return limit, max(0, (used or 0) - reclaimable)


def _quota(group: Path, version: int) -> float | None:
    """CPUs' worth of time a group may use, None for no quota."""
    if version == 2:
        fields = " ".join(_lines(group / "cpu.max")).split()
        pair = (_whole(fields[0]), _whole(fields[1])) if len(fields) == 2 else (None, None)
    else:
        pair = (_number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us"))
    quota, period = pair
    return quota / period if quota and period else None


def _stat(group: Path, name: str) -> int:
    for line in _lines(group / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == name:
            return _whole(value.strip()) or 0
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return _whole(lines[0].strip()) if lines else None


def _whole(text: str) -> int | None:
    """A non-negative number; None for "max", -1 and whatever else stands there."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
