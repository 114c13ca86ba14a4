"""A launcher whose port another program took has begun no rank: nothing of the user's is wrong, another attempt draws
another port.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpucloud.agent.attempt.files import AttemptFolder
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import CloseAttempt
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.ports import Completed
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.supervise.story import last_words
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.fakes.shell import FakeShell
from tests.unit.test_reconcile import GOAL, RULES, running
from tests.unit.worlds import part, up

TORCH = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
    "54611, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
)
OLDER_TORCH = (
    "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed "
    "to bind to [::]:29500 (errno: 98 - Address already in use).\n"
)
EMBEDDED = "RuntimeError: the ranks cannot meet at 127.1.0.1:29500: [Errno 98] Address already in use\n"
MPI = "OSError: [Errno 98] Address already in use\n"


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    made = AttemptFolder(tmp_path, 1)
    made.create()
    return made


def said(folder: AttemptFolder, text: str, exit_code: int = 1) -> Outcome:
    (folder.path / "launcher.log").write_text(f"Traceback (most recent call last):\n{text}")
    return folder.outcome((0, 1), exit_code, killed=False)


@pytest.mark.parametrize("text", [TORCH, OLDER_TORCH, EMBEDDED, MPI], ids=["torch", "older", "embedded", "mpi"])
def test_a_launcher_that_could_not_have_its_port_is_no_fault_of_the_script(folder, text):
    assert said(folder, text) is Outcome.BARRED


def test_a_script_that_began_answers_for_its_own_ports(folder):
    (folder.path / "rank-1.log").touch()
    assert said(folder, TORCH) is Outcome.FAILED


def test_any_other_failure_of_a_launcher_is_one(folder):
    assert said(folder, "ModuleNotFoundError: No module named 'torch'\n") is Outcome.FAILED
    assert folder.outcome((0, 1), 0, killed=False) is Outcome.DONE


def test_another_attempt_follows():
    world = running(up("a", part(1, Outcome.BARRED)), up("b", part(1, Outcome.KILLED)))
    assert decide(GOAL, world, RULES) == CloseAttempt(reason=ExitReason.LOST)


def test_its_user_is_told_of_the_port_and_not_of_torchs_inside(tmp_path):
    answers = Completed(exit_code=0, stdout=f"Traceback\n{TORCH}".encode(), stderr=b"")
    world = running(up("a", part(1, Outcome.BARRED)), up("b", part(1, Outcome.KILLED)))
    attempt = replace(world.state.attempt, port=54611)
    jobs = JobStore(MemoryStore(JumpingClock()), "digits")

    words = last_words(attempt, world, jobs, FakeShell(tmp_path, lambda *_: answers))

    assert words.shown == "a: another program took port 54611, at which the ranks were to meet"
    assert words.failure is None
