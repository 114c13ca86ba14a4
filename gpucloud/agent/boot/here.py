"""This machine as a host: what a supervisor runs over SSH, run here."""

from __future__ import annotations

import contextlib
import grp
import os
import platform
import pwd
import shlex
import signal
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.domain.errors import NodeError
from gpucloud.domain.job import Market
from gpucloud.domain.node import Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.ports import Completed

_BROUGHT = ("docker",)  # groups into which system software puts the login that uses it


class ThisHost:
    """The `Host` of the node itself: commands run in the login's home, as SSH has them."""

    def __init__(self, root: Path) -> None:
        self.node = _this_node(root)
        self._joined: tuple[str, ...] = ()

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        """Run argv and return when it ended. NodeError when it cannot be started, or takes longer than that."""
        try:
            process = subprocess.Popen(
                joining(argv, self._joined),
                cwd=Path.home(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise NodeError(f"{argv[0]}: {error.strerror}", hint=None) from error
        with process:
            try:
                out, said = process.communicate(stdin, timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise NodeError(f"`{' '.join(argv[:4])}` did not end within {timeout_s:g} s", hint=None) from error
        return Completed(exit_code=process.returncode, stdout=out, stderr=said)

    def sync(self, root: Path, target: str) -> str:
        """Nothing is sent to oneself."""
        raise NodeError(f"{root} cannot be sent to {target} on this node by itself", hint=None)

    def interact(self, argv: tuple[str, ...]) -> int:
        """Nobody sits at a node's terminal."""
        raise NodeError(f"no terminal for {argv[:1]}", hint=None)

    def renew(self) -> None:
        """Have what runs from now on be in the groups that this login got meanwhile, as a new login would."""
        self._joined = tuple(group for group in _BROUGHT if _is_new(group))

    def close(self) -> None:
        """Nothing is open."""


def joining(argv: tuple[str, ...], groups: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command as a member of these groups runs it (newgrp(1), `sg`)."""
    for group in groups:
        argv = ("sg", group, "-c", shlex.join(argv))
    return argv


def _is_new(name: str) -> bool:
    """Whether the login is in the group, and this process, which is older than that, is not."""
    try:
        group = grp.getgrnam(name)
    except KeyError:
        return False
    return pwd.getpwuid(os.getuid()).pw_name in group.gr_mem and group.gr_gid not in os.getgroups()


def _this_node(root: Path) -> Node:
    home = Path.home()
    below = root.relative_to(home) if root.is_relative_to(home) else root
    return Node(
        id=platform.node(),
        pool=Pool(instance_type="", zone="", market=Market.OWNED),
        state=NodeState.RUNNING,
        launched_at=datetime.now(timezone.utc),
        address="127.0.0.1",
        port=0,
        user=os.environ.get("USER", ""),
        private_address="127.0.0.1",
        interface=None,
        root=str(below),
    )
