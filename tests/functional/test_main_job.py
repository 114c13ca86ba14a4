"""The main job through the real command line: real SSH nodes, real torchrun, real interruptions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from decimal import Decimal
from pathlib import Path

import pytest

from tests.commandline import command_line, until, weights
from tests.emulation.interruptions import interrupted


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The weights of a run that nothing happened to."""
    with command_line(tmp_path_factory.mktemp("plain")) as line:
        answer = line.run("train", line.job(), "--json")
        assert answer.code == 0, answer.stderr
        assert [a["reason"] for a in answer.json["attempts"]] == ["succeeded"]
        return weights(line)


def nothing_is_left(line, job="small"):
    assert line.nodes(job) == []
    until(lambda: not line.processes(), f"processes are gone, not {line.processes()}", 15)


def test_a_drilled_job_resumes_and_ends_with_the_weights_of_an_undisturbed_one(line, uninterrupted):
    answer = line.run("train", line.job(), "--drill", "--json")

    assert answer.code == 0, answer.stderr
    told = answer.json
    assert (told["version"], told["job"], told["status"], told["exit_reason"]) == (1, "small", "succeeded", "succeeded")
    first, second = told["attempts"]
    assert (first["reason"], second["reason"]) == ("interrupted", "succeeded")
    assert second["first_step"] == first["last_step"] + 1
    assert told["last_step"] == told["checkpoint"]["step"] == 40
    assert re.fullmatch("[0-9a-f]{64}", told["checkpoint"]["sha256"])
    (taken,) = told["interruptions"]
    assert taken["kind"] == "notice"
    assert taken["noticed_at"] < taken["resumed_at"]
    assert weights(line) == uninterrupted
    nothing_is_left(line)
    every_cent_is_accounted_for(told, line.run("cost", "small", "--json").json)


def every_cent_is_accounted_for(told, cost):
    spend = {key: Decimal(value) for key, value in told["spend"].items() if value is not None}
    charged = {
        c["node"]: sum(Decimal(x["usd"]) for x in cost["charges"] if x["node"] == c["node"]) for c in cost["charges"]
    }
    taken = told["interruptions"][0]["node"]
    assert len(charged) == 3
    assert charged.pop(taken) == 0
    assert all(usd >= Decimal("0.27") / 60 for usd in charged.values())
    assert sum(charged.values()) == spend["spent_usd"]
    assert spend["spent_usd"] + spend["left_usd"] == spend["budget_usd"] == 1
    assert sum(Decimal(row["usd"]) for row in cost["by_attempt"]) == spend["spent_usd"]


def test_a_node_that_dies_without_notice_is_replaced_and_no_bit_is_lost(line, uninterrupted):
    train = line.start("train", line.job(step_s=0.1), "--json")
    until(lambda: line.step() >= 12, "step 12")
    line.group.interrupt("gpucloud-small", line.nodes()[-1], notice=False)

    assert train.wait(timeout=120) == 0, (line.folder / "err").read_text()
    state = line.state()
    assert [a["reason"] for a in state["attempts"]] == ["lost", "succeeded"]
    assert [i["kind"] for i in state["interruptions"]] == ["lost"]
    assert state["attempts"][1]["first_step"] > 1
    assert weights(line) == uninterrupted
    nothing_is_left(line)


def test_a_supervisor_that_is_killed_is_followed_by_the_same_command(line, uninterrupted):
    job = line.job(step_s=0.1)
    first = line.start("train", job)
    until(lambda: line.step() >= 3, "step 3")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = line.nodes()

    answer = line.run("train", job, "--json")

    assert answer.code == 0, answer.stderr
    assert [a["reason"] for a in answer.json["attempts"]] == ["succeeded"]
    assert {interval["node_id"] for interval in line.state()["nodes"]} == set(before)
    assert weights(line) == uninterrupted
    nothing_is_left(line)


def test_a_script_that_raises_ends_the_job_with_its_traceback_once(line):
    answer = line.run("train", line.job(raises=(5, 1)), "--json")

    assert answer.code == 20
    assert answer.json["status"] == "failed"
    assert answer.json["exit_reason"] == "user_error"
    assert re.fullmatch(r"ValueError: the data has a hole \(\w+\.py:\d+, rank 1\)", answer.json["message"])
    assert len(answer.json["attempts"]) == 1
    assert answer.stderr.count("ValueError: the data has a hole") == 1
    assert line.run("cost", "small", "--json").json["spend"]["promised_usd"] == "0"
    nothing_is_left(line)


