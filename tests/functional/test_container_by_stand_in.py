"""The agent with containers, over a stand-in for `docker` that runs the command outside the agent's tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpucloud.adapters.packaging import package_zip
from gpucloud.domain.codec import to_json
from gpucloud.domain.job.spec import ContainerRuntime
from gpucloud.domain.node.container import ContainerRun, ImageWanted, Mount
from gpucloud.domain.node.status import Outcome, Stop
from gpucloud.system import processes
from tests.standins.agent_node import AgentNode, wait_until

STAND_IN = Path(__file__).parents[1] / "standins" / "docker.py"


@pytest.fixture
def node(tmp_path):
    data, sha256 = package_zip()
    package = tmp_path / f"gpucloud-{sha256}.zip"
    package.write_bytes(data)
    (tmp_path / "bin").mkdir()
    shutil.copy(STAND_IN, tmp_path / "bin" / "docker")
    (tmp_path / "bin" / "docker").chmod(0o755)
    node = AgentNode(tmp_path, package)
    node.env |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "DOCKER_STAND_IN": str(tmp_path)}
    node.state = tmp_path
    yield node
    node.destroy()


def contained(node, number, code, **env):
    run = ContainerRun(
        name=f"gpucloud-a-{number}-0",
        image="r/i@sha256:ab",
        runtime=ContainerRuntime.AUTO,
        devices=(),
        gpus=1,
        mounts=(Mount(path=str(node.root)),),
    )
    return replace(node.launch(number, "/bin/sh", "-c", code, **env), container=run, hidden=("TOKEN",))


def calls(node):
    return [json.loads(text) for text in (node.state / "calls").read_text().splitlines()]


def test_the_exit_code_and_output_are_the_containers_and_a_secret_goes_in_by_name(node):
    node.start()
    node.want(contained(node, 1, 'echo "$TOKEN $GPUCLOUD_ATTEMPT_DIR"; exit 3', TOKEN="s3cret"))
    attempt = node.wait_exited(1).attempt
    assert (attempt.outcome, attempt.exit_code) == (Outcome.FAILED, 3)
    assert (node.folder(1) / "launcher.log").read_text() == f"s3cret {node.folder(1)}\n"
    assert "s3cret" not in (node.state / "calls").read_text()
    assert "s3cret" not in (node.folder(1) / "launch.json").read_text()


WAITS = "touch up; exec env -i sleep 600"  # without our mark, as a process that is hidden from the agent would be


def inside(node, number):
    path = node.state / f"gpucloud-a-{number}-0"
    wait_until(lambda: (node.root / "up").exists() and path.exists() and path.read_text(), "the container")
    return int(path.read_text())


def test_a_container_is_ended_by_its_name_when_the_attempt_is_killed(node):
    node.start()
    node.want(contained(node, 1, WAITS))
    pid = inside(node, 1)
    node.want(contained(node, 1, WAITS), stop=Stop.KILL)
    assert node.wait_exited(1).attempt.outcome is Outcome.KILLED
    assert processes.started(pid) is None
    assert calls(node)[-1]["argv"] == ["rm", "--force", "gpucloud-a-1-0"]


def test_a_container_whose_agent_died_is_ended_by_the_next_agent(node):
    node.start()
    node.want(contained(node, 1, WAITS))
    pid = inside(node, 1)
    node.sigkill()
    assert node.start() == "started"
    assert node.status().attempt.outcome is Outcome.KILLED
    assert processes.started(pid) is None


def pull(node, wanted):
    return subprocess.run(
        [sys.executable, str(node.package), "image", "--root", str(node.root)],
        env=node.env, input=to_json(wanted), capture_output=True, text=True,
    )  # fmt: skip


def test_an_image_is_pulled_once_with_the_login_in_a_file_that_is_gone_afterwards(node):
    wanted = ImageWanted(reference="r.example.com/i:1", runtime=ContainerRuntime.DOCKER, login="me:pa55")
    assert pull(node, wanted).stdout == "ready\n"
    assert pull(node, wanted).stdout == "ready\n"
    pulls = [call for call in calls(node) if call["argv"][0] == "pull"]
    assert pulls == [
        {
            "argv": ["pull", "--quiet", "r.example.com/i:1"],
            "login": {"auths": {"r.example.com": {"auth": "bWU6cGE1NQ=="}}},
        }
    ]
    (record,) = (node.root / "images").glob("*.json")
    assert json.loads(record.read_text())["pinned"] == "r.example.com/i@sha256:ab"
    left = [path for path in node.root.rglob("*") if path.is_file() and "pa55" in path.read_text(errors="replace")]
    assert left == []


def test_without_a_runtime_the_node_says_what_it_needs(node):
    (node.state / "bin" / "docker").unlink()
    node.env["PATH"] = str(node.state / "bin")
    done = pull(node, ImageWanted(reference="r/i:1", runtime=ContainerRuntime.AUTO))
    assert done.returncode == 1
    assert done.stdout == "docker: No such file or directory; the image needs Docker or Apptainer on the node\n"
