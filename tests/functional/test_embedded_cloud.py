"""The embedded cloud's promises beyond the port: nothing escapes, nothing is left, nothing is started twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from shutil import rmtree
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from gpucloud.adapters.local.group import LocalNodeGroup, kick
from gpucloud.adapters.local.node import MARK
from gpucloud.adapters.local.provision import delete_group
from gpucloud.adapters.local.records import Folder
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.system import processes
from tests.emulation.interruptions import interrupted
from tests.running import words_of
from tests.standins.embedded import STAND_IN, daemons, make_cloud, poll, running

# Each node has an address of its own there; some tests look at how quick things are.
pytestmark = [pytest.mark.allow_hosts(["127.0.0.0/8"]), pytest.mark.alone]

GROUP = "gpucloud-digits"
POOL = Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT)

# A node's work that does not want to end: in a session of its own, double-forked, without the node's environment.
STUBBORN = """
cd "$HOME"
setsid sh -c 'trap "" TERM HUP INT; echo $$ > own-session; while :; do sleep 1; done' &
(setsid sh -c 'echo $$ > twice-forked; sleep 600' &) &
env -i sh -c 'echo $$ > without-mark; sleep 600' &
while [ ! -s own-session ] || [ ! -s twice-forked ] || [ ! -s without-mark ]; do sleep 0.01; done
touch ready
exec sleep 600
"""

RESIZE = """
import sys
from pathlib import Path
from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.domain.job.spec import Market
from gpucloud.domain.offer import Pool
pool = Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT)
LocalNodeGroup(Path(sys.argv[1])).resize(sys.argv[2], int(sys.argv[3]), pool)
"""

KILLED = """
import os, signal
from gpucloud.adapters.local.records import Folder
save = Folder.save_group
def save_and_die(self, group):
    if WHEN == "after":
        save(self, group)
    os.kill(os.getpid(), signal.SIGKILL)
Folder.save_group = save_and_die
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "cloud"
    yield path
    if path.exists():
        LocalNodeGroup(path).purge(GROUP)


def start(nodes: LocalNodeGroup, size: int) -> tuple[Node, ...]:
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    nodes.resize(GROUP, size, POOL)
    poll(lambda: len(running(nodes.describe(GROUP))) == size)
    return running(nodes.describe(GROUP))


def home(root: Path, node: Node) -> Path:
    return Folder(root).node_folder(GROUP, node.id) / "home"


def start_stubborn(root: Path, size: int) -> tuple[LocalNodeGroup, tuple[Node, ...], set[int]]:
    """Start nodes and return them with the pids of all their processes."""
    nodes = make_cloud(root, GROUP, user_data=STUBBORN)
    found = start(nodes, size)
    members: set[int] = set()
    for node in found:
        poll((home(root, node) / "ready").exists)
        members |= set(processes.marked(MARK, node.id))
        members |= {int((home(root, node) / name).read_text()) for name in ("own-session", "twice-forked")}
        members.add(int((home(root, node) / "without-mark").read_text()))
    return nodes, found, members


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if processes.started(pid) is not None}


def end(daemon: int) -> None:
    """Kill it and wait until it is gone: one that is ending shows no command line, yet still holds its lock."""
    os.kill(daemon, signal.SIGKILL)
    poll(lambda: processes.started(daemon) is None)


def test_when_the_daemon_is_killed_every_node_dies_and_the_next_call_restores_the_level(root: Path) -> None:
    nodes, before, members = start_stubborn(root, 2)
    (daemon,) = daemons(root)
    os.kill(daemon, signal.SIGKILL)
    poll(lambda: not living(members), limit_s=2.0)
    assert not any(processes.marked(MARK, node.id) for node in before)
    assert [node.end_cause for node in nodes.describe(GROUP).nodes[:2]] == [EndCause.CRASH, EndCause.CRASH]
    poll(lambda: len(running(nodes.describe(GROUP))) == 2)
    assert [node.end_cause for node in nodes.describe(GROUP).nodes[2:]] == [None, None]
    assert len(daemons(root)) == 1


