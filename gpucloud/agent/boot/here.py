"""This machine as a host: what a supervisor runs over SSH, run here."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.domain.errors import NodeError
from gpucloud.domain.job import Market
from gpucloud.domain.node import Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.ports import Completed


class ThisHost:
    """The `Host` of the node itself: commands run in the login's home, as SSH has them."""

    def __init__(self, root: Path) -> None:
        self.node = _this_node(root)

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        """Run argv and return when it ended. NodeError when it cannot be started, or takes longer than that."""
        try:
            process = subprocess.Popen(
                argv,
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
        """Nobody logs in."""

    def close(self) -> None:
        """Nothing is open."""


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
