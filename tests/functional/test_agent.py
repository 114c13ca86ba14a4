"""The agent as a real daemon, over real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.packaging import package_zip
from gpucloud.agent.attempt.composing import signalled
from gpucloud.agent.scripts import script
from gpucloud.domain.job.spec import Job, Market, Resources
from gpucloud.domain.node.launch import launches
from gpucloud.domain.node.member import AttemptStart, Place
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.node.output import read_marks
from gpucloud.domain.node.status import Outcome, RunState, Stop
from gpucloud.domain.offer import Pool
from gpucloud.system import processes
from tests.standins import ports
from tests.standins.agent_node import AgentNode, wait_until
from tests.standins.metadata_service import MetadataService

# A launcher with every kind of child that outlives a plain kill; each says when it is ready.
HARD_TO_KILL = """
import os, signal, subprocess, sys, time
def ready(name):
    open(os.path.join(os.environ["GPUCLOUD_ATTEMPT_DIR"], name), "w").close()
deaf = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (15, 1, 2)]; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", deaf])
subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ready("daemon")
        time.sleep(600)
    os._exit(0)
if "BARE" in os.environ and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", deaf], {})
    os._exit(0)
ready("all")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    data, sha256 = package_zip()
    path = tmp_path_factory.mktemp("lib") / f"gpucloud-{sha256}.zip"
    path.write_bytes(data)
    return path


@pytest.fixture
def node(tmp_path, package):
    node = AgentNode(tmp_path, package)
    yield node
    node.destroy()


@pytest.fixture
def free_port():
    return ports.free_port()


def in_seconds(seconds):
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def test_a_second_start_says_already_and_the_first_agent_goes_on(node):
    assert node.start() == "started"
    first = node.pid
    assert node.start() == "already"
    assert node.start("--replace") == "already"
    assert node.pid == first
    assert processes.started(first)


def test_the_agent_has_no_terminal_no_open_pipe_and_a_session_that_is_not_its_callers(node):
    node.start()
    assert os.getsid(node.pid) != os.getsid(0)
    files = Path(f"/proc/{node.pid}/fd")
    log = node.root / "agent" / "agent.log"
    assert [(files / name).readlink() for name in "012"] == [Path("/dev/null"), log, log]


def test_the_beat_rises_within_a_second_even_when_nothing_happens(node):
    node.start()
    heartbeat = node.status().heartbeat
    node.wait_for(lambda s: s.heartbeat > heartbeat, "a heartbeat", 1.0)


def test_a_command_that_exits_0_is_done_and_its_output_is_in_the_launcher_log(node):
    node.start()
    node.want(node.launch(1, "/bin/sh", "-c", 'echo "$WORD"; pwd', WORD="a b"))
    attempt = node.wait_exited(1).attempt
    assert (attempt.outcome, attempt.exit_code) == (Outcome.DONE, 0)
    assert (node.folder(1) / "launcher.log").read_text() == f"a b\n{node.root}\n"


def test_a_command_that_exits_otherwise_failed_and_75_means_left(node):
    node.start()
    node.want(node.launch(1, "/bin/sh", "-c", "exit 3"))
    attempt = node.wait_exited(1).attempt
    assert (attempt.outcome, attempt.exit_code) == (Outcome.FAILED, 3)
    node.want(node.launch(2, "/bin/sh", "-c", "exit 75"))
    assert node.wait_exited(2).attempt.outcome is Outcome.LEFT


def test_a_command_that_cannot_be_started_failed_and_the_log_says_why(node):
    node.start()
    node.want(node.launch(1, "/no/such/program"))
    attempt = node.wait_exited(1).attempt
    assert (attempt.outcome, attempt.exit_code) == (Outcome.FAILED, 127)
    assert "/no/such/program" in (node.folder(1) / "launcher.log").read_text()


def test_last_words_of_all_local_ranks_decide_before_the_exit_code_does(node):
    node.start()
    words = 'cd "$GPUCLOUD_ATTEMPT_DIR"; touch left-2.json left-3.json; exit 1'
    node.want(node.launch(1, "/bin/sh", "-c", words, GPUCLOUD_RANKS="2 3"))
    assert node.wait_exited(1).attempt.outcome is Outcome.LEFT
    one_missing = 'cd "$GPUCLOUD_ATTEMPT_DIR"; touch left-2.json; exit 1'
    node.want(node.launch(2, "/bin/sh", "-c", one_missing, GPUCLOUD_RANKS="2 3"))
    assert node.wait_exited(2).attempt.outcome is Outcome.FAILED
    barred = 'cd "$GPUCLOUD_ATTEMPT_DIR"; touch barred-3.json; exit 1'
    node.want(node.launch(3, "/bin/sh", "-c", barred, GPUCLOUD_RANKS="2 3"))
    assert node.wait_exited(3).attempt.outcome is Outcome.BARRED


