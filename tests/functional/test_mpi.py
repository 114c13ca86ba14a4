"""Open MPI's own mpirun over nodes that run the real agent."""

from __future__ import annotations

import json
import socket
import stat
import sys
from datetime import datetime, timezone
from decimal import Decimal

import pytest

from gpucloud.adapters.packaging import package_zip
from gpucloud.domain.job.spec import Job, Launcher, Market, Resources
from gpucloud.domain.node.launch import launches
from gpucloud.domain.node.member import AttemptStart, Place
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.node.status import Outcome, Stop
from gpucloud.domain.offer import Pool
from tests.running import words_of
from tests.standins.agent_node import AgentNode, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.engine(name="openmpi")]

SECRET = "5ec4e7" * 10


@pytest.fixture
def nodes(tmp_path):
    data, sha256 = package_zip()
    package = tmp_path / f"gpucloud-{sha256}.zip"
    package.write_bytes(data)
    made = [AgentNode(tmp_path / name, package) for name in ("one", "two")]
    for node in made:
        assert node.start() == "started"
    yield made
    for node in made:
        node.destroy()


def start(nodes, code, *, gpus=1):
    """Have the nodes run the code as a script under mpirun."""
    wanted = start_later(nodes, code, gpus=gpus)
    for node, launch in zip(nodes, wanted, strict=True):
        node.want(launch)
    return wanted


def start_later(nodes, code, *, gpus=1):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    places = tuple(place(node, f"127.0.0.{10 + i}", code) for i, node in enumerate(nodes))
    job = Job(
        name="m",
        run="train.py",
        budget_usd=Decimal(1),
        source=nodes[0].root / "gpucloud.yaml",
        code=nodes[0].root,
        resources=Resources(nodes=len(nodes), gpus=gpus),
        launcher=Launcher.MPI,
    )
    attempt = AttemptStart(number=1, port=port, store_url="/nowhere", checkpoints="c", secret=SECRET)
    return launches(job, attempt, places, {})


def place(node, address, code):
    folder = node.root / "code"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(code)
    listed = Node(
        id=address,
        pool=Pool(instance_type="local", zone="z", market=Market.SPOT),
        state=NodeState.RUNNING,
        launched_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
        address=address,
        port=22,
        user="u",
        private_address=address,
        interface="lo",
    )
    return Place(node=listed, python=sys.executable, package=str(node.package), code=str(folder), root=str(node.root))


def logs(node):
    return {path.name: path.read_text() for path in sorted(node.folder(1).glob("rank-*.log"))}


def ended(nodes, limit_s=60):
    return [node.wait_exited(1, limit_s).attempt for node in nodes]


SAY = """
import os
print(os.environ["OMPI_COMM_WORLD_RANK"], *(os.environ[n] for n in "RANK WORLD_SIZE LOCAL_RANK NODE_RANK".split()))
print(os.getcwd() == os.environ["GPUCLOUD_CODE"], os.environ.get("GPUCLOUD_ATTEMPT_SECRET"))
"""


def test_each_node_runs_its_own_ranks_and_their_output_is_a_file_each(nodes):
    start(nodes, SAY, gpus=2)
    assert [(a.outcome, a.exit_code) for a in ended(nodes)] == [(Outcome.DONE, 0), (Outcome.DONE, 0)]
    assert logs(nodes[0]) == {"rank-0.log": "0 0 4 0 0\nTrue None\n", "rank-1.log": "1 1 4 1 0\nTrue None\n"}
    assert logs(nodes[1]) == {"rank-2.log": "2 2 4 0 1\nTrue None\n", "rank-3.log": "3 3 4 1 1\nTrue None\n"}


ALL_REDUCE = """
from mpi4py import MPI
world = MPI.COMM_WORLD
print(world.Get_size(), world.allreduce(10 ** world.Get_rank()))
"""


def test_ranks_of_two_nodes_reduce_over_mpi(nodes):
    start(nodes, ALL_REDUCE, gpus=2)
    assert [a.outcome for a in ended(nodes)] == [Outcome.DONE, Outcome.DONE], (
        nodes[0].folder(1) / "launcher.log"
    ).read_text()
    said = [text for node in nodes for text in logs(node).values()]
    assert said == ["4 1111\n"] * 4


