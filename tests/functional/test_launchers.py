"""Every launcher through the real command line, over two nodes of the embedded fleet."""

from __future__ import annotations

import json

import pytest

from tests.commandline import command_line, weights


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        yield found


def script(line, text, **job):
    """Write a job whose script is `text`."""
    file = line.job(**job)
    (line.folder / "code" / "train.py").write_text(text)
    return file


def output(line, rank):
    return line.run("logs", "small", "--rank", str(rank)).stdout


TENSORFLOW = """
import json, os
config = json.loads(os.environ["TF_CONFIG"])
workers = config["cluster"]["worker"]
host, port = workers[config["task"]["index"]].rsplit(":", 1)
import socket
socket.create_server((host, int(port))).close()
print(config["task"], len(workers), len(set(workers)), os.environ["RANK"])
"""


@pytest.mark.slow  # a plain launch is run each time
def test_tensorflow_finds_the_same_workers_on_every_node_and_itself_among_them(line):
    answer = line.run(
        "train", script(line, TENSORFLOW, extra="launcher: tensorflow\n", gpus=2, budget="100 USD"), "--json"
    )
    assert answer.code == 0, answer.stderr
    assert output(line, 0) == "{'type': 'worker', 'index': 0} 2 2 0\n"
    assert output(line, 1) == "{'type': 'worker', 'index': 1} 2 2 1\n"


PLAIN = """
import os
print(*(os.environ[n] for n in "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK".split()))
"""


def test_a_script_may_be_started_plainly_once_a_node(line):
    answer = line.run("train", script(line, PLAIN, extra="launcher: plain\n", gpus=2, budget="100 USD"), "--json")
    assert answer.code == 0, answer.stderr
    assert (output(line, 0), output(line, 1)) == ("0 2 0 1 0\n", "1 2 0 1 1\n")


@pytest.mark.slow  # three whole jobs
@pytest.mark.engine(name="openmpi")
def test_a_job_under_mpirun_that_is_interrupted_ends_with_the_weights_of_an_undisturbed_one_under_torchrun(line):
    plain = line.run("train", line.job(), "--json")
    assert plain.code == 0, plain.stderr
    expected = weights(line)

    answer = line.run("train", line.job("mpi", extra="launcher: mpi\n", step_s=0.1), "--drill", "--json")

    assert answer.code == 0, answer.stderr
    first, second = answer.json["attempts"]
    assert (first["reason"], second["reason"]) == ("interrupted", "succeeded")
    assert second["first_step"] == first["last_step"] + 1
    assert weights(line, "mpi") == expected


def test_how_each_rank_was_launched_can_be_asked_and_no_secret_is_in_the_answer(tmp_path):
    with command_line(tmp_path, HF_TOKEN="hf_secret") as line:
        file = script(line, PLAIN, extra="launcher: plain\nsecrets: [HF_TOKEN]\nenv: {LR: '0.1'}\n")
        assert line.run("train", file, "--json").code == 0
        answer = line.run("logs", "small", "--launch")
    assert answer.code == 0, answer.stderr
    records = [json.loads(text) for text in answer.stdout.splitlines()]
    assert [(record["attempt"], record["node"]) for record in records] == [(1, 0), (1, 1)]
    assert records[0]["launch"]["argv"][-1] == "train.py"
    env = records[1]["launch"]["env"]
    assert (env["LR"], env["RANK"], env["HF_TOKEN"], env["GLOO_SOCKET_IFNAME"]) == ("0.1", "1", None, "lo")
    assert "hf_secret" not in answer.stdout
