"""Whether there is memory for a save: what is free, and where requests of several ranks meet."""

from __future__ import annotations

import pytest

from gpucloud.resume.ranks import Ask, free_memory, sharing, shortage

GIB = 2**30
HERE, THERE = {"on the machine:a": 20 * GIB}, {"on the machine:b": 20 * GIB}
BOX = {**HERE, "in its container or batch job:a:7": 8 * GIB}


@pytest.mark.parametrize(
    ("asks", "short"),
    [
        ([Ask(19 * GIB, HERE)], None),
        ([Ask(20 * GIB, HERE)], "20 GiB wanted, 20 GiB free on the machine"),
        ([Ask(10 * GIB, HERE)] * 2, "20 GiB wanted by 2 ranks, 20 GiB free on the machine"),
        ([Ask(10 * GIB, HERE), Ask(10 * GIB, THERE)], None),
        ([Ask(7 * GIB, BOX)], None),
        ([Ask(8 * GIB, BOX)], "8 GiB wanted, 8 GiB free in its container or batch job"),
        ([Ask(7 * GIB, BOX), Ask(12 * GIB, HERE)], None),
        ([Ask(7 * GIB, BOX), Ask(13 * GIB, HERE)], "20 GiB wanted by 2 ranks, 20 GiB free on the machine"),
        ([Ask(16 * 2**20, {"on the machine:a": 18 * 2**20})], None),
        ([Ask(16 * 2**20, {"on the machine:a": 17 * 2**20})], "16 MiB wanted, 17 MiB free on the machine"),
        ([Ask(1, {"on the machine:a": -5})], "1 B wanted, 0 B free on the machine"),
        ([Ask(0, {"on the machine:a": -5})], None),
        ([Ask(2**50, {})], None),
    ],
)
def test_a_request_is_too_large_where_all_that_share_a_place_want_more_than_it_has(asks, short):
    assert shortage(asks) == short


def test_ranks_in_two_containers_of_a_machine_share_its_memory():
    other = {**HERE, "in its container or batch job:a:8": GIB}
    assert sharing([Ask(1, BOX), Ask(1, other), Ask(1, THERE), Ask(1, {})], 0) == 2
    assert sharing([Ask(1, BOX), Ask(1, {})], 1) == 1


def system(root, groups, **limits):
    """A machine with 4 GiB free; each folder of control groups has the files given for it."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("b00t\n")
    (root / "proc/meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:    4194304 kB\nHugePages_Total:   0\n")
    (root / "proc/self/cgroup").write_text(groups)
    for folder, files in limits.items():
        place = root / "sys/fs/cgroup" / folder.strip("_").replace("__", "/")
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text)
    return root


def limits_of(found):
    assert found.pop("on the machine:b00t") == 4 * GIB
    assert all(name.startswith("in its container or batch job:b00t:") for name in found)
    return sorted(found.values())


NEW = {"memory.max": "3000\n", "memory.current": "2500\n", "memory.stat": "anon 5\ninactive_file 100\nactive_file 30\n"}
OLD = {
    "memory.limit_in_bytes": "3000\n",
    "memory.usage_in_bytes": "2500\n",
    "memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 100\ntotal_active_file 30\n",
}


def test_limits_of_control_groups_count_up_to_the_highest_and_file_caches_are_free(tmp_path):
    job = {**NEW, "memory.max": "9000\n"}
    root = system(tmp_path, "0::/job/step\n", job=job, job__step=NEW, _={"memory.max": "max\n"})
    assert limits_of(free_memory(root)) == [630, 6630]


def test_a_container_that_sees_itself_as_the_top_is_found(tmp_path):
    assert limits_of(free_memory(system(tmp_path, "0::/\n", _=NEW))) == [630]


def test_the_first_version_of_control_groups_is_read_too_where_its_folder_has_another_name_inside(tmp_path):
    groups = "5:cpu:/docker/abc\n4:hugetlb,memory:/docker/abc\n0::/\n"
    assert limits_of(free_memory(system(tmp_path, groups, memory=OLD))) == [630]


def test_a_group_without_a_limit_is_no_place_of_its_own(tmp_path):
    endless = {**OLD, "memory.limit_in_bytes": "9223372036854771712\n"}
    assert limits_of(free_memory(system(tmp_path, "4:memory:/\n", memory=endless))) == []


def test_a_system_that_does_not_tell_is_never_short(tmp_path):
    assert free_memory(tmp_path) == {}


def test_this_machine_has_memory():
    assert not free_memory() or min(free_memory().values()) > 2**20