def test_workers_that_said_their_last_word_are_waited_for_and_their_launcher_is_not(node):
    node.start()
    worker = "touch left-0.json; sleep 0.5; touch worker-ended"
    code = f'cd "$GPUCLOUD_ATTEMPT_DIR"; sh -c "{worker}"; exec sleep 600'
    node.want(node.launch(1, "/bin/sh", "-c", code, GPUCLOUD_RANKS="0"))
    assert node.wait_exited(1, limit_s=5).attempt.outcome is Outcome.LEFT
    assert (node.folder(1) / "worker-ended").exists()
    assert node.alive(1) == ()


@pytest.mark.parametrize("how", ["kill", "no launch", "next attempt"])
def test_the_end_leaves_nothing_alive_whatever_the_tree_does(node, how):
    node.start()
    # BARE: one child more, which also threw away the environment, and with it our mark.
    node.want(node.python(1, HARD_TO_KILL, BARE="1"))
    wait_until(lambda: (node.folder(1) / "all").exists() and (node.folder(1) / "daemon").exists(), "the tree")
    wait_until(lambda: len(processes.descendants(node.pid)) == 5, "every child")
    tree = processes.descendants(node.pid)
    begun = time.monotonic()
    match how:
        case "kill":
            node.want(node.python(1, HARD_TO_KILL, BARE="1"), stop=Stop.KILL)
        case "no launch":
            node.want(None)
        case _:
            node.want(node.launch(2, "/bin/sh", "-c", "exec sleep 600"))
            node.wait_running(2)
    if how != "next attempt":
        attempt = node.wait_exited(1).attempt
        assert (attempt.outcome, attempt.failed_rank) == (Outcome.KILLED, None)
    assert time.monotonic() - begun < 4.0  # 0.3 s on an idle machine
    assert node.alive(1) == ()
    assert [pid for pid in tree if processes.started(pid)] == []


def test_what_a_finished_script_left_behind_is_killed_too(node):
    node.start()
    node.want(node.launch(1, "/bin/sh", "-c", "setsid sleep 600 & exit 0"))
    assert node.wait_exited(1).attempt.outcome is Outcome.DONE
    assert node.alive(1) == ()


def test_how_long_a_script_has_been_over_is_told_by_a_later_agent_too(node):
    node.start()
    node.want(node.launch(1, "/bin/true"))
    over_s = node.wait_exited(1).attempt.over_s
    node.sigkill()
    node.start()
    assert node.wait_for(lambda s: s.attempt.over_s > over_s, "the time since").attempt.outcome is Outcome.DONE


def test_an_attempt_whose_agent_died_is_swept_and_reported_killed_by_the_next_agent(node):
    node.start()
    launch = node.python(1, HARD_TO_KILL)
    node.want(launch)
    wait_until((node.folder(1) / "all").exists, "the tree")
    node.sigkill()
    assert node.alive(1) != ()
    assert node.start() == "started"
    attempt = node.status().attempt
    assert (attempt.attempt, attempt.state, attempt.outcome) == (1, RunState.EXITED, Outcome.KILLED)
    assert attempt.over_s is None  # it may have been over long before
    assert node.alive(1) == ()


def test_what_a_rank_wrote_is_dated_and_what_it_wrote_while_no_agent_looked_is_told_without_a_time(node):
    node.start()
    began_ms = time.time_ns() // 1_000_000
    writes = 'log="$GPUCLOUD_ATTEMPT_DIR/rank-0.log"; echo one >"$log"; until [ -e "$GPUCLOUD_ATTEMPT_DIR/go" ]; do'
    node.want(node.launch(1, "/bin/sh", "-c", f'{writes} sleep 0.05; done; echo two >>"$log"; exec sleep 600'))
    node.wait_for(lambda s: s.attempt and s.attempt.output == ((0, 4),), "the first line")
    node.sigkill()
    (node.folder(1) / "go").touch()
    wait_until(lambda: (node.folder(1) / "rank-0.log").read_bytes() == b"one\ntwo\n", "the second line")
    node.start()
    attempt = node.status().attempt
    assert (attempt.outcome, attempt.output, attempt.dropped) == (Outcome.KILLED, ((0, 8),), ())
    ((mark,), _) = read_marks((node.folder(1) / "rank-0.times").read_bytes(), 0, 0)
    assert mark.until == 4
    assert began_ms <= mark.at_ms <= time.time_ns() // 1_000_000


def test_the_same_attempt_is_never_started_twice_not_even_by_another_agent(node):
    node.start()
    launch = node.launch(1, "/bin/sh", "-c", 'echo once >>"$GPUCLOUD_ATTEMPT_DIR/../count"')
    node.want(launch)
    before = node.wait_exited(1)
    node.want(launch, epoch=2)
    node.wait_for(lambda s: s.epoch == 2, "the new epoch")
    node.sigkill()
    node.start()
    heartbeat = node.status().heartbeat
    status = node.wait_for(lambda s: s.heartbeat > heartbeat + 1, "two heartbeats")
    assert (node.root / "attempts" / "count").read_text() == "once\n"
    assert replace(status.attempt, over_s=before.attempt.over_s) == before.attempt