def test_nodes_that_could_not_end_with_their_daemon_are_ended_by_the_next(root: Path) -> None:
    nodes, (node,), members = start_stubborn(root, 1)
    nodes.freeze(GROUP, node.id)
    poll(lambda: states(members) == {"T"})
    (daemon,) = daemons(root)
    end(daemon)
    assert living(members)
    nodes.purge(GROUP)
    assert living(members) == set()
    assert [node.end_cause for node in nodes.describe(GROUP).nodes] == [EndCause.CHOICE]


def test_a_crash_is_dated_by_the_last_sign_of_life(root: Path) -> None:
    nodes = make_cloud(root, GROUP)
    start(nodes, 1)
    (daemon,) = daemons(root)
    end(daemon)
    died = datetime.now(timezone.utc)
    an_hour = timedelta(hours=1)
    for path in (root / "groups" / GROUP / "nodes").glob("*.json"):
        raw = json.loads(path.read_text())
        raw["launched_at"] = (died - an_hour).isoformat()
        path.write_text(json.dumps(raw))
    os.utime(root / "daemon.lock", ((died - an_hour / 2).timestamp(),) * 2)
    nodes.describe(GROUP)
    poll(lambda: nodes.describe(GROUP).nodes[0].ended_at is not None)
    ended_at = nodes.describe(GROUP).nodes[0].ended_at
    assert ended_at is not None
    assert abs(ended_at - (died - an_hour / 2)) < timedelta(seconds=2)


def test_a_node_that_is_taken_leaves_no_process_behind(root: Path) -> None:
    nodes, (node,), members = start_stubborn(root, 1)
    assert len(members) >= 5
    nodes.interrupt(GROUP, node.id, notice=False)
    poll(lambda: node.id not in {n.id for n in nodes.describe(GROUP).alive})
    assert living(members) == set()
    assert processes.marked(MARK, node.id) == ()


def test_after_a_purge_no_process_is_left_and_the_daemon_goes_too(root: Path) -> None:
    nodes, _, members = start_stubborn(root, 2)
    nodes.purge(GROUP)
    assert living(members) == set()
    poll(lambda: daemons(root) == [])


def test_a_nodes_disk_goes_with_it_and_its_logs_stay(root: Path) -> None:
    nodes = make_cloud(root, GROUP, user_data="echo hello")
    (node,) = start(nodes, 1)
    poll(lambda: node_record(root, node).user_data_exit == 0)
    nodes.purge(GROUP)
    poll(lambda: not home(root, node).exists())
    assert (home(root, node).parent / "user-data.log").read_text() == "hello\n"


def node_record(root: Path, node: Node):
    record = Folder(root).node(GROUP, node.id)
    assert record is not None
    return record


def test_user_data_runs_at_home_with_the_nodes_environment_and_its_exit_code_is_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-tell")
    nodes = make_cloud(root, GROUP, user_data='pwd; echo "$HOME"; echo "$GPUCLOUD_NODE"; env >&2; exit 7')
    (node,) = start(nodes, 1)
    poll(lambda: node_record(root, node).user_data_exit == 7)
    text = (home(root, node).parent / "user-data.log").read_text()
    assert text.splitlines()[:3] == [str(home(root, node)), str(home(root, node)), node.id]
    assert "do-not-tell" not in text
    assert f"AWS_EC2_METADATA_SERVICE_ENDPOINT=http://{node.address}:" in text
    (daemon,) = daemons(root)
    assert b"do-not-tell" not in Path(f"/proc/{daemon}/environ").read_bytes()


def test_each_node_has_an_address_of_its_own(root: Path) -> None:
    found = start(make_cloud(root, GROUP), 3)
    assert len({node.port for node in found}) == 3
    assert len({node.address for node in found}) == 3
    assert {node.private_address for node in found} == {node.address for node in found}


def test_many_callers_at_once_start_one_daemon_and_reach_one_level(root: Path) -> None:
    nodes = make_cloud(root, GROUP)
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    argv = [sys.executable, "-c", f"import sys\nsys.stdin.read()\n{RESIZE}", str(root), GROUP, "2"]
    callers = [subprocess.Popen(argv, stdin=subprocess.PIPE) for _ in range(4)]
    for caller in callers:
        assert caller.stdin is not None
        caller.stdin.close()
    assert [caller.wait(30) for caller in callers] == [0, 0, 0, 0]
    poll(lambda: len(running(nodes.describe(GROUP))) == 2)
    assert len(daemons(root)) == 1
    assert len(nodes.describe(GROUP).nodes) == 2