@pytest.mark.slow  # test_terminal.py detaches in every run
def test_a_detached_job_is_followed_from_elsewhere_and_ended_by_down(line):
    job = line.job(steps=2000, step_s=0.05)
    detached = line.run("train", job, "--detach", "--json")
    assert detached.code == 0, detached.stderr
    follower = line.start("logs", "-f", "small", "--rank", "0")
    until(lambda: "step 5\n" in (line.folder / "out").read_text(), "the log has step 5")

    status = line.run("status", "small", "--json").json
    assert status["status"] == "running"
    assert status["supervisor"].startswith("its own node i-")
    twice = line.run("train", job, "--json")
    assert twice.code == 4
    assert twice.json["error"]["code"] == "lease_held"
    down = line.run("down", "small", "--json")

    assert down.code == 0, down.stderr
    assert down.json["status"] == "stopped"
    assert down.json["left_over"] == []
    assert down.json["checkpoint"]["step"] == down.json["last_step"]
    assert follower.wait(timeout=30) == 0
    nothing_is_left(line)


@pytest.mark.slow
def test_down_saves_and_ends_a_job_whose_file_is_gone_by_its_order(line):
    job = line.job(steps=2000, step_s=0.05)
    train = line.start("train", job)
    until(lambda: line.step() >= 1, "step 1")
    os.kill(train.pid, signal.SIGKILL)
    train.wait()
    Path(job).unlink()

    down = line.run("down", "small", "--json")

    assert down.code == 0, down.stderr
    assert (down.json["status"], down.json["left_over"]) == ("stopped", [])
    assert down.json["checkpoint"]["step"] == down.json["last_step"]
    nothing_is_left(line)


def test_up_then_train_uses_the_same_machines_and_keep_leaves_them(line):
    job = line.job()
    up = line.run("up", job, "--json")
    assert up.code == 0, up.stderr
    machines = sorted(node["id"] for node in up.json["nodes"])
    assert len(machines) == 2

    train = line.run("train", job, "--keep", "--json")
    assert train.code == 0, train.stderr
    assert sorted(node["id"] for node in train.json["nodes"]) == machines
    assert Decimal(train.json["spend"]["promised_usd"]) > 0
    shell = line.run("ssh", "small", "--", "sh", "-c", "echo $HOME")
    assert shell.stdout.strip().endswith("/home")

    down = line.run("down", job, "--json")
    assert down.code == 0, down.stderr
    assert down.json["status"] == "succeeded"
    assert down.json["nodes"] == []
    nothing_is_left(line)
    every_command_tells_of_the_job_alike(line, job, up.json, train.json, down.json)


def every_command_tells_of_the_job_alike(line, file, up, train, down):
    """One object with the same keys, and what two commands say of the same thing at the same time is the same."""
    status = line.run("status", "small", "--json").json
    (listed,) = line.run("status", "--json").json["jobs"]
    watched = line.run("watch", "small", "--json").json
    passed = line.run("reconcile", "small", "--json").json
    assert status == watched == passed == {"version": 1, **listed}
    assert down == {**status, "left_over": []}
    assert up.keys() == train.keys() == status.keys()
    assert (status["job"], status["status"], status["condition"]) == ("small", "succeeded", "ended")

    cost, budget = line.run("cost", "small", "--json").json, line.run("budget", "small", "--json").json
    plan = line.run("plan", file, "--json").json
    shared = {"version", "job", "name", "status", "condition", "spend", "paid_until"}
    assert cost.keys() & status.keys() == {*shared, "quarantined"}
    assert budget.keys() & status.keys() == shared
    assert plan.keys() & status.keys() == {"version", "job"}
    assert plan["plan"]["budget_usd"] == status["spend"]["budget_usd"]
    for told in (cost, budget, plan):
        assert {key: told[key] for key in told.keys() & status.keys()} == {
            key: status[key] for key in told.keys() & status.keys()
        }
    (of_all,) = line.run("cost", "--all", "--json").json["jobs"]
    assert of_all == {key: value for key, value in cost.items() if key not in ("version", "rows")}


def test_without_terraform_the_first_command_works_and_says_so(tmp_path):
    with command_line(tmp_path, PATH=path_without("terraform")) as line:
        answer = line.run("train", line.job(), "--json")

        assert answer.code == 0, answer.stderr
        assert "Terraform is not on PATH" in answer.stderr
        nothing_is_left(line)


def path_without(program: str) -> str:
    """PATH as it is, less every folder that holds the program."""
    kept = [folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / program).exists()]
    assert shutil.which("sh", path=os.pathsep.join(kept))
    return os.pathsep.join(kept)


def test_ctrl_c_without_a_terminal_leaves_at_once_and_says_what_lives(line):
    job = line.job(steps=2000, step_s=0.05)
    train = line.start("train", job)
    until(lambda: line.step() >= 1, "step 1")
    started = time.monotonic()
    os.kill(train.pid, signal.SIGINT)

    assert train.wait(timeout=20) == 130
    assert time.monotonic() - started < 10
    said = (line.folder / "err").read_text()
    assert "alive and paid until" in said
    assert all(node in said for node in line.nodes())
    assert line.run("down", "small").code == 0
    nothing_is_left(line)