def test_a_lower_epoch_is_refused_by_this_agent_and_by_the_next(node):
    node.start()
    running = node.launch(1, "/bin/sh", "-c", "exec sleep 600")
    node.want(running, epoch=5)
    node.wait_running(1)
    node.want(None, epoch=4)
    heartbeat = node.status().heartbeat
    status = node.wait_for(lambda s: s.heartbeat > heartbeat + 1, "two heartbeats")
    assert (status.epoch, status.attempt.state) == (5, RunState.RUNNING)
    node.sigkill()
    node.start()
    node.want(node.launch(2, "/bin/true"), epoch=4)
    heartbeat = node.status().heartbeat
    assert node.wait_for(lambda s: s.heartbeat > heartbeat + 1, "two heartbeats").attempt.attempt == 1


@pytest.mark.parametrize(
    "text", ["", '{"epoch": 9, "launch"', "[]", '{"epoch":9,"launch":null,"stop":"perhaps","paid_until":null}']
)
def test_a_torn_desired_changes_nothing(node, text):
    node.start()
    node.want(node.launch(1, "/bin/sh", "-c", "exec sleep 600"))
    node.wait_running(1)
    node.write_desired(text)
    heartbeat = node.status().heartbeat
    status = node.wait_for(lambda s: s.heartbeat > heartbeat + 1, "two heartbeats")
    assert (status.epoch, status.attempt.state) == (1, RunState.RUNNING)
    node.want(None)
    node.wait_exited(1)


def test_a_stop_asks_once_and_the_supervisor_decides_about_the_grace(node):
    node.start()
    launch = node.launch(1, "/bin/sh", "-c", "exec sleep 600")
    node.want(launch)
    node.wait_running(1)
    node.want(launch, stop=Stop.SAVE)
    stop = node.folder(1) / "stop.json"
    wait_until(stop.exists, "stop.json")
    written = stop.read_text()
    assert json.loads(written)["reason"] == "stop"
    heartbeat = node.status().heartbeat
    assert node.wait_for(lambda s: s.heartbeat > heartbeat + 1, "heartbeats").attempt.state is RunState.RUNNING
    assert stop.read_text() == written


def test_a_notice_is_in_the_status_and_in_stop_json_within_a_second(node):
    with MetadataService() as service:
        node.env.pop("AWS_EC2_METADATA_DISABLED")
        node.env |= {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.endpoint, "GPUCLOUD_NOTICE_POLL_S": "0.2"}
        node.start()
        node.want(node.launch(1, "/bin/sh", "-c", "exec sleep 600"))
        node.wait_running(1)
        wait_until(lambda: len(service.requests) > 2, "two polls")
        assert service.requests.count("PUT") == 1
        service.forget_tokens()
        service.action = '{"action": "terminate", "time": "2026-11-20T12:02:00Z"}'
        status = node.wait_for(lambda s: s.notice is not None, "the notice", 1.0)
        wait_until((node.folder(1) / "stop.json").exists, "stop.json", 1.0)
        assert status.notice.at == datetime(2026, 11, 20, 12, 2, tzinfo=timezone.utc)
        stop = json.loads((node.folder(1) / "stop.json").read_text())
        assert stop == {"reason": "notice", "at": "2026-11-20T12:02:00+00:00"}
        node.sigkill()


def test_a_recommendation_to_leave_is_in_the_status_and_asks_for_one_early_save_in_one_attempt(node):
    with MetadataService() as service:
        node.env.pop("AWS_EC2_METADATA_DISABLED")
        node.env |= {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.endpoint, "GPUCLOUD_NOTICE_POLL_S": "0.05"}
        service.rebalance = '{"noticeTime": "2026-11-20T12:00:00Z"}'
        node.start()
        node.want(node.launch(1, "/bin/sh", "-c", "exec sleep 600"))
        status = node.wait_for(lambda s: s.rebalance is not None, "the recommendation")
        assert (status.rebalance, status.notice) == (datetime(2026, 11, 20, 12, tzinfo=timezone.utc), None)
        wait_until((node.folder(1) / "save.json").exists, "save.json")
        assert json.loads((node.folder(1) / "save.json").read_text()) == {"since": 1795176000.0}
        assert not (node.folder(1) / "stop.json").exists()
        node.want(node.launch(2, "/bin/sh", "-c", "exec sleep 600"))
        status = node.wait_running(2)
        assert node.wait_for(lambda s: s.heartbeat > status.heartbeat + 1, "heartbeats").rebalance is not None
        assert not (node.folder(2) / "save.json").exists()
        node.sigkill()


