"""Data sets as values: what is in one, when it is another, where a node keeps it, what it costs to read."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal

import pytest

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.data import (
    DataFile,
    data_set,
    difference,
    gigabytes,
    pack,
    place_of,
    unpack,
    variables,
    wanted,
)
from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.money.costs import remark, transfer_usd
from gpucloud.domain.node.bootstrap.facts import Facts
from gpucloud.domain.node.bootstrap.steps import DATA, STEPS, data_command
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.hardware import Disk, Speed, choose

A = DataFile(path="a", size=10, etag="1" * 32, key="p/a")
B = DataFile(path="sub/b", size=20, etag="2" * 32, key="p/sub/b")
SET = data_set("s3://bucket/p", [B, A], "us-east-1")
GB = 10**9


def test_a_set_is_packed_and_unpacked_as_it_was():
    assert unpack(pack(SET)) == SET
    assert (SET.size, [file.path for file in SET.files]) == (30, ["a", "sub/b"])


@pytest.mark.parametrize("damaged", [b"", b"not zlib", pack(SET)[:-1]])
def test_damaged_bytes_are_no_set(damaged):
    with pytest.raises(ValueError, match="not a data set"):
        unpack(damaged)


def test_the_content_is_named_by_paths_and_bytes_and_not_by_where_they_come_from():
    elsewhere = data_set("s3://copy/q", [replace(A, key="q/a"), replace(B, key="q/sub/b")], "eu-west-1")
    assert elsewhere.content == SET.content
    assert data_set("s3://bucket/p", [A, replace(B, etag="3" * 32)]).content != SET.content
    assert data_set("s3://bucket/p", [A, replace(B, path="sub/c")]).content != SET.content


def test_two_targets_are_two_wishes_for_one_content():
    one, other = wanted(SET, "/data", Cloud.AWS), wanted(SET, "/data2", Cloud.AWS)
    assert (one.content, one.key != other.key) == (other.content, True)
    assert wanted(SET, "/data/", Cloud.AWS) == one
    assert (one.below_root, wanted(SET, "/data", Cloud.LOCAL).below_root) == (False, True)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["a", "a/b"], "'a' is a file and a folder at once"),
        (["a//b"], "'k' cannot be a file's path"),
        (["../a"], "'k' cannot be a file's path"),
        (["/a"], "'k' cannot be a file's path"),
        ([".gpucloud-data.json"], "'k' cannot be a file's path"),  # our mark that a set is whole
        (["a", "deep/.gpucloud-0123.part"], "'k' cannot be a file's path"),
        (["deep/" + "名" * 85], None),
        (["deep/" + "名" * 86], "is longer than a file's name can be on Linux: 255 bytes"),
        (["/".join(["d" * 200] * 18)], "is longer than a file's name can be on Linux"),
        ([], "there is nothing at s3://b"),
    ],
)
def test_paths_that_no_folder_can_hold_are_refused(paths, said):
    expected = pytest.raises(UsageError, match=said) if said else contextlib.nullcontext()
    with expected:
        data_set("s3://b", [DataFile(path=path, size=1, etag="e", key="k") for path in paths])


LACKING = "since this job began; no new machine can get what is {}, only those that have it go on: put it back"
BOTH = LACKING.format("changed or gone")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([A, B], None),
        ([A, replace(B, etag="3" * 32)], f"1 changed (first: sub/b) {LACKING.format('changed')}"),
        ([A], f"1 gone (first: sub/b) {LACKING.format('gone')}"),
        ([replace(A, size=11), B, replace(A, path="c")], f"1 changed, 1 new (first: a) {LACKING.format('changed')}"),
        ([replace(A, size=11), replace(A, path="c")], f"1 changed, 1 new, 1 gone (first: a) {BOTH}"),
        (
            [A, B, replace(A, path="c")],
            "1 new (first: c) since this job began; it goes on with the files as they were",
        ),
    ],
)
def test_what_changed_since_the_job_began_is_counted_and_named(now, said):
    assert difference(SET, data_set("s3://bucket/p", now)) == said


def test_scripts_find_their_sets_by_variables():
    assert variables(("/data", "/sets/mine/"), "/home/me/.gpucloud", below_root=True) == {
        "GPUCLOUD_DATA": "/home/me/.gpucloud/data/at/data",
        "GPUCLOUD_DATA_1": "/home/me/.gpucloud/data/at/data",
        "GPUCLOUD_DATA_2": "/home/me/.gpucloud/data/at/sets/mine",
    }
    assert place_of("/data/", "/anywhere", below_root=False) == "/data"
    assert variables((), "/anywhere", below_root=False) == {}


NVME = Disk(folder="/opt/dlami/nvme", speed=Speed.LOCAL_NVME, free=900 * GB)
ROOT = Disk(folder="/home", speed=Speed.SOLID, free=80 * GB)
OLD = Disk(folder="/raid", speed=Speed.SPINNING, free=9000 * GB)


@pytest.mark.parametrize(
    ("disks", "size", "chosen"),
    [
        ((ROOT, NVME, OLD), 10 * GB, NVME),
        ((ROOT, OLD), 10 * GB, ROOT),
        ((ROOT, OLD), 79 * GB, OLD),  # 1.05 × 79 are more than 80
        ((ROOT, NVME, OLD), 1000 * GB, OLD),
        ((replace(NVME, free=1 * GB, held=99 * GB), OLD), 100 * GB, OLD),
        ((replace(NVME, free=2 * GB, held=99 * GB), OLD), 100 * GB, replace(NVME, free=2 * GB, held=99 * GB)),
        ((ROOT, replace(ROOT, folder="/b", free=60 * GB, held=5 * GB)), 10 * GB,
         replace(ROOT, folder="/b", free=60 * GB, held=5 * GB)),
        ((ROOT,), 100 * GB, "no disk has room for a data set of 100.00 GB: /home: 80.00 GB free, 105.00 GB needed"),
        ((), 1, "no disk has room for a data set of 0.0 MB: no disk can be written to"),
    ],
)  # fmt: skip
def test_the_fastest_disk_with_room_is_chosen_or_the_numbers_are_said(disks, size, chosen):
    assert choose(disks, size) == chosen


BIG = data_set("s3://bucket/p", [replace(A, size=150 * GB)], "us-east-1")


@pytest.mark.parametrize(
    ("home", "region", "nodes", "usd"),
    [
        ("us-east-1", "us-east-1", 8, "0"),
        ("us-east-1", "us-west-2", 2, "6.00"),
        ("ap-southeast-1", "us-west-2", 1, "22.50"),
        (None, "us-west-2", 1, "0"),
    ],
)
def test_reading_costs_between_regions_only(home, region, nodes, usd):
    assert transfer_usd(replace(BIG, region=home), region, nodes) == Decimal(usd)


def test_what_reading_costs_is_said_with_the_date_of_its_prices():
    assert remark(BIG, "us-east-1", 2) is None
    assert remark(BIG, "us-west-2", 2) == (
        "data: s3://bucket/p is in us-east-1, the machines are in us-west-2: reading 150.00 GB on 2 nodes costs up to"
        " 6.00 USD (list prices of January 2026), again for each replacement; the budget does not count it"
    )


def test_sizes_are_told_as_bills_count_them():
    assert [gigabytes(size) for size in (0, 12_345_678, 150 * GB)] == ["0.0 MB", "12.3 MB", "150.00 GB"]


ONE, MINE = wanted(SET, "/data", Cloud.AWS), replace(wanted(SET, "/mine", Cloud.AWS), source="/home/me/mine")
WANTED = Wanted(
    package="z", code="", setup=None, setup_digest="", env=(("TOKEN", "t0k"),), torchrun=False, gpus=1,
    asks_for_gpus=False, data=(ONE, MINE),
)  # fmt: skip
FACTS = Facts(
    python="/usr/bin/python3", version=(3, 10, 12), torch=None, root="/r", package="z", free_bytes=1, cpus=1,
    time=datetime(2026, 1, 1, tzinfo=timezone.utc), boot_id="b", gpus=None, gpu_fault=None, agent_package="z",
    agent_busy=False, layer=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("staged", "why", "commands"),
    [
        ((), "s3://bucket/p is not whole at /data", 1),  # the other set is not fetched but sent
        ((ONE.key,), "/home/me/mine is not whole at /mine", 0),
        ((ONE.key, MINE.key), None, 0),
    ],
)
def test_the_step_fetches_what_the_node_lacks(staged, why, commands):
    facts = replace(FACTS, staged=staged)
    assert DATA.needed(facts, WANTED) == why
    assert len(DATA.commands(facts, WANTED)) == commands


def test_secrets_go_to_a_set_in_s3_only_and_never_by_argv():
    command = data_command("stage", ONE, FACTS, WANTED)
    assert command.argv == ("/usr/bin/python3", "/r/lib/gpucloud-z.zip", "data", "--root", "/r")
    assert b"t0k" in command.stdin
    assert b"t0k" not in data_command("place", MINE, FACTS, WANTED).stdin


def test_data_comes_after_the_python_that_fetches_it():
    names = [step.name for step in STEPS]
    assert names.index("setup") < names.index("data")
