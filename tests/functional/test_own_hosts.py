"""`cloud: ssh` through the real command line, over real SSH servers: the embedded fleet's own, and OpenSSH's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commandline import CommandLine, command_line, until, weights
from tests.fakes.nodes import openssh_server
from tests.standins.clocks import python_with_clock
from tests.standins.own_hosts import OwnHosts, own_hosts

SLOW = pytest.mark.slow
OPENSSH = [SLOW, pytest.mark.engine(name="openssh")]


@pytest.fixture(params=["embedded", pytest.param("openssh", marks=OPENSSH)])
def hosts(request, tmp_path):
    with own_hosts(tmp_path / "hosts", 3, openssh=request.param == "openssh") as found:
        yield found


@pytest.fixture
def line(tmp_path):
    (tmp_path / "cli").mkdir()
    with command_line(tmp_path / "cli") as found:
        yield found


def job(line: CommandLine, extra: str, name: str = "small", *, nodes: int | str = 2, steps: int = 40) -> str:
    file = Path(line.job(name, steps=steps, step_s=0.05, extra=extra))
    file.write_text(file.read_text().replace("nodes: 2", f"nodes: {nodes}"))
    return str(file)


def at_step(line: CommandLine, train: subprocess.Popen[str], step: int) -> None:
    """Wait for the job to be there; one that ended before is said to have, with all that it wrote."""

    def stands() -> str:
        return f"the job is at step {line.step()} of {step}:\n{(line.folder / 'err').read_text()}"

    until(lambda: line.step() >= step or train.poll() is not None, stands)
    assert line.step() >= step, stands()


def nothing_is_left(hosts: OwnHosts, *numbers: int) -> None:
    for at in numbers or range(len(hosts.servers)):
        assert hosts.left(at) == []
        assert hosts.processes(at) == []
        assert hosts.taken(at) == []


def test_plan_names_the_hosts_and_the_price_that_the_user_states(line, hosts):
    answer = line.run("plan", job(line, hosts.section(price="1.50 USD")))

    assert answer.code == 0, answer.stderr
    assert f"hosts, taken in this order: {', '.join(hosts.name(at) for at in range(3))}" in answer.stderr
    assert "2 × own host, 2 workers" in answer.stdout
    assert "3.00 USD an hour for 2 machines now, 3.00 USD at the most" in answer.stdout


@SLOW
def test_a_job_that_loses_a_host_goes_on_exactly_on_a_third_one(line, hosts):
    assert line.run("train", job(line, hosts.section(), "other", steps=80)).code == 0
    undisturbed = weights(line, "other")

    train = line.start("train", job(line, hosts.section(price="1.20 USD"), steps=80))
    at_step(line, train, 25)
    hosts.kill(1)
    assert train.wait(120) == 0, (line.folder / "err").read_text()

    told = json.loads(line.run("status", "small", "--json").stdout)
    assert [attempt["reason"] for attempt in told["attempts"]] == ["lost", "succeeded"]
    assert told["attempts"][1]["first_step"] > 1
    assert weights(line) == undisturbed
    nodes = {charge["node"] for charge in json.loads(line.run("cost", "small", "--json").stdout)["charges"]}
    assert {node.rpartition("-")[0] for node in nodes} == {hosts.name(at) for at in range(3)}
    nothing_is_left(hosts, 0, 2)


@SLOW
def test_a_job_on_a_range_of_hosts_goes_on_with_those_that_are_left(line, hosts):
    train = line.start("train", job(line, hosts.section(0, 1), nodes="1-2", steps=80))
    at_step(line, train, 25)
    hosts.kill(1)
    assert train.wait(120) == 0, (line.folder / "err").read_text()

    told = json.loads(line.run("status", "small", "--json").stdout)
    assert [(attempt["reason"], attempt["nodes"]) for attempt in told["attempts"]] == [("lost", 2), ("succeeded", 1)]
    nothing_is_left(hosts, 0)


@SLOW
def test_a_supervisor_that_was_killed_is_followed_by_one_that_goes_on_with_the_same_hosts(line, hosts):
    file = job(line, hosts.section(), steps=100)
    train = line.start("train", file)
    at_step(line, train, 10)
    os.kill(train.pid, signal.SIGKILL)
    train.wait()
    before = {entry["node"] for at in range(2) for entry in hosts.taken(at)}

    answer = line.run("train", file, "--json")

    assert answer.code == 0, answer.stderr
    assert [attempt["reason"] for attempt in answer.json["attempts"]] == ["succeeded"]
    assert {charge["node"] for charge in line.run("cost", "small", "--json").json["charges"]} == before
    nothing_is_left(hosts)


def test_hosts_that_are_listed_after_the_end_are_not_sent_to_gc_which_knows_of_none(line, hosts):
    assert line.run("up", job(line, hosts.section(0), nodes=1)).code == 0
    (note,) = line.folder.rglob("clusters/gpucloud-small/hosts.json")
    record = note.read_bytes()
    assert line.run("down", "small").code == 0
    note.write_bytes(record)  # as a supervisor that had lost its lease could write it
    for command in (("down", "small"), ("rm", "small", "--yes")):
        refused = line.run(*command)
        assert (refused.code != 0, "still listed: group gpucloud-small" in refused.stderr) == (True, True)
        assert f"hint: own hosts free themselves when their time is over; then remove file://{note}" in (refused.stderr)
        assert "gpucloud gc" not in refused.stderr
    note.unlink()
    assert line.run("rm", "small", "--yes").code == 0


@SLOW
def test_two_jobs_share_a_host_and_each_leaves_what_is_the_others(line, hosts):
    def section(device: int) -> str:
        return hosts.section(0, gpus=lambda _: f"[{device}]")

    assert line.run("up", job(line, section(4), "other", nodes=1)).code == 0
    mine = hosts.processes(0)
    answer = line.run("train", job(line, section(5), nodes=1))

    assert answer.code == 0, answer.stderr
    assert [entry["job"] for entry in hosts.taken(0)] == ["other"]
    assert hosts.processes(0) == mine != []
    assert line.run("train", job(line, section(4), "other", nodes=1)).code == 0
    nothing_is_left(hosts, 0)


@SLOW
@pytest.mark.engine(name="openssh")  # which lets a program go on whose connection is gone
def test_a_job_that_is_ended_while_its_host_is_made_ready_leaves_nothing_there(line, tmp_path):
    python = python_with_clock(tmp_path / "python", ahead_s=0)
    (late,) = (tmp_path / "python").rglob("shifted_clock.py")
    late.write_text(LATE)
    with own_hosts(tmp_path / "hosts", 1, openssh=True, pythons=[python]) as hosts:
        train = line.start("train", job(line, hosts.section(), nodes=1))
        until((hosts.servers[0].home / "receiving").exists, "the package comes")

        down = line.run("down", "small")

        assert (down.code, train.wait(60)) == (0, 130), down.stderr
        until((hosts.servers[0].home / "received").exists, "the package came")
        nothing_is_left(hosts)


LATE = """
import os, sys, time