STUCK = """
import subprocess, sys, threading, time
if sys.argv[1:] == ["launcher"]:
    # As torchrun does: each rank's output is a file of its own, and the launcher itself is no rank.
    worker = 'exec "$@" >>"$GPUCLOUD_ATTEMPT_DIR/rank-$RANK.log" 2>&1'
    import os
    ranks = [
        subprocess.Popen(["/bin/sh", "-c", worker, "sh", sys.executable, "-u", __file__], env={**os.environ, "RANK": r})
        for r in "01"
    ]
    sys.exit(max(rank.wait() for rank in ranks))
def waits_in_a_thread():
    time.sleep(600)
threading.Thread(target=waits_in_a_thread, daemon=True).start()
def waits_for_a_peer():
    print("in it", flush=True)
    time.sleep(600)
waits_for_a_peer()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_that_hang_tell_where_every_thread_is_and_are_killed_a_stopped_one_too(node, tmp_path, stopped):
    node.start()
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    launch = node.launch(1, sys.executable, str(script), "launcher", PYTHONFAULTHANDLER="1")
    node.want(launch)
    node.wait_running(1)
    logs = [node.folder(1) / f"rank-{rank}.log" for rank in (0, 1)]
    wait_until(lambda: all(log.exists() and "in it" in log.read_text() for log in logs), "both ranks")
    if stopped:
        for pid in processes.marked("RANK", "1"):
            if pid in node.alive(1):
                os.kill(pid, signal.SIGSTOP)
    node.want(launch, stop=Stop.ABORT)
    assert node.wait_exited(1).attempt.outcome is Outcome.KILLED
    for log in logs:
        assert "in waits_for_a_peer" in log.read_text()
        assert "in waits_in_a_thread" in log.read_text()
    assert node.alive(1) == ()
    assert not list(tmp_path.rglob("core*"))


def test_a_rank_that_takes_no_signal_is_killed_all_the_same(node):
    node.start()
    code = "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    launch = node.python(1, code, RANK="0")
    node.want(launch)
    node.wait_running(1)
    wait_until(lambda: "deaf" in (node.folder(1) / "launcher.log").read_text(), "the script")
    node.want(launch, stop=Stop.ABORT)
    assert node.wait_exited(1).attempt.outcome is Outcome.KILLED
    assert node.alive(1) == ()


WRITES = """
import os, signal, sys, time
torn, log = open("torn.pt", "wb"), open("log.txt", "a")
torn.write(b"half"), torn.flush()
def finish(*_):
    time.sleep(1 if "SLOWLY" in os.environ else 0.3)
    torn.write(b"+rest"), torn.close()
    print("finished", flush=True)
    sys.exit(3)
if "heeds" in sys.argv:
    signal.signal(signal.SIGTERM, finish)
open("whole.pt", "wb").write(b"whole")
print("writing", flush=True)
while True:
    time.sleep(0.1)
"""


OF_OURS = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("word", "stop", "named", "holds"),
    [
        ("heeds", Stop.KILL, [], b"half+rest"),
        ("deaf", Stop.KILL, ["torn.pt"], b"half"),
        ("deaf", Stop.ABORT, ["torn.pt"], b"half"),
    ],
)
def test_a_script_that_is_killed_may_end_what_it_writes_and_else_that_is_written_down(node, word, stop, named, holds):
    node.start()
    launch = replace(node.launch(1, sys.executable, "-c", WRITES, word, RANK="0"), outputs=True)
    node.want(launch)
    node.wait_running(1)
    wait_until(lambda: "writing" in (node.folder(1) / "launcher.log").read_text(), "the script")
    node.want(launch, stop=stop)
    assert node.wait_exited(1).attempt.outcome is Outcome.KILLED
    note = node.folder(1) / "writing.json"
    written = json.loads(note.read_text()) if note.exists() else []
    assert written == [str(node.root / name) for name in named]
    assert (node.root / "torn.pt").read_bytes() == holds


# A script without a handler, whose worker or service has one, as torch's loaders of data and wandb's have: it closes
# its files in mid-write when that goes. And a program that has one, and ends its script by the same signal, as torchrun
# does, or by a pipe that it leaves.
BREAKS = """
import multiprocessing, os, signal, subprocess, sys, time
word = sys.argv[1]
def work():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    print("writing", flush=True)
    time.sleep(600)
if word == "work":
    work()
if __name__ == "__main__":
    if word in ("launcher", "leaves"):
        child = subprocess.Popen([sys.executable, __file__, "deaf" if word == "launcher" else "left"], stdin=-1)
        def end(*_):
            if word == "launcher":
                child.terminate(), child.wait()
            child.stdin.close()
            time.sleep(0.5)
            sys.exit(1)
        signal.signal(signal.SIGTERM, end)
        while True:
            time.sleep(0.1)
    torn, last = open("torn.pt", "wb"), open("last.pt", "wb")
    torn.write(b"half"), torn.flush()
    if word == "deaf":
        print("writing", flush=True)
        time.sleep(600)
    if word == "left":
        print("writing", flush=True)
        ended = sys.stdin.read
    elif word == "service":
        ended = subprocess.Popen([sys.executable, __file__, "work"]).wait
    else:
        worker = multiprocessing.get_context(word).Process(target=work)
        worker.start()
        ended = worker.join
    try:
        ended()
        raise RuntimeError("a worker is gone")
    finally:
        last.write(b"a summary"), torn.close(), last.close()
        time.sleep(600)
