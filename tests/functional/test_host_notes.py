"""What runs on a host to take and to free it, as hosts run it: a text given to `python3 -c`, an order on its input."""

from __future__ import annotations

import getpass
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucloud.adapters.hosts import onhost
from gpucloud.adapters.transfer.copying import NodeProgram
from gpucloud.ports import Completed
from tests.commandline import until

ROOT = ".gpucloud/jobs/digits-0a/gpu1"
# A user whom files' modes bind: root, too, without the capabilities that pass over them (capabilities(7)).
BOUND = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def tell(home: Path, do: str, **changes):
    home.mkdir(exist_ok=True)
    order = {
        "do": do,
        "root": ROOT,
        "token": "aaaa",
        "name": "gpu1",
        "node": "gpu1-1",
        "job": "digits",
        "owner": "ada@laptop",
        "until": time.time() + 600,
        "now": time.time(),
        "devices": [],
        "store": "",
        **changes,
    }
    command = [*BOUND, sys.executable, "-I", "-c", inspect.getsource(onhost)]
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "SSH_CONNECTION": "10.0.0.9 5000 10.0.0.5 22"}
    done = subprocess.run(command, input=json.dumps(order), env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


OTHER = {"token": "bbbb", "job": "faces", "owner": "bob@ci", "root": ".gpucloud/jobs/faces-0b/gpu1", "node": "gpu1-7"}


def test_a_free_host_is_taken_and_says_by_which_address_it_was_reached(home):
    assert tell(home, "take") == {"address": "10.0.0.5"}


def test_taking_it_again_for_the_same_node_changes_nothing(home):
    tell(home, "take")
    kept = home / ROOT / "agent" / "status.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    assert tell(home, "take") == {"address": "10.0.0.5"}
    assert kept.exists()


def test_another_job_is_told_who_has_it_until_when(home):
    tell(home, "take", until=time.time() + 600)
    held = tell(home, "take", **OTHER)["held"]
    assert (held["job"], held["owner"], held["node"]) == ("digits", "ada@laptop", "gpu1-1")


def test_what_is_over_can_be_taken(home):
    tell(home, "take", until=time.time() - 1)
    assert tell(home, "take", **OTHER) == {"address": "10.0.0.5"}


@pytest.mark.parametrize("behind_s", [-3600, 3600])
def test_whose_clock_is_wrong_takes_a_host_for_as_long_as_anybody_else(home, behind_s):
    def wrong(in_s):
        now = time.time() - behind_s
        return {"now": now, "until": now + in_s}

    tell(home, "take", **wrong(600))
    held = tell(home, "take", **OTHER)["held"]
    assert held["until"] == pytest.approx(time.time() + 600, abs=30)
    told = tell(home, "take", **OTHER, **wrong(600))["held"]
    assert told["until"] == pytest.approx(time.time() - behind_s + 600, abs=30)
    tell(home, "keep", **wrong(-1))
    assert tell(home, "take", **OTHER) == {"address": "10.0.0.5"}


def test_a_job_that_goes_on_keeps_it(home):
    tell(home, "take", until=time.time() + 0.2)
    tell(home, "keep", until=time.time() + 600)
    time.sleep(0.2)
    assert tell(home, "take", **OTHER)["held"]["job"] == "digits"


@pytest.mark.parametrize(
    ("ours", "theirs", "free"),
    [
        (["0", "1"], ["2", "3"], True),
        (["0", "1"], ["1"], False),
        ([], ["1"], False),
        (["0"], [], False),
        ([], [], False),
    ],
)
def test_two_jobs_may_have_a_host_when_their_gpus_differ(home, ours, theirs, free):
    tell(home, "take", devices=ours)
    assert ("held" not in tell(home, "take", **OTHER, devices=theirs)) is free


def test_one_machine_under_two_names_is_not_taken_twice_by_one_job(home):
    tell(home, "take")
    assert tell(home, "take", name="gpu1-alias", node="gpu1-alias-2")["held"]["node"] == "gpu1-1"


def test_freed_is_free_and_nothing_of_the_job_is_left(home):
    tell(home, "take")
    (home / ROOT / "code").mkdir(parents=True)
    assert tell(home, "release") == {"left": []}
    assert not (home / ".gpucloud" / "jobs").exists()
    assert "held" not in tell(home, "take", **OTHER)


def test_freeing_what_was_never_taken_is_no_error_and_frees_nothing_else(home):
    tell(home, "take", **OTHER)
    assert tell(home, "release") == {"left": []}
    assert tell(home, "take")["held"]["job"] == "faces"


def test_a_store_that_is_another_folder_there_is_found_out(home, tmp_path):
    folder = tmp_path / "shared"
    record = folder / "clusters" / "gpucloud-digits" / "hosts.json"

    def fault():
        answer = tell(home, "take", store=str(record))
        assert "address" in answer or (answer["folder"], answer["login"]) == (str(folder), getpass.getuser())
        return answer.get("store")

    assert fault() == "missing"
    folder.mkdir()
    assert fault() == "another"
    record.parent.mkdir(parents=True)
    record.write_text('{"token": "another"}')
    assert fault() == "another"
    record.write_text('{"token": "aaaa"}')
    assert tell(home, "take", store=str(record)) == {"address": "10.0.0.5"}


@pytest.mark.parametrize(("mode", "fault"), [(0o000, "unreadable"), (0o500, "unwritable")])
def test_a_store_that_its_login_may_not_use_is_told_from_one_that_is_not_there(home, tmp_path, mode, fault):
    record = tmp_path / "shared" / "clusters" / "gpucloud-digits" / "hosts.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"token": "aaaa"}')
    record.parent.chmod(mode)
    try:
        assert tell(home, "take", store=str(record))["store"] == fault
    finally:
        record.parent.chmod(0o700)


def test_freeing_ends_the_jobs_processes_with_their_children_and_nobody_elses(home):
    tell(home, "take")
    mark = {**os.environ, "GPUCLOUD_ATTEMPT_DIR": str(home / ROOT / "attempts" / "0001")}
    theirs = {**os.environ, "GPUCLOUD_ATTEMPT_DIR": str(home / OTHER["root"] / "attempts" / "0001")}
    package = home / ROOT / "lib" / f"gpucloud-{'0' * 64}.zip"
    worker = subprocess.Popen(["sh", "-c", "env -i sleep 600 & exec sleep 600"], env=mark)
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(package), "agent"])
    other = subprocess.Popen(["sleep", "600"], env=theirs)
    reader = subprocess.Popen(["tail", "-F", str(home / ROOT / "agent" / "agent.log")], stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(children(worker.pid)) == 1, "the child runs")
        (child,) = children(worker.pid)
        assert tell(home, "release") == {"left": []}
        assert (worker.wait(5), agent.wait(5)) == (-9, -9)
        until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not is_alive(child), "the child is gone", 5)
        assert (other.poll(), reader.poll()) == (None, None)
    finally:
        for process in (worker, agent, other, reader):
            process.kill()
            process.wait()


