"""Interrupted runs end with the very bits of an uninterrupted one: real ranks, real signals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.standins.ports import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train_exact.py")
WITHIN_S = 90


class Job:
    """One job's store, and a folder for each of its nodes (one rank each)."""

    def __init__(self, folder, ranks):
        self.folder, self.ranks, self.attempts = folder, ranks, 0
        self.folder.mkdir()

    def start(self, *arguments, torchrun=False, every="steps:5"):
        """Launch the next attempt and return its processes, one for each rank."""
        self.attempts += 1
        port = free_port()
        return [self._start(rank, port, every, arguments, torchrun=torchrun) for rank in range(self.ranks)]

    def run(self, *arguments, **options):
        """Launch the next attempt, wait for its end and return the exit codes."""
        processes = self.start(*arguments, **options)
        try:
            return [process.wait(WITHIN_S) for process in processes]
        finally:
            end(processes)

    def node(self, rank, attempt=None):
        return self.folder / f"node-{rank}" / str(attempt or self.attempts)

    def read(self, name, rank=0):
        return json.loads((self.node(rank) / name).read_text())

    def results(self):
        return [json.loads((self.folder / f"result-{rank}.json").read_text()) for rank in range(self.ranks)]

    def _start(self, rank, port, every, arguments, *, torchrun):
        self.node(rank).mkdir(parents=True)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GPUCLOUD_STORE": str(self.folder / "store"),
            "GPUCLOUD_CHECKPOINTS": "jobs/exact/checkpoints",
            "GPUCLOUD_ATTEMPT": str(self.attempts),
            "GPUCLOUD_ATTEMPT_DIR": str(self.node(rank)),
            "GPUCLOUD_CHECKPOINT_EVERY": every,
            "GPUCLOUD_RECIPE": "{}",  # as a launcher says that the script is as it was: options here say how it ends
        }
        command = [str(SCRIPT), "--out", str(self.folder), *arguments]
        if torchrun:
            where = [
                f"--nnodes={self.ranks}",
                f"--node-rank={rank}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
            ]
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *where, *command]
        else:
            command = [sys.executable, *command]
            if self.ranks > 1:
                env |= {"RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
                env |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (self.node(rank) / "log").open("wb") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def end(processes):
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(happened, processes=()):
    deadline = time.monotonic() + WITHIN_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        assert all(process.poll() is None for process in processes), "a process ended too early"
        time.sleep(0.01)


def step_of(job):
    try:
        return job.read("progress.json")["step"]
    except (FileNotFoundError, NotADirectoryError):
        return -1


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The results of a run of `ranks` ranks that nothing disturbs; each number of ranks runs once."""
    known = {}

    def results(ranks):
        if ranks not in known:
            job = Job(tmp_path_factory.mktemp("whole") / "job", ranks)
            assert job.run() == [0] * ranks
            known[ranks] = job.results()
        return known[ranks]

    return results


@pytest.mark.slow  # the goal resume-exact kills a run in every check
def test_a_killed_then_a_stopped_run_ends_with_the_same_bits(uninterrupted, tmp_path):
    job = Job(tmp_path / "job", 2)

    assert -signal.SIGKILL in job.run("--die-at", "13")
    assert not list(job.node(0).glob("left-*")) + list(job.node(0).glob("done-*"))

    processes = job.start("--hold-at", "18", torchrun=True)
    try:
        wait_for(lambda: len(list(job.folder.glob("held-*"))) == 2, processes)
        (job.node(1) / "stop.json").write_text('{"reason": "notice", "at": null}')  # one node alone is asked
        time.sleep(0.1)  # longer than a node's wishes may go unlooked for
        (job.folder / "go").touch()
        codes = [process.wait(WITHIN_S) for process in processes]
    finally:
        end(processes)
    assert 0 not in codes
    left = [job.read(f"left-{rank}.json", rank) for rank in range(2)]
    step = left[0]["step"]
    # Quick ranks may tell each other nothing at step 18, and hear one step after they told; step 20 is one to save.
    assert step in (18, 19, 20)
    assert left == [{"rank": rank, "step": step, "committed_step": step} for rank in range(2)]
    assert "exitcode  : 75" in (job.node(0) / "log").read_text()

    assert job.run("--workers", "1") == [0, 0]
    assert [result["started"] for result in job.results()] == [step, step]
    assert digests(job.results()) == digests(uninterrupted(2))
    progress = job.read("progress.json")
    assert (progress["step"], progress["first_step"], progress["committed_step"]) == (24, step + 1, 24)
    assert [job.read(f"done-{rank}.json", rank)["step"] for rank in range(2)] == [24, 24]


@pytest.mark.slow  # three launches
def test_a_run_that_was_finished_ends_with_the_same_bits_again(uninterrupted, tmp_path):
    job = Job(tmp_path / "job", 1)
    assert [job.run(), job.run()] == [[0], [0]]
    assert job.results()[0]["started"] == 24
    assert digests(job.results()) == digests(uninterrupted(1))


@pytest.mark.slow  # five launches of three ranks
def test_three_ranks_are_exact_although_ddp_regroups_its_gradients(uninterrupted, tmp_path):
    job = Job(tmp_path / "job", 3)
    assert -signal.SIGKILL in job.run("--die-at", "13")
    assert job.run("--workers", "1") == [0, 0, 0]
    assert digests(job.results()) == digests(uninterrupted(3))


@pytest.mark.slow  # two launches each
def test_another_number_of_ranks_sees_the_same_samples_and_says_so(tmp_path):
    job = Job(tmp_path / "job", 2)
    assert -signal.SIGKILL in job.run("--die-at", "13")
    job.ranks = 3
    assert job.run() == [0, 0, 0]
    assert [result["level"] for result in job.results()] == ["same_samples"] * 3
    assert "2 → 3" in (job.node(0) / "log").read_text()


@pytest.mark.slow  # several launches each
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random_again_and_again_the_bits_are_the_same(uninterrupted, tmp_path, seed):
    chance = random.Random(seed)
    ranks = 1 + seed % 4
    job = Job(tmp_path / "job", ranks)
    for _ in range(2):
        processes = job.start("--pause", "0.03", every=f"steps:{chance.randint(1, 6)}")
        try:
            wait_for(lambda: step_of(job) >= 1)
            time.sleep(chance.uniform(0, 0.6))
        finally:
            end(chance.sample(processes, len(processes)))
    assert job.run("--workers", str(chance.randint(0, 2))) == [0] * ranks
    assert digests(job.results()) == digests(uninterrupted(ranks))


def digests(results):
    return [result["digest"] for result in results]