"""


@pytest.mark.parametrize("word", ["fork", "spawn", "forkserver", "service", "launcher", "leaves"])
def test_a_script_is_asked_to_end_by_itself_alone_and_what_breaks_off_beside_is_written_down(node, word):
    node.start()
    (node.root / "breaks.py").write_text(BREAKS)
    words = (str(node.root / "breaks.py"), word, "--config=configs/breaks.py")  # its own name is no launcher's word
    launch = replace(node.launch(1, sys.executable, *words, RANK="0"), outputs=True)
    node.want(launch)
    node.wait_running(1)
    wait_until(lambda: "writing" in (node.folder(1) / "launcher.log").read_text(), "the script")
    node.want(launch, stop=Stop.KILL)
    assert node.wait_exited(1).attempt.outcome is Outcome.KILLED
    assert json.loads((node.folder(1) / "writing.json").read_text()) == [
        str(node.root / name) for name in ("last.pt", "torn.pt")
    ]
    assert (node.root / "torn.pt").read_bytes() == b"half"
    if word == "leaves":  # the script goes on when the program that was asked is gone, and is killed
        return
    assert (node.root / "last.pt").read_bytes() == b""  # nobody broke into it
    assert "a worker is gone" not in (node.folder(1) / "launcher.log").read_text()


@pytest.mark.parametrize("before", [("/bin/sh", "-c", '"$@"; true', "sh"), ("{}", "-c", OF_OURS)])
def test_a_script_is_asked_to_end_behind_a_shell_and_behind_the_checkpoint_watcher(node, before):
    node.start()
    own = tuple(word.format(sys.executable) if word == "{}" else word for word in before)
    launch = node.launch(1, sys.executable, "-c", WRITES, "heeds", RANK="0")
    launch = replace(launch, outputs=True, wrapper=own if before[0] == "{}" else ())
    launch = launch if launch.wrapper else replace(launch, argv=(*own, *launch.argv))
    node.want(launch)
    node.wait_running(1)
    wait_until(lambda: "writing" in (node.folder(1) / "launcher.log").read_text(), "the script")
    node.want(launch, stop=Stop.KILL)
    node.wait_exited(1)
    assert (node.root / "torn.pt").read_bytes() == b"half+rest"


# Two scripts, of which the second takes longer; whoever started them fails with the first that does.
TWO = """
import os, subprocess, sys
both = [subprocess.Popen(sys.argv[1:], env={**os.environ, **more}) for more in ({}, {"SLOWLY": "1"})]
sys.exit(both[0].wait())
"""

# As accelerate does, and deepspeed; as one finds what is installed, or starts the interpreter in its own way.
LAUNCH = """
import os, subprocess, sys
how, script, *words = sys.argv[1:]
words = {
    "as-it-is": ["-u", script, *words],
    "with-a-rank": ["-u", script, "--local_rank=0", *words],
    "installed": [os.path.abspath(script), *words],
    "by-itself": ["-W", "ignore", "-X", "faulthandler", script, *words, "--lr=0.1"],
}[how]
sys.exit(subprocess.call([sys.executable, *words]))
"""


RUNS_ANOTHER = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "model/main.py", "heeds"]))
"""

ALONE = ("./own.sh", "./trap.sh", "model/main.py", "job.yaml", "package", "package.main")


@pytest.mark.parametrize(
    "before",
    [
        ("{}", "-c", OF_OURS),  # as nsys starts it
        ("{}", "-c", OF_OURS, "/bin/sh", "-c", '"$@"; true', "sh"),
        ("{}", "-c", OF_OURS, "{}", "-c", OF_OURS),
        ("./run.sh",),  # no process of that name is a shell
        ("./run.sh", "env"),
        ("./own.sh",),
        ("{}", "-c", OF_OURS, "./own.sh"),
        ("{}", "launch.py", "as-it-is"),
        ("{}", "launch.py", "with-a-rank"),
        ("{}", "-c", OF_OURS, "{}", "launch.py", "with-a-rank"),
        ("{}", "launch.py", "installed"),
        ("{}", "launch.py", "by-itself"),
        ("{}", "-c", TWO),
        ("{}", "main.py", "--entry=x", "model/main.py"),  # of one name, and not one file
        ("{}", "main.py", "--config", "job.yaml"),  # which script it runs is in no command line
        ("{}", "-m", "package"),
        ("{}", "-c", OF_OURS, "{}", "-m", "package.main"),
        ("./trap.sh",),  # told by a script's own handler, and not by a shell's trap, which waits for the script
    ],
)
def test_a_script_is_asked_to_end_below_programs_that_do_not_heed_it(node, before):
    node.start()
    (node.root / "run.sh").write_text('#!/bin/sh\n("$@"; true)\necho over\n')
    (node.root / "run.sh").chmod(0o700)
    (node.root / "writes.py").write_text(WRITES)
    (node.root / "writes").write_text(WRITES)
    (node.root / "own.sh").write_text(f"#!/bin/sh\n{sys.executable} writes.py heeds\necho over\n")
    (node.root / "own.sh").chmod(0o700)
    (node.root / "trap.sh").write_text(f"#!/bin/bash\ntrap 'echo trapped' TERM\n{sys.executable} writes.py heeds\n")
    (node.root / "trap.sh").chmod(0o700)
    (node.root / "launch.py").write_text(LAUNCH)
    for folder in (node.root / "model", node.root / "package"):
        folder.mkdir()
        (folder / "main.py").write_text(WRITES.replace('"heeds" in sys.argv', "True"))
    (node.root / "main.py").write_text(RUNS_ANOTHER)
    (node.root / "package" / "__main__.py").write_text(RUNS_ANOTHER)
    script = [] if before[-1] in ALONE else [sys.executable, "-c", WRITES, "heeds"]
    script = ["writes" if "installed" in before else "writes.py", "heeds"] if "launch.py" in before else script
    words = [*(word.format(sys.executable) if word == "{}" else word for word in before), *script]
    launch = replace(node.launch(1, *words, RANK="0"), outputs=True)
    node.want(launch)
    node.wait_running(1)
    log, scripts = node.folder(1) / "launcher.log", 2 if TWO in before else 1
    wait_until(lambda: log.read_text().count("writing") == scripts, "the script")
    node.want(launch, stop=Stop.KILL)
    assert node.wait_exited(1).attempt.outcome is Outcome.KILLED
    assert log.read_text().count("finished") == scripts
    assert (node.root / "torn.pt").read_bytes() == b"half+rest"