def resize_and_die(root: Path, when: str) -> None:
    nodes = make_cloud(root, GROUP)
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    argv = (sys.executable, "-c", f"WHEN = {when!r}\n{KILLED}\n{RESIZE}", str(root), GROUP, "2")
    assert subprocess.run(argv).returncode == -signal.SIGKILL


def test_a_level_is_kept_though_its_author_dies_as_it_is_written_and_nobody_looks(root: Path) -> None:
    resize_and_die(root, "after")
    folder = Folder(root)
    poll(lambda: [node.state for node in folder.nodes(GROUP)] == [NodeState.RUNNING] * 2)
    assert len(daemons(root)) == 1


def test_a_daemon_whose_first_level_was_never_written_ends(root: Path) -> None:
    resize_and_die(root, "before")
    poll(Folder(root).daemon_pid.exists)
    poll(lambda: daemons(root) == [])
    assert Folder(root).nodes(GROUP) == ()


def test_many_kicks_at_once_start_one_daemon(root: Path) -> None:
    nodes = make_cloud(root, GROUP)
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    nodes.resize(GROUP, 1, POOL)
    for _ in range(3):
        (daemon,) = daemons(root)
        end(daemon)
        threads = [threading.Thread(target=kick, args=(Folder(root),)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(daemons(root)) == 1


def test_the_daemon_is_in_nobodys_session_and_outlives_the_end_of_its_callers_terminal(root: Path) -> None:
    nodes = make_cloud(root, GROUP)
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    terminal, its_end = os.openpty()
    call = (
        f"import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{RESIZE}print('resized', flush=True)\ninput()\n"
    )
    argv = [sys.executable, "-c", call, str(root), GROUP, "1"]
    caller = subprocess.Popen(argv, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True)
    os.close(its_end)
    assert b"resized" in os.read(terminal, 100)
    poll(lambda: len(running(nodes.describe(GROUP))) == 1)
    (daemon,) = daemons(root)
    assert os.getsid(daemon) != caller.pid
    os.write(terminal, b"\x03")  # Ctrl-C
    assert caller.wait(10) != 0
    os.close(terminal)
    (node,) = nodes.describe(GROUP).alive
    assert os.getsid(processes.marked(MARK, node.id)[0]) not in (caller.pid, os.getsid(0))
    assert daemons(root) == [daemon]
    assert running(nodes.describe(GROUP)) == (node,)


def test_when_the_folder_is_removed_nodes_and_daemon_end(root: Path) -> None:
    nodes = make_cloud(root, GROUP)
    found = start(nodes, 2)
    rmtree(root)
    poll(lambda: daemons(root) == [] and not any(processes.marked(MARK, node.id) for node in found))


def test_a_group_that_is_deleted_is_gone_with_everything_and_may_be_deleted_again(root: Path) -> None:
    nodes, _, members = start_stubborn(root, 1)
    delete_group(root, GROUP)
    assert living(members) == set()
    assert not nodes.describe(GROUP).exists
    assert list((root / "groups").iterdir()) == []
    delete_group(root, GROUP)
    delete_group(root / "never", GROUP)


def test_a_node_that_dies_by_itself_is_swept_and_replaced(root: Path) -> None:
    nodes, _, members = start_stubborn(root, 1)
    (daemon,) = daemons(root)
    (first,) = (p.pid for p in processes.listing() if p.parent == daemon)
    os.kill(first, signal.SIGKILL)
    poll(lambda: nodes.describe(GROUP).nodes[0].end_cause is EndCause.CRASH)
    assert living(members) == set()
    poll(lambda: len(nodes.describe(GROUP).alive) == 1)


def test_nodes_that_cannot_start_do_not_come_in_floods(root: Path) -> None:
    nodes = make_cloud(root, GROUP, server=("/nonexistent/sshd",))
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    nodes.resize(GROUP, 2, POOL)
    poll(lambda: len(nodes.describe(GROUP).nodes) == 4)
    first, second = nodes.describe(GROUP).nodes[:2], nodes.describe(GROUP).nodes[2:]
    assert {node.end_cause for node in first} == {EndCause.CRASH}
    assert second[0].launched_at - first[1].launched_at >= timedelta(seconds=2)


def test_a_frozen_node_is_listed_as_running_and_answers_nothing(root: Path) -> None:
    nodes, (node,), members = start_stubborn(root, 1)
    nodes.freeze(GROUP, node.id)
    poll(lambda: states(members) == {"T"})
    assert running(nodes.describe(GROUP)) == (node,)
    nodes.terminate(GROUP, node.id)
    poll(lambda: not living(members))


def states(pids: set[int]) -> set[str]:
    listed = ",".join(str(pid) for pid in pids)
    shown = subprocess.run(["ps", "-o", "stat=", "-p", listed], capture_output=True, text=True).stdout
    return {line[0] for line in shown.split()}


def test_nodes_that_are_taken_again_and_again_are_replaced(root: Path) -> None:
    nodes = make_cloud(root, GROUP)
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    nodes.resize(GROUP, 2, POOL)
    with interrupted(nodes, GROUP, seed=3, mean_s=0.3, unannounced=1.0):
        poll(lambda: sum(n.end_cause is EndCause.INTERRUPTED for n in nodes.describe(GROUP).nodes) >= 3)
    nodes.purge(GROUP)
    poll(lambda: daemons(root) == [])


def test_a_notice_is_told_to_the_node_and_done_when_it_says(root: Path) -> None:
    nodes = make_cloud(root, GROUP, user_data='echo "$AWS_EC2_METADATA_SERVICE_ENDPOINT"', clock_factor=60.0)
    assert nodes.notice_seconds == 2.0
    old, other = start(nodes, 2)
    poll(lambda: all(node_record(root, node).user_data_exit == 0 for node in (old, other)))
    ask = asker(endpoint(root, old))
    assert ask("instance-id") == (200, old.id)
    assert ask("spot/instance-action")[0] == 404
    asked = datetime.now(timezone.utc)
    nodes.interrupt(GROUP, old.id, notice=True)
    poll(lambda: ask("spot/instance-action")[0] == 200, limit_s=1.5)
    told = json.loads(ask("spot/instance-action")[1])
    at = datetime.strptime(told["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    assert told["action"] == "terminate"
    assert timedelta(seconds=2) <= at - asked <= timedelta(seconds=3.5)
    assert asker(endpoint(root, other))("spot/instance-action")[0] == 404
    poll(lambda: old.id not in {node.id for node in nodes.describe(GROUP).alive})
    (ended,) = (node for node in nodes.describe(GROUP).nodes if node.id == old.id)
    assert ended.ended_at is not None
    assert timedelta(0) <= ended.ended_at - at < timedelta(seconds=1)


def endpoint(root: Path, node: Node) -> str:
    return (home(root, node).parent / "user-data.log").read_text().strip()


def asker(url: str) -> Callable[[str], tuple[int, str]]:
    request = Request(f"{url}/latest/api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    with urlopen(request) as answer:
        token = answer.read().decode()

    def ask(path: str) -> tuple[int, str]:
        request = Request(f"{url}/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": token})
        try:
            with urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, ""

    return ask


def test_a_cloud_that_cannot_start_says_where_to_look(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = make_cloud(root, GROUP)
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    broken = root.parent / "broken"
    (broken / "gpucloud").mkdir(parents=True)
    (broken / "gpucloud" / "__init__.py").write_text("raise ImportError('No module named this')")
    with monkeypatch.context() as patch:
        patch.setattr("gpucloud.adapters.local.group.import_path", lambda: {"PYTHONPATH": str(broken)})
        with pytest.raises(ProvisionError) as raised:
            nodes.resize(GROUP, 1, POOL)
    assert raised.value.hint == f"look into {root / 'daemon.log'}"
    assert b"No module named" in (root / "daemon.log").read_bytes()


def test_the_stand_in_is_what_the_nodes_here_run(root: Path) -> None:
    (node,) = start(make_cloud(root, GROUP), 1)
    commands = [words_of(pid)[1] for pid in processes.marked(MARK, node.id)]
    assert commands == [STAND_IN[1]]
