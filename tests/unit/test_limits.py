"""What the agent may have, so that attempts may."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpucloud.agent import daemon
from gpucloud.agent.attempt.decide import OwnEnd

SHOW = """
import resource
from gpucloud.agent.daemon import raise_limits
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 20))
raise_limits(lock_memory=False)
print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK))
"""


def test_what_an_attempt_may_have_is_raised_to_what_the_login_may() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert done.stdout == "(4096, 4096) (1048576, 1048576)\n"


@pytest.mark.parametrize(
    ("lock_memory", "before", "asks"),
    [(True, 1 << 16, True), (True, resource.RLIM_INFINITY, False), (False, 1 << 16, False)],
)
def test_root_is_asked_for_locked_memory_only_where_that_is_wanted_and_lacking(
    monkeypatch: pytest.MonkeyPatch, lock_memory: bool, before: int, asks: bool
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(argv: tuple[str, ...], **_: Any) -> None:
        asked.append(argv)

    monkeypatch.setattr(daemon.resource, "getrlimit", lambda _: (before, before))
    monkeypatch.setattr(daemon.subprocess, "run", run)
    monkeypatch.setattr(daemon.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(daemon.os, "getpid", lambda: 77)
    daemon.raise_limits(lock_memory=lock_memory)
    assert asked == [("sudo", "-n", "prlimit", "--pid=77", "--memlock=unlimited:unlimited")] * asks


class Sitting(Exception):
    """How far an agent's start is followed."""


class Seat:
    log = Path("/dev/null")

    def sit(self, package: str) -> None:
        raise Sitting(package)


def test_an_agent_has_no_more_open_files_than_programs_close_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    had = {resource.RLIMIT_NOFILE: (1024, 1 << 30), resource.RLIMIT_MEMLOCK: (1 << 16, 1 << 16)}
    monkeypatch.setattr(resource, "getrlimit", had.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", had.__setitem__)
    monkeypatch.setattr(daemon, "agent_process", lambda _: Seat())
    monkeypatch.setattr(daemon, "_redirect", lambda _: None)
    monkeypatch.setattr(daemon.os, "chdir", lambda _: None)
    monkeypatch.setattr(daemon.signal, "signal", lambda *_: None)
    monkeypatch.setattr(daemon.processes, "adopt_orphans", lambda: None)
    daemon.raise_limits(lock_memory=False)
    with pytest.raises(Sitting):
        daemon._be_agent(Path("/nowhere"), 0, package="", own_end=OwnEnd())
    assert had[resource.RLIMIT_NOFILE] == (1 << 20, 1 << 30)