# A service as wandb's and TensorBoard's: installed, with a handler, beside or below a script that has none.
SERVES = """#!{}
import signal, time
def end(*_):
    print("service ended", flush=True)
    raise SystemExit
signal.signal(signal.SIGTERM, end)
print("serving", flush=True)
while True:
    time.sleep(0.1)
"""
WITH_A_SERVICE = """
import os, subprocess, sys, time
if "starts" in sys.argv:
    subprocess.Popen([os.environ["SERVICE"]])
print("training", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "words",
    [
        ("{}", "train.py", "starts", "--logger", "tensorboard"),
        ("./run.sh",),
        ("/bin/sh", "-c", '"$SERVICE" & exec {} train.py tensorboard'),
        ("/bin/sh", "-c", '"$SERVICE" & {} train.py; true'),
    ],
)
@pytest.mark.parametrize("environment", ["bin", ".gpucloud/.venv/bin"])
def test_a_service_gets_no_signal_in_place_of_a_script_without_a_handler(node, words, environment):
    node.start()
    service = node.root.parent / environment / "tensorboard"
    service.parent.mkdir(parents=True)
    (service.parents[1] / "pyvenv.cfg").touch()
    service.write_text(SERVES.format(sys.executable))
    service.chmod(0o700)
    (node.root / "train.py").write_text(WITH_A_SERVICE)
    (node.root / "run.sh").write_text(f'#!/bin/sh\n"$SERVICE" &\n{sys.executable} train.py\necho over\n')
    (node.root / "run.sh").chmod(0o700)
    argv = tuple(word.replace("{}", sys.executable) for word in words)
    launch = replace(node.launch(1, *argv, RANK="0", SERVICE=str(service)), outputs=True)
    node.want(launch)
    node.wait_running(1)
    log = node.folder(1) / "launcher.log"
    wait_until(lambda: {"serving", "training"} <= {*log.read_text().split()}, "both")
    found = signalled(node.folder(1), signal.SIGTERM, node.root)
    assert found.heeding == ()
    assert [processes.command(pid)[1] for pid in found.scripts] == ["train.py"]
    node.want(launch, stop=Stop.KILL)
    node.wait_exited(1)
    assert "service ended" not in log.read_text()


# A program with a handler, which starts a helper of the code folder that has none, or what it is told to.
BESIDE = """
import os, signal, subprocess, sys
def end(*_):
    print("ended", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
if "leaves" in sys.argv:
    os.mkdir("run"), os.chdir("run")
rest = [word for word in sys.argv[1:] if word != "leaves"]
if rest == ["model.pt"]:
    rest = [sys.executable, "heeding.py"]
subprocess.call(rest or [sys.executable, os.environ["CODE"] + "/helper.py"])
"""


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("{}", "train.py", "leaves"), ["train.py"]),
        (("/bin/sh", "-c", "{} train.py leaves; true"), ["train.py"]),
        (("{}", "../trainer"), ["../trainer"]),
        (("/bin/sh", "-c", "{} ../trainer; true"), ["../trainer"]),
        (("{}", "-c", BESIDE), ["-c"]),
        (("{}", "../trainer", "{}", "heeding.py"), ["heeding.py"]),  # by its command line it launches that
        (("{}", "../trainer", "{}", "helper.py"), ["../trainer"]),
        (("{}", "../accelerate", "{}", "helper.py"), []),
        (("{}", "../trainer", "model.pt"), ["heeding.py", "../trainer"]),
        (
            ("{}", "../make", "model.pt"),
            ["heeding.py"],
        ),  # it deletes what is not done yet, and signals the script again
        (("/bin/sh", "-c", "{} -c 'import time; time.sleep(600)' & {} ../trainer; true"), ["../trainer"]),
    ],
)
def test_a_program_with_a_handler_is_asked_where_what_it_runs_of_the_code_has_none(node, words, asked):
    node.start()
    (node.root / "helper.py").write_text("import time\nprint('helping', flush=True)\ntime.sleep(600)\n")
    (node.root / "heeding.py").write_text(
        "import signal\nsignal.signal(15, lambda *_: print('ended'))\nimport helper\n"
    )
    for path in (node.root / "train.py", *(node.root.parent / name for name in ("trainer", "accelerate", "make"))):
        path.write_text(BESIDE)
    argv = tuple(word.replace("{}", sys.executable) for word in words)
    node.want(node.launch(1, *argv, RANK="0", CODE=str(node.root)))
    node.wait_running(1)
    wait_until(lambda: "helping" in (node.folder(1) / "launcher.log").read_text(), "the helper")
    found = signalled(node.folder(1), signal.SIGTERM, node.root)
    assert [processes.command(pid)[1] for told in found.heeding for pid in told] == asked


@pytest.mark.parametrize(
    ("trap", "told"),
    [("EXIT", ["SIGTERM"]), ("TERM", ["SIGTERM"]), ("USR1", ["SIGUSR1"]), ("TERM USR1", ["SIGTERM", "SIGUSR1"])],
)
def test_a_trap_at_the_exit_of_a_shell_is_none_for_a_signal_of_a_notice(node, trap, told):
    node.start()
    (node.root / "train.py").write_text(WITH_A_SERVICE)
    (node.root / "run.sh").write_text(f"#!/bin/bash\ntrap 'echo trapped' {trap}\n{sys.executable} train.py &\nwait\n")
    node.want(node.launch(1, "/bin/bash", "run.sh", RANK="0"))
    node.wait_running(1)
    wait_until(lambda: "training" in (node.folder(1) / "launcher.log").read_text(), "the script")
    found = {name: signalled(node.folder(1), signal.Signals[name], node.root) for name in ("SIGTERM", "SIGUSR1")}
    assert [name for name, signalling in found.items() if signalling.heeding] == told


def test_a_shell_is_told_for_its_trap_where_the_script_has_no_handler(node):
    node.start()
    (node.root / "train.py").write_text(WITH_A_SERVICE)
    (node.root / "run.sh").write_text(
        f"#!/bin/bash\ntrap 'echo copied; kill $!' TERM\n{sys.executable} train.py &\nwait\n"
    )
    launch = replace(node.launch(1, "/bin/bash", "run.sh", RANK="0"), outputs=True)
    node.want(launch)
    node.wait_running(1)
    log = node.folder(1) / "launcher.log"
    wait_until(lambda: "training" in log.read_text(), "the script")
    node.want(launch, stop=Stop.KILL)
    node.wait_exited(1)
    assert "copied" in log.read_text()


def test_who_cannot_see_handlers_says_nothing_of_them(node, monkeypatch):
    node.start()
    (node.root / "writes.py").write_text(WRITES)
    node.want(node.launch(1, sys.executable, "writes.py", "heeds", RANK="0"))
    node.wait_running(1)
    log = node.folder(1) / "launcher.log"
    wait_until(lambda: "writing" in log.read_text(), "the script")
    monkeypatch.setattr(processes, "shows_handlers", lambda: False)
    monkeypatch.setattr(processes, "handles", lambda *_: False)
    monkeypatch.setattr(processes, "program", lambda _: "")
    monkeypatch.setattr(processes, "command", lambda _: ())
    assert script.tell(node.folder(1), "SIGTERM", node.root) == (1, None)
    wait_until(lambda: "finished" in log.read_text(), "the script's end")


def test_a_script_that_does_not_leave_at_sigterm_is_killed_after_a_moment_and_at_once_where_nothing_is_paid(node):
    node.start()
    stays = "import signal, time; signal.signal(15, lambda *_: None); print('here')\nwhile True: time.sleep(1)"
    for number, paid_until in ((1, None), (2, in_seconds(9))):
        launch = replace(node.python(number, stays, RANK="0"), outputs=True)
        node.want(launch, paid_until=paid_until)
        log = node.folder(number) / "launcher.log"
        wait_until(lambda log=log: log.exists() and "here" in log.read_text(), "the script")
        began = time.monotonic()
        if paid_until is None:
            node.want(launch, stop=Stop.KILL)
            node.wait_exited(number)
            assert 2.5 < time.monotonic() - began < 6
        else:
            node.wait_exited(number)
            assert datetime.now(timezone.utc) - paid_until < timedelta(seconds=2)


def test_paid_time_that_ends_saves_first_then_kills_then_powers_off(node):
    off = node.root / "off"
    node.start("--power-off", "/bin/sh", "-c", f'echo off >>"{off}"')
    launch = node.launch(1, "/bin/sh", "-c", "exec sleep 600")
    until = in_seconds(2.0)
    node.want(launch, paid_until=until)
    node.wait_running(1)
    stop = node.folder(1) / "stop.json"
    wait_until(stop.exists, "stop.json", 3)
    assert datetime.now(timezone.utc) < until
    assert json.loads(stop.read_text()) == {"reason": "budget", "at": until.isoformat()}
    assert not off.exists()
    assert node.wait_exited(1, limit_s=3).attempt.outcome is Outcome.KILLED
    assert datetime.now(timezone.utc) >= until
    wait_until(off.exists, "the power-off")
    heartbeat = node.status().heartbeat
    node.wait_for(lambda s: s.heartbeat > heartbeat + 1, "two heartbeats")
    assert off.read_text() == "off\n"


def test_a_node_told_to_power_off_later_than_its_paid_time_does_so(node):
    off = node.root / "off"
    node.start(
        "--power-off-after", "1.5", "--power-off", "/bin/sh", "-c", f'date +%s.%N >"{off}.new"; mv "{off}.new" "{off}"'
    )
    until = in_seconds(0.5)
    node.want(paid_until=until)
    wait_until(off.exists, "the power-off")
    assert 1.5 <= float(off.read_text()) - until.timestamp() < 3


def test_collectives_listen_where_the_nodes_own_address_is_unless_the_launch_says_where(node):
    node.start()
    show = 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
    node.want(replace(node.launch(1, "/bin/sh", "-c", show, GLOO_SOCKET_IFNAME="ens5"), address="127.3.2.1"))
    node.wait_exited(1)
    assert (node.folder(1) / "launcher.log").read_text() == "ens5 =lo\n"


def test_a_longer_lease_keeps_the_attempt_running(node):
    node.start()
    launch = node.launch(1, "/bin/sh", "-c", "exec sleep 600")
    node.want(launch, paid_until=in_seconds(3))
    node.wait_running(1)
    node.want(launch, paid_until=in_seconds(600))
    until = time.monotonic() + 3.5
    node.wait_for(lambda s: time.monotonic() > until, "the old lease to be over")
    assert node.status().attempt.state is RunState.RUNNING
    assert not (node.folder(1) / "stop.json").exists()


def test_progress_is_passed_on_with_its_age_and_a_torn_one_is_passed_over(node):
    node.start()
    node.want(node.launch(1, "/bin/sh", "-c", "exec sleep 600"))
    node.wait_running(1)
    path = node.folder(1) / "progress.json"
    progress = {
        "step": 7, "first_step": 5, "total_steps": None, "loss": float("nan"), "phase": "train",
        "committed_step": 4, "step_seconds": 0.25, "written_at": time.time() - 10, "of_a_later_version": 1,
    }  # fmt: skip
    path.write_text(json.dumps(progress))
    seen = node.wait_for(lambda s: s.attempt.progress is not None, "progress").attempt.progress
    assert (seen.step, seen.first_step, seen.committed_step, seen.phase) == (7, 5, 4, "train")
    assert 10 <= seen.age_s < 13
    path.write_text('{"step": 8, "first')
    heartbeat = node.status().heartbeat
    assert node.wait_for(lambda s: s.heartbeat > heartbeat + 1, "two heartbeats").attempt.progress.step == 7


def test_an_agent_of_another_version_is_replaced(node, tmp_path):
    node.start()
    old = node.pid
    other = tmp_path / "other.zip"
    other.write_bytes(node.package.read_bytes() + b"\0")  # an archive may have a tail: same code, other hash
    node.package = other
    assert node.start() == "already"
    assert node.start("--replace") == "started"
    assert node.pid != old
    assert processes.started(old) is None


def test_torchrun_with_a_script_that_raises_failed_with_its_rank_and_one_traceback(node, tmp_path, free_port):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "print('rank', os.environ['RANK'])\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise ValueError('no such layer')\n"
        "time.sleep(600)\n"
    )
    node.start()
    node.want(_torchrun(node, script, free_port, tmp_path))
    attempt = node.wait_exited(1, limit_s=60).attempt
    assert (attempt.outcome, attempt.failed_rank, attempt.exit_code) == (Outcome.FAILED, 1, 1)
    logs = "".join(path.read_text() for path in sorted(node.folder(1).glob("*.log")))
    assert len(re.findall("ValueError: no such layer", logs)) == 1
    assert (node.folder(1) / "rank-0.log").read_text() == "rank 0\n"
    assert node.alive(1) == ()


def test_torchrun_with_a_script_that_saves_and_leaves_has_left(node, tmp_path, free_port):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "folder = os.environ['GPUCLOUD_ATTEMPT_DIR']\n"
        "while not os.path.exists(folder + '/stop.json'):\n"
        "    time.sleep(0.01)\n"
        "open(folder + '/left-' + os.environ['RANK'] + '.json', 'w').close()\n"
        "time.sleep(0.2)\n"
        "sys.exit(75)\n"
    )
    node.start()
    launch = _torchrun(node, script, free_port, tmp_path)
    node.want(launch)
    wait_until((node.folder(1) / "rank-1.log").exists, "the workers", 60)
    node.want(launch, stop=Stop.SAVE)
    assert node.wait_exited(1, limit_s=20).attempt.outcome is Outcome.LEFT


def _torchrun(node, script, port, code):
    here = Node(
        id="n1", pool=Pool(instance_type="cpu", zone="a", market=Market.SPOT), state=NodeState.RUNNING,
        launched_at=in_seconds(0), address="127.0.0.1", port=22, user="me", private_address="127.0.0.1", interface="lo",
    )  # fmt: skip
    job = Job(name="t", run=script.name, budget_usd=Decimal(1), source=script, code=code, resources=Resources(gpus=2))
    place = Place(node=here, python=sys.executable, package=str(node.package), code=str(code), root=str(node.root))
    start = AttemptStart(number=1, port=port, store_url="file:///nowhere", checkpoints="c")
    return launches(job, start, (place,), {})[0]
