"""What is noticed, and what is done about it, through the real command line over the embedded fleet."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from gpucloud.system import processes
from tests.commandline import command_line, until, weights
from tests.running import words_of

pytestmark = [pytest.mark.slow]


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path, GPUCLOUD_HANG_S="5") as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run that nothing happened to."""
    with command_line(tmp_path_factory.mktemp("plain")) as line:
        assert line.run("train", line.job(steps=60)).code == 0
        return weights(line)


def ssh_server(node_id):
    """The process in which the node's SSH server runs: the only one of the node that listens."""
    found = [
        pid for pid in processes.marked("GPUCLOUD_NODE", node_id) if "gpucloud.adapters.local.sshd" in words_of(pid)
    ]
    assert found, f"{node_id} has no SSH server"
    return found


def test_a_machine_whose_ssh_is_out_of_reach_is_left_alone_while_its_steps_go_on_and_that_is_told_once(
    line, undisturbed
):
    train = line.start("train", line.job(steps=60, step_s=0.3))
    until(lambda: line.step() >= 8, "step 8")
    silent = line.nodes()[-1]
    for pid in ssh_server(silent):
        os.kill(pid, signal.SIGSTOP)
    told = (
        f"{silent} does not answer us, but the training, whose steps go on, says that it lives: nothing is done to it"
    )
    until(lambda: told in (line.folder / "err").read_text(), "it is told")
    before = line.step()
    until(lambda: line.step() >= before + 5, "five steps more")
    for pid in ssh_server(silent):
        os.kill(pid, signal.SIGCONT)

    assert train.wait(timeout=200) == 0, (line.folder / "err").read_text()
    assert [a["reason"] for a in line.state()["attempts"]] == ["succeeded"]
    assert line.state()["interruptions"] == []
    assert (line.folder / "err").read_text().count(told) == 1
    assert weights(line) == undisturbed


def test_a_recommendation_to_leave_brings_an_early_checkpoint_and_nothing_else(line, undisturbed):
    train = line.start("train", line.job(steps=60, step_s=0.2, every="1000 steps"))
    until(lambda: line.step() >= 5, "step 5")
    assert line.state()["checkpoint"] is None
    node = line.nodes()[-1]
    assert line.run("local", "interrupt", "small", "--node", node, "--rebalance").stdout == (
        f"{node}: recommended to leave\n"
    )
    early = until(lambda: line.state()["checkpoint"], "an early checkpoint")

    assert train.wait(timeout=200) == 0, (line.folder / "err").read_text()
    assert 5 <= early["step"] < 60
    assert (line.folder / "err").read_text().count(f"the cloud recommends to leave {node}: ") == 1
    assert [a["reason"] for a in line.state()["attempts"]] == ["succeeded"]
    assert len(line.state()["nodes"]) == 2
    assert weights(line) == undisturbed


def test_a_rank_that_is_stopped_is_a_hang_whose_stacks_are_in_the_log_and_the_job_goes_on(line, undisturbed):
    train = line.start("train", line.job(steps=60, step_s=0.1))
    until(lambda: line.step() >= 12, "step 12")
    home = str(line.home)
    for pid in processes.marked("RANK", "1"):
        if home in Path(f"/proc/{pid}/environ").read_text(errors="replace"):
            os.kill(pid, signal.SIGSTOP)

    assert train.wait(timeout=250) == 0, (line.folder / "err").read_text()
    assert [a["reason"] for a in line.state()["attempts"]] == ["hung", "succeeded"]
    assert "hung: no step for " in (line.folder / "err").read_text()
    assert "; stacks are in the log" in (line.folder / "err").read_text()
    for rank in ("0", "1"):
        assert "(most recent call first):" in line.run("logs", "small", "--attempt", "1", "--rank", rank).stdout
    assert weights(line) == undisturbed


