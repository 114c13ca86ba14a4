"""A Shell without SSH: commands run in a folder per node, or are answered from a function."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpucloud.adapters.transfer.sync import sync_tree
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.node.node import Node
from gpucloud.ports import Completed, PortForward

Answers = Callable[[Node, tuple[str, ...], bytes], Completed | None]


class FakeShell:
    """`unreachable` holds ids of nodes that do not answer; `calls` every command sent, as (node id, argv)."""

    def __init__(self, homes: Path, answers: Answers | None = None) -> None:
        self.homes = homes
        self.answers = answers
        self.unreachable: set[str] = set()
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self._running = 0
        self._is_over = False
        self._changed = threading.Condition()

    def end(self) -> None:
        """Refuse what is asked from now on, and return when nothing runs any more: a thread may still be preparing."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._running)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a command for as long as it runs."""
        with self._changed:
            if self._is_over:
                raise HostUnreachable("the machines are gone")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def host(self, node: Node) -> FakeHost:
        host = FakeHost(self, node)
        host.check()
        return host

    def close(self) -> None:
        pass


class FakeHost:
    def __init__(self, shell: FakeShell, node: Node) -> None:
        self.node = node
        self._shell = shell
        self._home = shell.homes / node.id
        self._home.mkdir(parents=True, exist_ok=True)

    def check(self) -> None:
        if self.node.id in self._shell.unreachable:
            raise HostUnreachable(f"{self.node.id}: connection refused")

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        self.check()
        self._shell.calls.append((self.node.id, argv))
        with self._shell.running():
            answer = self._shell.answers(self.node, argv, stdin) if self._shell.answers else None
            return answer or self._execute(argv, stdin, timeout_s)

    def sync(self, root: Path, target: str) -> str:
        return sync_tree(self, root, target, python=sys.executable)

    def renew(self) -> None:
        pass

    def interact(self, argv: tuple[str, ...], forwards: tuple[PortForward, ...] = ()) -> int:
        return self.run(argv).exit_code

    def close(self) -> None:
        pass

    def _execute(self, argv: tuple[str, ...], stdin: bytes, timeout_s: float) -> Completed:
        env = {**os.environ, "HOME": str(self._home)}
        try:
            done = subprocess.run(argv, input=stdin, cwd=self._home, env=env, timeout=timeout_s, capture_output=True)
        except FileNotFoundError:
            return Completed(exit_code=127, stdout=b"", stderr=f"{argv[0]}: not found".encode())
        except subprocess.TimeoutExpired as error:
            raise HostUnreachable(f"{self.node.id}: did not end within {timeout_s:g} s") from error
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return Completed(exit_code=code, stdout=done.stdout, stderr=done.stderr)