LOSES_ONE = """
import os, sys, time
open(os.environ["GPUCLOUD_ATTEMPT_DIR"] + "/up-" + os.environ["RANK"], "w").close()
if os.environ["RANK"] == "1":
    raise ValueError("the data has a hole")
time.sleep(600)
"""


def test_a_rank_that_fails_ends_the_attempt_on_every_node_and_is_named(nodes):
    start(nodes, LOSES_ONE)
    first, second = ended(nodes)
    assert (first.outcome, second.outcome) == (Outcome.FAILED, Outcome.FAILED)
    assert (first.exit_code, first.failed_rank) == (1, 1)
    assert "ValueError: the data has a hole" in logs(nodes[1])["rank-1.log"]
    assert [node.alive(1) for node in nodes] == [(), ()]


WAITS = """
import os, time
open(os.environ["GPUCLOUD_ATTEMPT_DIR"] + "/up", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_that_is_lost_ends_the_attempt_on_the_other(nodes, gone):
    start(nodes, WAITS)
    for node in nodes:
        wait_until((node.folder(1) / "up").exists, "the rank", 30)
    nodes[gone].destroy()
    kept = nodes[1 - gone]
    assert kept.wait_exited(1, 30).attempt.outcome is Outcome.FAILED
    assert kept.alive(1) == ()


def test_an_attempt_that_is_killed_leaves_no_process_on_any_node(nodes):
    wanted = start(nodes, WAITS, gpus=2)
    for node in nodes:
        wait_until((node.folder(1) / "up").exists, "the ranks", 30)
    for node, launch in zip(nodes, wanted, strict=True):
        node.want(launch, stop=Stop.KILL)
    assert [a.outcome for a in ended(nodes)] == [Outcome.KILLED, Outcome.KILLED]
    assert [node.alive(1) for node in nodes] == [(), ()]


LEAVES = """
import os, sys, time
rank = os.environ["RANK"]
time.sleep(0.5 * int(rank))
open(os.environ["GPUCLOUD_ATTEMPT_DIR"] + f"/left-{rank}.json", "w").close()
sys.exit(75)
"""


def test_ranks_that_save_and_leave_one_after_another_are_not_taken_for_failed(nodes):
    start(nodes, LEAVES, gpus=2)
    assert [a.outcome for a in ended(nodes)] == [Outcome.LEFT, Outcome.LEFT]


def test_the_secret_is_on_no_command_line_in_no_shown_file_and_not_in_the_ranks(nodes):
    start(nodes, WAITS)
    for node in nodes:
        wait_until((node.folder(1) / "up").exists, "the rank", 30)
    lines = [" ".join(words_of(pid)) for node in nodes for pid in node.alive(1)]
    assert any("mpirun" in line for line in lines)
    assert not any(SECRET in line for line in lines)
    for node in nodes:
        shown = (node.folder(1) / "launch.json").read_text()
        assert SECRET not in shown
        assert json.loads(shown)["env"]["GPUCLOUD_ATTEMPT_SECRET"] is None
        assert stat.S_IMODE((node.root / "attempts" / "0001").stat().st_mode) == 0o700


def test_a_stranger_at_the_port_is_turned_away_and_the_members_come_in(nodes):
    first, second = start_later(nodes, SAY)
    nodes[0].want(first)
    address = ("127.0.0.10", int(first.argv[first.argv.index("--port") + 1]))

    def stranger():
        try:
            connection = socket.create_connection(address, timeout=1)
        except OSError:
            return False
        with connection:
            connection.sendall(b"00\nnot signed\n")
            return connection.makefile("rb").read().count(b"\n") <= 2

    wait_until(stranger, "the head turns a stranger away", 20)
    nodes[1].want(second)
    assert [a.outcome for a in ended(nodes)] == [Outcome.DONE, Outcome.DONE]
    assert "refused a connection: a message that is not signed" in (nodes[0].folder(1) / "launcher.log").read_text()