@pytest.mark.slow
def test_a_finished_job_is_followed_by_a_new_run(line):
    job = line.job(steps=3)
    assert line.run("train", job).code == 0

    again = line.run("train", job, "--json")

    assert again.code == 0, again.stderr
    assert again.json["job"] == "small-2"
    assert _names(line) == ["small-2", "small@1"]
    for command in ("status", "cost"):
        assert line.run(command, "small@1", "--json").json["job"] == "small@1"
        assert line.run(command, "small", "--json").json["job"] == "small-2"
    assert weights(line, "small@1") == weights(line, "small-2")
    for name in ("small@1", "small-2"):
        assert line.run("cp", f"{name}:@store/state.json", name).code == 0
    stored = [json.loads((line.folder / name).read_text())["job"] for name in ("small@1", "small-2")]
    assert stored == ["small", "small-2"]
    assert line.run("rm", "small@1", "--with-checkpoints", "--yes").code == 0
    assert _names(line) == ["small-2"]


def _names(line):
    return sorted(one["job"] for one in line.run("status", "--json").json["jobs"])


def test_setup_secrets_and_outputs_reach_the_script_and_come_home(line):
    code = line.folder / "code"
    setup = "setup: pip install --quiet --no-index --no-build-isolation ./own\n"
    job = line.job(steps=3, extra=f"{setup}secrets: [HF_TOKEN]\noutputs: [results/, result]\nenv: {{COLOR: blue}}\n")
    (code / "own").mkdir()
    (code / "own" / "own.py").write_text("WORD = 'from the layer'\n")
    (code / "own" / "setup.py").write_text(
        "from setuptools import setup; setup(name='own', version='1', py_modules=['own'])"
    )
    script = (code / "train.py").read_text()
    (code / "train.py").write_text(
        f"import own, os\nprint(own.WORD, os.environ['COLOR'], len(os.environ['HF_TOKEN']))\n{script}"
    )
    assert line.run("train", job).code == 2
    line.env["HF_TOKEN"] = "hf-canary-4711"

    answer = line.run("train", job)

    assert answer.code == 0, answer.stderr
    assert "  | from the layer blue 14" in answer.stderr
    assert (line.folder / "outputs" / "small" / "results" / "deep" / "rank").read_text() == "0"
    assert "\noutputs: result is not there; nearest: results\n" in answer.stdout
    assert line.run("status", "small", "--json").json["missing_outputs"] == [
        {"path": "result", "why": "is not there", "nearest": "results", "attempt": None, "brought_by": None}
    ]
    kept = [path for path in line.home.rglob("*") if path.is_file() and b"hf-canary-4711" in path.read_bytes()]
    assert kept == []
    assert "hf-canary" not in answer.stdout + answer.stderr


@pytest.mark.slow  # half a minute on busy cores
def test_a_frozen_node_is_given_up_and_the_job_goes_on(line, uninterrupted):
    train = line.start("train", line.job(step_s=0.1), "--json")
    until(lambda: line.step() >= 12, "step 12")
    frozen = line.nodes()[-1]
    assert line.run("local", "freeze", "small", "--node", frozen).code == 0

    assert train.wait(timeout=120) == 0, (line.folder / "err").read_text()
    assert [(i["node_id"], i["kind"]) for i in line.state()["interruptions"]] == [(frozen, "frozen")]
    assert [a["reason"] for a in line.state()["attempts"]] == ["lost", "succeeded"]
    assert weights(line) == uninterrupted
    nothing_is_left(line)


@pytest.mark.slow  # half a minute on busy cores
def test_nodes_are_taken_at_random_times_and_the_job_ends_all_the_same(line, uninterrupted):
    train = line.start("train", line.job(step_s=0.2), "--json")
    until(lambda: line.step() >= 2, "step 2")
    with interrupted(line.group, "gpucloud-small", seed=5, mean_s=4.0, unannounced=0.5):
        until(lambda: line.state()["interruptions"], "an interruption")

    assert train.wait(timeout=150) == 0, (line.folder / "err").read_text()
    assert weights(line) == uninterrupted
    nothing_is_left(line)


def test_reconcile_carries_a_job_on_pass_by_pass(line, uninterrupted):
    job = line.job()
    first = line.start("train", job)
    until(line.nodes, "machines")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()

    def ended():
        answer = line.run("reconcile", "small", "--json")
        assert answer.code == 0, answer.stderr
        return answer.json["status"] == "succeeded"

    until(ended, "the job has ended")
    assert weights(line) == uninterrupted
    nothing_is_left(line)


def test_a_bad_job_file_creates_nothing(line):
    file = Path(line.job())
    file.write_text(file.read_text().replace("budget:", "bugdet:"))

    answer = line.run("train", str(file))

    assert answer.code == 2
    assert "small.yaml:6:1" in answer.stderr
    assert "budget" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (line.home / "store").exists()
    assert not (line.home / "cloud").exists()


def test_a_budget_that_cannot_start_is_refused_with_the_least_sum(line):
    answer = line.run("train", line.job(budget="0.01 USD"), "--json")

    assert answer.code == 2
    assert "the least that works is 0.17 USD: 1 min to start and 1 min to train" in answer.json["error"]["message"]
    assert answer.json["error"]["hint"] == "budget: 0.17 USD"
    assert line.state() is None