class Here:
    """A host's shell as `NodeProgram` calls it; what it runs waits for the rest of its input."""

    def __init__(self, home: Path, root: str):
        self.node = SimpleNamespace(root=root, id="gpu1-1")
        self.home = home
        self.began: list[subprocess.Popen[bytes]] = []

    def run(self, argv, *, stdin, timeout_s):
        env = {**os.environ, "HOME": str(self.home)}
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=self.home)
        process.stdin.write(stdin)
        process.stdin.flush()
        self.began.append(process)
        return Completed(exit_code=0, stdout=b"", stderr=b"")


def test_what_is_being_written_for_the_job_is_ended_and_writes_nothing_after_all_was_removed(home):
    tell(home, "take")
    began = []
    for root, op in ((ROOT, "tree"), (ROOT, "write"), (ROOT, "read"), (OTHER["root"], "tree")):
        host = Here(home, root)
        base = f"{root}/code"
        (home / base).mkdir(parents=True, exist_ok=True)
        asked = {"name": "0" * 64, "most_bytes": None} if op == "tree" else {"pieces": [["x", "0" * 16, 0, 4]]}
        asked = {"pieces": [["x", 0, 4]]} if op == "read" else asked
        NodeProgram(host, base, python=sys.executable).run(op, **asked)
        began += host.began
    try:
        tree, write, read, other = began
        assert tell(home, "release") == {"left": []}
        assert (tree.wait(5), write.wait(5)) == (-9, -9)
        assert read.wait(5) != -9
        assert other.poll() is None
        assert not (home / ROOT).exists()
    finally:
        for process in began:
            process.kill()
            process.communicate()


def test_a_new_taking_ends_what_an_earlier_one_left_running(home):
    tell(home, "take")
    mark = {**os.environ, "GPUCLOUD_ATTEMPT_DIR": str(home / ROOT / "attempts" / "0001")}
    with subprocess.Popen(["sleep", "600"], env=mark) as worker:
        (home / ROOT / "attempts" / "0001").mkdir(parents=True)
        tell(home, "take", node="gpu1-2")
        assert worker.wait(5) == -9
    assert not (home / ROOT / "attempts").exists()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_freed_but_for_what_is_to_be_kept_only_that_is_left(home):
    tell(home, "take")
    for name in ("code/aa/out/model.pt", "code/bb/train.py", "attempts/0001/exit.json", "lib/gpucloud.zip"):
        (home / ROOT / name).parent.mkdir(parents=True)
        (home / ROOT / name).write_text("")
    (home / ROOT / "code" / "link").symlink_to(home)

    assert tell(home, "release", keep=["code/aa", "code/cc"]) == {"left": []}

    assert [str(path.relative_to(home / ROOT)) for path in (home / ROOT).rglob("*") if path.is_file()] == [
        "code/aa/out/model.pt"
    ]
    assert tell(home, "take", **OTHER) == {"address": "10.0.0.5"}