def late(*arguments, make=os.makedirs, **options):
    open(os.path.expanduser("~/receiving"), "w").close()
    time.sleep(8)
    make(*arguments, **options)
    open(os.path.expanduser("~/received"), "w").close()

if sys.orig_argv[1] == "-c" and len(sys.orig_argv[3:]) == 2:  # the package, and where it goes
    os.makedirs = late
"""


def test_a_second_job_is_told_who_has_the_host(line, hosts):
    assert line.run("up", job(line, hosts.section(0), "other", nodes=1)).code == 0

    answer = line.run("train", job(line, hosts.section(0) + "deadline: 3s\n", nodes=1))

    assert answer.code == 12, answer.stderr
    (entry,) = hosts.taken(0)
    assert f"excluded: {hosts.name(0)}: other of {entry['owner']} has " in answer.stderr
    assert line.run("down", "other").code == 0
    nothing_is_left(hosts)


def test_a_host_that_does_not_answer_is_named_and_another_takes_its_place(line, hosts):
    hosts.kill(0)

    answer = line.run("up", job(line, hosts.section()))

    assert answer.code == 0, answer.stderr
    assert f"excluded: {hosts.name(0)}: " in answer.stderr
    assert "connection refused" in answer.stderr
    told = json.loads(line.run("status", "small", "--json").stdout)
    assert {node["id"].rpartition("-")[0] for node in told["nodes"]} == {hosts.name(1), hosts.name(2)}
    first = told["nodes"][0]["id"]
    assert line.run("ssh", "small", "--node", first, "--", "echo", "in").stdout == "in\n"
    assert line.run("reconcile", "small").code == 0
    assert line.run("down", "small").code == 0
    nothing_is_left(hosts, 1, 2)


class Hasty(CommandLine):
    """The command line where own hosts are taken for 15 s at a time, and waited for a few seconds after that."""

    def argv(self, *arguments: str) -> list[str]:
        program = (
            "from datetime import timedelta as td; from dataclasses import replace; from functools import partial\n"
            "import gpucloud.wiring.clouds as hosts\n"
            "quick = {'silent': td(seconds=3), 'cooldown': td(seconds=2), 'patience': td(seconds=4)}\n"
            "hosts._LIMITS = replace(hosts._LIMITS, **quick)\n"
            "import gpucloud.adapters.hosts.group as group, gpucloud.adapters.hosts.records as records\n"
            "group.GRACE = records.GRACE = td(seconds=3)\n"
            "hosts.PrepaidRule = partial(hosts.PrepaidRule, horizon=td(seconds=15), least=td(seconds=3))\n"
            "from gpucloud.__main__ import main; main()"
        )
        return [sys.executable, "-c", program, *arguments]


@SLOW
def test_a_job_whose_only_host_dies_waits_for_its_time_and_ends_without_capacity(hosts, tmp_path):
    line = Hasty(tmp_path)
    train = line.start("train", job(line, hosts.section(0), nodes=1, steps=400))
    at_step(line, train, 10)
    hosts.kill(0)

    assert train.wait(120) == 11, (tmp_path / "err").read_text()
    told = (tmp_path / "err").read_text()
    assert told.count(f"no machine answers: {hosts.name(0)}-1; the attempt there may go on until ") == 1
    assert "the job ends: no_capacity: no pool had machines for " in told
    assert "connection refused" in told
    line.close()


@SLOW
def test_a_job_whose_host_dies_goes_on_elsewhere_when_its_time_there_is_over(hosts, tmp_path):
    line = Hasty(tmp_path)
    train = line.start("train", job(line, hosts.section(0, 1), nodes=1, steps=100))
    at_step(line, train, 20)
    hosts.kill(0)

    assert train.wait(120) == 0, (tmp_path / "err").read_text()
    attempts = json.loads(line.run("status", "small", "--json").stdout)["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["lost", "succeeded"]
    assert attempts[1]["first_step"] > 1
    nothing_is_left(hosts, 1)
    line.close()


def test_a_host_with_another_key_is_not_spoken_to_and_ends_a_job_that_needs_it(line, hosts):
    keys = [server.node.host_key for server in hosts.servers]
    extra = hosts.section(0, 1).replace(keys[1], keys[2])

    answer = line.run("train", job(line, extra))

    assert answer.code == 13, answer.stderr
    assert f"{hosts.name(1)}: " in answer.stderr
    assert "the host key is not the pinned one; nothing was sent" in answer.stderr
    said = " ".join(answer.stderr.split())
    assert f"compare `ssh-keyscan -p {hosts.servers[1].node.port} 127.0.0.1` with /etc/ssh/ssh_host_ed25519" in said
    assert "start a new one" not in said
    nothing_is_left(hosts)


def test_a_host_whose_key_nobody_accepted_is_refused_with_the_way_to_accept_it(line, hosts, tmp_path):
    line.env["HOME"] = str(tmp_path)
    text = hosts.section()
    extra = "".join(row + "\n" for row in text.replace("gpus: [],", "gpus: []}").splitlines() if "host_key" not in row)
    extra = extra.replace("],\n", "]}\n")
    port = hosts.servers[0].node.port

    for command in ("plan", "train"):
        answer = line.run(command, job(line, extra))
        assert answer.code == 14, answer.stderr
        assert f"the host key of 127.0.0.1:{port}, " in answer.stderr
        assert f"ssh-keyscan -p {port} 127.0.0.1 | tee -a {tmp_path}/.ssh/known_hosts" in answer.stderr

    known = tmp_path / ".ssh" / "known_hosts"
    known.parent.mkdir()
    nodes = [server.node for server in hosts.servers]
    known.write_text("".join(f"[127.0.0.1]:{node.port} {node.host_key}\n" for node in nodes))
    assert line.run("plan", job(line, extra)).code == 0


@SLOW
@pytest.mark.engine(name="openssh")
def test_hosts_behind_another_one_are_reached_through_it_once_its_key_is_accepted(line, tmp_path):
    line.env["HOME"] = str(tmp_path)
    known = tmp_path / ".ssh" / "known_hosts"
    known.parent.mkdir()
    with own_hosts(tmp_path / "hosts", 2) as hosts, openssh_server(tmp_path / "door", name="door") as door:
        (tmp_path / "door" / "authorized_keys").write_bytes(hosts.key.with_name("authorized_keys").read_bytes())
        way = f"jump: {door.node.user}@127.0.0.1:{door.node.port}, host_key:"
        file = job(line, hosts.section().replace("host_key:", way))

        refused = line.run("train", file)
        known.write_text(f"[127.0.0.1]:{door.node.port} {door.node.host_key}\n")
        answer = line.run("train", file)

        assert refused.code == 13, refused.stderr
        assert f"the host key of {door.node.user}@127.0.0.1, on the way there, is not an accepted" in refused.stderr
        assert answer.code == 0, answer.stderr
        came_in = (tmp_path / "door" / "log").read_text().count("Accepted publickey")
        assert came_in >= 4  # for each of two hosts: to take it, and for the job
        assert weights(line)
        nothing_is_left(hosts)


# Hosts whose clocks are wrong, each another way


@pytest.fixture
def wrong_clocks(tmp_path):
    pythons = [python_with_clock(tmp_path / f"python{ahead_s}", ahead_s=ahead_s) for ahead_s in (3600, -3600)]
    with own_hosts(tmp_path / "hosts", 2, pythons=pythons) as found:
        yield found


def verdict(hosts: OwnHosts, at: int) -> dict[str, object] | None:
    """How the first attempt ended on the host, as its agent wrote it; None while it runs."""
    found = list(hosts.servers[at].home.glob(f".gpucloud/jobs/*/{hosts.name(at)}/attempts/0001/exit.json"))
    return json.loads(found[0].read_text()) if found else None


@SLOW
def test_hosts_whose_clocks_are_an_hour_wrong_train_as_others_do_and_are_told_of(line, wrong_clocks):
    answer = line.run("train", job(line, wrong_clocks.section()), "--json")

    assert answer.code == 0, answer.stderr
    assert [attempt["reason"] for attempt in answer.json["attempts"]] == ["succeeded"]
    # Give or take what the question for it took.
    assert re.search(r"the node's clock is (359|360)\d s ahead of this machine's", answer.stderr)
    assert re.search(r"the node's clock is (359|360)\d s behind this machine's", answer.stderr)
    nothing_is_left(wrong_clocks)


@SLOW
def test_hosts_whose_clocks_are_an_hour_wrong_save_and_stop_in_time_when_nobody_supervises_them(wrong_clocks, tmp_path):
    line = Hasty(tmp_path)
    train = line.start("train", job(line, wrong_clocks.section(), steps=2000))
    at_step(line, train, 10)
    os.kill(train.pid, signal.SIGKILL)
    train.wait()

    until(lambda: verdict(wrong_clocks, 0) and verdict(wrong_clocks, 1), "both hosts have stopped", 40)
    assert [verdict(wrong_clocks, at)["outcome"] for at in (0, 1)] == ["left", "left"]
    line.close()


class WrongClock(CommandLine):
    """The command line on a machine whose clock is wrong."""

    ahead_s = 0.0

    def argv(self, *arguments: str) -> list[str]:
        python = self.folder / "python"
        if not python.exists():
            python_with_clock(python, ahead_s=self.ahead_s)
        return [str(python / "bin" / Path(sys.executable).name), "-m", "gpucloud", *arguments]


@SLOW
@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_job_of_a_supervisor_whose_clock_is_an_hour_wrong_is_gone_on_with_by_one_whose_clock_is_right(
    hosts, line, ahead_s
):
    """Who held the lease was on this machine and is gone: whatever its clock wrote, it is followed at once."""
    wrong = WrongClock(line.folder)
    wrong.ahead_s = ahead_s
    file = job(line, hosts.section(), steps=100)
    train = wrong.start("train", file)
    at_step(line, train, 10)
    os.kill(train.pid, signal.SIGKILL)
    train.wait()

    answer = line.run("train", file, "--json")

    assert answer.code == 0, answer.stderr
    assert answer.json["attempts"][-1]["reason"] == "succeeded"
    nothing_is_left(hosts)


# Results of a job whose time is over, with nobody there


WRITES = """
import os, time
os.makedirs("out", exist_ok=True)
open("out/result.txt", "a").write(f"of attempt {os.environ['GPUCLOUD_ATTEMPT']}")
time.sleep(SECONDS if os.environ['GPUCLOUD_ATTEMPT'] == '1' else 1)
"""


def left_alone(hosts: OwnHosts, folder: Path) -> tuple[Hasty, str]:
    """A job that has written a result, and whose time ended when nobody supervised it."""
    line = Hasty(folder)
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(WRITES.replace("SECONDS", "600"))
    head = "name: small\ncode: code\nrun: train.py\nresources: {nodes: 1, gpus: 1}\ncheckpoint: none\nbudget: 1 USD\n"
    file = folder / "small.yaml"
    file.write_text(f"{head}outputs: [out/]\n{hosts.section(0)}")
    train = line.start("train", str(file))
    until(lambda: list(hosts.servers[0].home.glob(".gpucloud/jobs/*/*/code/*/out/result.txt")), "a result is there")
    until(lambda: (line.state() or {}).get("attempts"), "the attempt is known")
    os.kill(train.pid, signal.SIGKILL)
    train.wait()
    until(lambda: verdict(hosts, 0), "the host has stopped", 40)
    until(lambda: "its hosts are free" in line.run("status", "small").stdout, "its time is over", 40)
    return line, str(file)


@SLOW
def test_results_on_a_host_whose_time_was_over_when_nobody_was_there_come_home_with_down(hosts, tmp_path):
    line, _ = left_alone(hosts, tmp_path)
    brings = f"out/ is not home yet: `gpucloud down small` brings it from {hosts.name(0)}-1, if that answers"
    assert brings in line.run("status", "small").stdout

    down = line.run("down", "small")

    assert down.code == 0, down.stderr
    assert (tmp_path / "outputs/small/out/result.txt").read_text() == "of attempt 1"
    assert f"bringing home what attempt 1 wrote on {hosts.name(0)}-1\n" in down.stderr
    assert f"brought home: {tmp_path}/outputs/small/out\n" in down.stderr
    assert "did not come home" not in down.stderr + down.stdout
    nothing_is_left(hosts, 0)
    line.close()


@SLOW
@pytest.mark.parametrize("edited", [False, True])
def test_results_on_a_host_whose_time_was_over_come_home_where_the_job_goes_on(hosts, tmp_path, edited):
    """Beside those of the next attempt where that runs on the same code, else at once."""
    line, file = left_alone(hosts, tmp_path)
    if edited:
        (tmp_path / "code" / "train.py").write_text(WRITES.replace("SECONDS", "1"))
    train = line.run("train", file)
    assert train.code == 0, train.stderr
    found = {path.name: path.read_text() for path in (tmp_path / "outputs/small/out").iterdir()}
    apart = {"result.txt": "of attempt 2", "result.txt.before-attempt-2": "of attempt 1"}
    assert found == (apart if edited else {"result.txt": "of attempt 1of attempt 2"})
    assert "did not come home" not in line.run("status", "small").stdout
    nothing_is_left(hosts, 0)
    line.close()


@SLOW
def test_results_on_a_host_that_does_not_answer_any_more_are_said_to_lie_there(hosts, tmp_path):
    line, _ = left_alone(hosts, tmp_path)
    hosts.kill(0)

    down = line.run("down", "small")

    assert down.code == 0, down.stderr
    node = hosts.servers[0].node
    (out,) = hosts.servers[0].home.glob(".gpucloud/jobs/*/*/code/*/out")
    tree = out.parent
    where = f"lies on {node.user}@127.0.0.1:{node.port}, in ~/{tree.relative_to(hosts.servers[0].home)}"
    assert f"outputs: out/ of attempt 1 did not come home: whatever was written there {where}\n" in down.stderr
    assert (out / "result.txt").exists()
    line.close()
