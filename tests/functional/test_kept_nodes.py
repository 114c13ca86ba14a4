"""Scripts that write a part of each save on every node: one commit has the parts of all, or is none."""

from __future__ import annotations

import random
import time

import pytest

from gpucloud.domain.job.spec import OnNotice
from tests.standins.kept_nodes import KeptNodes
from tests.standins.kept_script import PREFIX, until


@pytest.fixture
def make(tmp_path):
    made = []

    def build(kind="dcp", **options):
        made.append(KeptNodes(tmp_path, kind=kind, **options))
        return made[-1]

    yield build
    for one in made:
        one.kill()


def test_a_commit_has_the_parts_of_all_nodes_and_every_node_gets_them_all_back(make):
    job = make("dcp")
    job.start(steps=20, pause_s=0.02)
    assert job.ended() == [0, 0], (job.said(0), job.said(1))
    assert job.wrong() is None
    assert job.committed()[0].commit.step == 20
    job.lose_the_disk(1)
    job.start(steps=20)
    assert job.ended() == [0, 0], (job.said(0), job.said(1))
    assert job.begun_at() == [20, 20]


@pytest.mark.slow  # the same for a program without a barrier, for three nodes, and for damage in another's part
def test_each_node_waits_for_its_own_ranks_and_damage_in_any_part_means_older_for_all(make):
    job = make("hf", nodes=3)
    job.start(steps=30, waits=True)
    assert job.ended() == [0, 0, 0], [job.said(node) for node in range(3)]
    assert job.wrong() is None
    newest, older, _ = (one.commit for one in job.committed())
    assert (newest.step, older.step) == (30, 20)
    name = "data/000001/000000030/node-00002/checkpoint-30/rng_state_2.pth"
    file = job.folder / "store" / PREFIX / name
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    job.start(steps=older.step)
    assert job.ended() == [0, 0, 0], [job.said(node) for node in range(3)]
    assert job.begun_at() == [older.step] * 3


@pytest.mark.slow  # real notices by real signals
@pytest.mark.parametrize("on", [OnNotice.NONE, OnNotice.SIGTERM])
def test_on_a_notice_the_last_save_of_all_nodes_is_committed_and_all_leave(make, on):
    job = make("dcp")
    job.start(steps=100_000, pause_s=0.02, on=on)
    until(job.committed, "a commit", 200)
    job.ask_to_stop()
    assert job.ended() == [75, 75], (job.said(0), job.said(1))
    assert job.wrong() is None
    assert f"left: step {job.committed()[0].commit.step} is saved" in job.said(0)


@pytest.mark.slow  # kills at random moments
@pytest.mark.parametrize("seed", range(12))
def test_a_node_killed_at_any_moment_leaves_whole_commits_and_all_begin_with_the_newest(make, seed):
    draw = random.Random(seed)
    job = make("dcp" if seed % 2 else "hf")
    job.start(steps=100_000, pause_s=0.01)
    until(lambda: "begins at 0" in job.said(0), "the script begins", 200)
    time.sleep(draw.uniform(0.0, 8.0))
    job.kill(draw.randrange(2))
    time.sleep(draw.uniform(0.0, 1.0))
    job.kill()
    assert job.wrong() is None
    newest = job.committed()[0].commit.step if job.committed() else 0
    job.lose_the_disk(draw.randrange(2))
    job.start(steps=newest + 10)
    assert job.ended() == [0, 0], (job.said(0), job.said(1))
    assert job.begun_at() == [newest, newest]
    assert job.wrong() is None
    assert job.committed()[0].commit.step == newest + 10
