from nybble.devices.cgroup import CgroupLimits, read_cgroup_limits

NO_LIMITS = CgroupLimits(None, None, None)
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "33 25 0:28 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
    "34 25 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
)
# What v1 writes where there is no limit: 2**63 rounded down to a page.
V1_UNLIMITED = "9223372036854771712\n"


def v2(group: str, files: dict[str, str]) -> dict[str, str]:
    inside = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": V2_MOUNT} | inside


def v1(group: str, files: dict[str, str], root: str = "/") -> dict[str, str]:
    inside = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    own = f"9:memory:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:/init.scope\n"
    return {"proc/self/cgroup": own, "proc/self/mountinfo": V1_MOUNTS.format(root=root)} | inside


def test_a_system_without_control_groups_has_no_limits(make_tree):
    assert read_cgroup_limits(make_tree({})) == NO_LIMITS
    assert read_cgroup_limits(make_tree({"proc/self/cgroup": "", "proc/self/mountinfo": "\n"})) == NO_LIMITS


def test_v2_headroom_counts_file_pages_that_can_be_dropped_as_free(make_tree):
    tree = make_tree(
        v2(
            "/app",
            {
                "app/memory.max": "1000000\n",
                "app/memory.high": "max\n",
                "app/memory.current": "700000\n",
                "app/memory.stat": "anon 300000\ninactive_file 250000\nactive_file 150000\n",
                "app/cpu.max": "150000 100000\n",
            },
        )
    )
    assert read_cgroup_limits(tree) == CgroupLimits(1000000, 550000, 1.5)


def test_v2_max_is_no_limit(make_tree):
    tree = make_tree(v2("/app", {"app/memory.max": "max\n", "app/cpu.max": "max 100000\n"}))
    assert read_cgroup_limits(tree) == NO_LIMITS


def test_v2_the_tightest_ancestor_counts(make_tree):
    """A group with room of its own inside one that is nearly full."""
    tree = make_tree(
        v2(
            "/pod/app",
            {
                "pod/memory.max": "1000\n",
                "pod/memory.current": "900\n",
                "pod/cpu.max": "400000 100000\n",
                "pod/app/memory.max": "5000\n",
                "pod/app/memory.current": "100\n",
                "pod/app/cpu.max": "max 100000\n",
            },
        )
    )
    assert read_cgroup_limits(tree) == CgroupLimits(1000, 100, 4.0)


def test_v2_a_soft_limit_is_a_limit(make_tree):
    tree = make_tree(v2("/", {"memory.max": "2000\n", "memory.high": "1500\n", "memory.current": "500\n"}))
    assert read_cgroup_limits(tree) == CgroupLimits(1500, 1000, None)


def test_v2_in_a_container_with_a_namespace_of_its_own(make_tree):
    """The group is "/", and what is mounted there is the container's group."""
    tree = make_tree(
        v2("/", {"memory.max": "4096\n", "memory.current": "1096\n", "cpu.max": "50000 100000\n"})
    )
    assert read_cgroup_limits(tree) == CgroupLimits(4096, 3000, 0.5)


def test_v2_a_group_outside_the_namespace(make_tree):
    tree = make_tree(v2("/../sibling", {"memory.max": "4096\n", "memory.current": "96\n"}))
    assert read_cgroup_limits(tree) == CgroupLimits(4096, 4000, None)


def test_v1_limits_and_nesting(make_tree):
    tree = make_tree(
        v1(
            "/pod/app",
            {
                "memory/memory.limit_in_bytes": V1_UNLIMITED,
                "memory/pod/memory.limit_in_bytes": "8000\n",
                "memory/pod/memory.usage_in_bytes": "3000\n",
                "memory/pod/memory.stat": "inactive_file 1\ntotal_inactive_file 1000\n",
                "memory/pod/app/memory.limit_in_bytes": "7000\n",
                "memory/pod/app/memory.usage_in_bytes": "500\n",
                "cpu,cpuacct/pod/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/pod/app/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/pod/app/cpu.cfs_period_us": "100000\n",
            },
        )
    )
    assert read_cgroup_limits(tree) == CgroupLimits(7000, 6000, 2.5)


def test_v1_huge_numbers_are_no_limit(make_tree):
    files = {"memory/memory.limit_in_bytes": V1_UNLIMITED, "memory/memory.usage_in_bytes": "1000\n"}
    assert read_cgroup_limits(make_tree(v1("/", files))) == NO_LIMITS


def test_v1_in_a_container_that_sees_the_host_path(make_tree):
    """Docker without a cgroup namespace: the path is the host's, the mount's root the container's."""
    files = {"memory/memory.limit_in_bytes": "9000\n", "memory/memory.usage_in_bytes": "1000\n"}
    tree = make_tree(v1("/docker/abc", files, root="/docker/abc"))
    assert read_cgroup_limits(tree) == CgroupLimits(9000, 8000, None)


def test_both_versions_at_once(make_tree):
    """The hybrid layout: v1 controllers, and a v2 mount without any."""
    files = v1(
        "/app", {"memory/app/memory.limit_in_bytes": "6000\n", "memory/app/memory.usage_in_bytes": "1\n"}
    )
    files["proc/self/cgroup"] += "0::/app\n"
    files["proc/self/mountinfo"] += V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    files["sys/fs/cgroup/unified/app/cgroup.procs"] = "1\n"
    assert read_cgroup_limits(make_tree(files)) == CgroupLimits(6000, 5999, None)


def test_more_in_use_than_the_limit_leaves_nothing(make_tree):
    tree = make_tree(v2("/", {"memory.max": "100\n", "memory.current": "150\n"}))
    assert read_cgroup_limits(tree) == CgroupLimits(100, 0, None)


def test_strange_contents_are_no_limit(make_tree):
    tree = make_tree(
        {
            "proc/self/cgroup": "nonsense\n0:\n7:memory\n0::/app\n",
            "proc/self/mountinfo": "short - cgroup2\n1 2 3:4 / /sys/fs/cgroup rw - cgroup2 none rw\n",
            "sys/fs/cgroup/app/memory.max": "12 monkeys\n",
            "sys/fs/cgroup/app/memory.current": "\n",
            "sys/fs/cgroup/app/cpu.max": "100000 0\n",
        }
    )
    assert read_cgroup_limits(tree) == NO_LIMITS