@pytest.mark.parametrize("second", ["notice", "death"])
def test_a_second_machine_that_is_taken_during_the_save_costs_no_committed_step(line, undisturbed, second):
    train = line.start("train", line.job(steps=60, step_s=0.1))
    until(lambda: line.step() >= 12, "step 12")
    first, other = line.nodes()
    line.group.interrupt("gpucloud-small", other, notice=True)
    until(lambda: line.state()["interruptions"], "the first notice")
    line.group.interrupt("gpucloud-small", first, notice=second == "notice")

    assert train.wait(timeout=250) == 0, (line.folder / "err").read_text()
    attempts = line.state()["attempts"]
    assert attempts[-1]["reason"] == "succeeded"
    assert attempts[0]["reason"] in ("interrupted", "lost")
    # What was committed is gone on from: at most what came after the newest commit is done again.
    for before, after in itertools.pairwise(attempts):
        if before["saved_step"] and after["first_step"]:
            assert after["first_step"] >= before["saved_step"] + 1
    assert weights(line) == undisturbed


def test_a_machine_whose_agent_is_killed_gets_another_and_the_job_goes_on(line, undisturbed):
    train = line.start("train", line.job(steps=60, step_s=0.1))
    until(lambda: line.step() >= 12, "step 12")
    machines = line.nodes()
    (record,) = line.home.glob(f"**/{machines[-1]}/home/.gpucloud/agent/agent.json")
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)

    assert train.wait(timeout=250) == 0, (line.folder / "err").read_text()
    assert [a["reason"] for a in line.state()["attempts"]] == ["lost", "succeeded"]
    assert sorted(interval["node_id"] for interval in line.state()["nodes"]) == sorted(machines)
    assert weights(line) == undisturbed


def test_all_machines_at_once_are_made_anew_and_the_job_goes_on_from_its_checkpoint(line, undisturbed):
    train = line.start("train", line.job(steps=60, step_s=0.1))
    until(lambda: line.state() and line.state()["checkpoint"], "a checkpoint")
    for machine in line.nodes():
        line.group.interrupt("gpucloud-small", machine, notice=False)

    assert train.wait(timeout=250) == 0, (line.folder / "err").read_text()
    attempts = line.state()["attempts"]
    assert [a["reason"] for a in attempts] == ["lost", "succeeded"]
    assert attempts[1]["first_step"] > 1
    assert len(line.state()["nodes"]) == 4
    assert weights(line) == undisturbed


def test_a_notice_during_the_bootstrap_costs_that_machine_only(line, undisturbed):
    train = line.start("train", line.job(steps=60, step_s=0.02))
    taken = until(line.nodes, "a machine")[0]
    line.group.interrupt("gpucloud-small", taken, notice=True)

    assert train.wait(timeout=250) == 0, (line.folder / "err").read_text()
    assert line.state()["attempts"][-1]["reason"] == "succeeded"
    assert taken not in [member["node_id"] for member in line.state()["attempts"][-1]["members"]]
    assert weights(line) == undisturbed


# A script that knows nothing of gpucloud, saves nothing and, the first time, stops for ever in the midst of its steps.
PRINTS = """
import os, time

print("begins", flush=True)
for step in range(1, 61):
    time.sleep(0.05)
    print(f"iter {step} loss 2.5", flush=True)
    while step == 40 and os.environ["GPUCLOUD_ATTEMPT"] == "1":
        time.sleep(1)
"""


# Slow for it waits ten times a hang's least time: that what is printed ends an attempt through agent and supervisor.
def test_a_script_that_prints_no_other_step_is_ended_with_its_stacks_and_begun_again(tmp_path):
    with command_line(tmp_path, GPUCLOUD_HANG_S="1") as line:
        file = line.job(every="auto", extra=r"metrics: {step: 'iter (\d+)', loss: 'loss (\S+)'}")
        (line.folder / "code" / "train.py").write_text(PRINTS)
        answer = line.run("train", file, "--json", limit_s=500)

        assert answer.code == 0, answer.stderr
        assert [one["reason"] for one in answer.json["attempts"]] == ["hung", "succeeded"]
        assert "no other step in the output for" in answer.stderr
        assert answer.json["last_step"] == 60
        log = line.run("logs", "small", "--rank", "0").stdout
        assert "Fatal Python error: Aborted" in log  # and where each thread was
