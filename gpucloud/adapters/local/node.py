"""One embedded node: its sockets, keys and files, its process tree, and that tree's end."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gpucloud.adapters.local.ground import Ground, Launch
from gpucloud.domain.variables import GPUCLOUD_LAYERS, GPUCLOUD_NODE, GPUCLOUD_NOTICE_POLL_S, GPUCLOUD_PYTHON
from gpucloud.system import processes
from gpucloud.system.processes import import_path, user_name

MARK = GPUCLOUD_NODE
"""The variable that every process of a node bears, with the node's id."""


def new_id() -> str:
    """Return an id in EC2's form, never used before."""
    return f"i-0{secrets.token_hex(8)}"


# Notices run faster here than on EC2, so that agents look for them more often than each second.
_NOTICE_POLL_S = "0.2"


def server_command() -> tuple[str, ...]:
    """Return the command of the SSH server, without its options."""
    return (sys.executable, "-m", "gpucloud.adapters.local.sshd")


@dataclass(frozen=True, slots=True)
class HostKey:
    """A node's Ed25519 pair for SSH: the private half as an OpenSSH file, the public one as `ssh-ed25519 AAAA…`."""

    private: bytes
    public: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What a node is started from. `folder` is made; `user_data` is a shell script, empty for none.

    `layers` keeps what jobs' `setup` made, for all nodes of this machine. `devices` are the UUIDs of the node's GPUs;
    None on a machine without any. `variables` are added to its environment.
    """

    id: str
    folder: Path
    server: tuple[str, ...]
    public_key: str
    host_key: HostKey
    user_data: str
    variables: dict[str, str]
    layers: Path
    devices: tuple[str, ...] | None = None

    @property
    def home(self) -> Path:
        """The node's home folder."""
        return self.folder / "home"

    def argv(self, listener: int, parent_pipe: int) -> tuple[str, ...]:
        """Return the node's command line; both numbers are descriptors that it inherits."""
        server = (
            *self.server,
            *("--fd", str(listener)),
            *("--host-key", str(self.folder / "host_key")),
            *("--authorized-keys", str(self.folder / "authorized_keys")),
            *("--home", str(self.home)),
            *("--parent-pipe", str(parent_pipe)),
        )
        if self.user_data:
            return (sys.executable, "-m", "gpucloud.adapters.local.first_boot", "run", str(self.folder), *server)
        return server

    def environment(self) -> dict[str, str]:
        """Return the node's whole environment: nothing of the caller's, so that no secret of theirs is in it."""
        search = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        tool = shutil.which("nvidia-smi") if self.devices else None
        if tool and str(Path(tool).parent) not in search:
            search.append(str(Path(tool).parent))
        return {
            "PATH": os.pathsep.join(search),
            "LANG": "C.UTF-8",
            "HOME": str(self.home),
            "USER": user_name(),
            "LOGNAME": user_name(),
            MARK: self.id,
            GPUCLOUD_NOTICE_POLL_S: _NOTICE_POLL_S,
            GPUCLOUD_PYTHON: sys.executable,
            GPUCLOUD_LAYERS: str(self.layers),
            **self.variables,
            **import_path(),
            **self._gpus(),
        }

    def _gpus(self) -> dict[str, str]:
        """Return the variables by which the node's processes see its GPUs, and those of no other node."""
        if self.devices is None:
            return {}
        library = os.environ.get("LD_LIBRARY_PATH")
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
            **({"LD_LIBRARY_PATH": library} if library else {}),
        }


def start(boot: Boot, ground: Ground, listener: socket.socket, parent_pipe: int) -> subprocess.Popen[bytes]:
    """Write the node's files and start its process, which takes over `listener`; the caller's copy is closed."""
    boot.home.mkdir(parents=True)
    _write_private(boot.folder / "host_key", boot.host_key.private)
    _write_private(boot.folder / "authorized_keys", f"{boot.public_key}\n".encode())
    if boot.user_data:
        _write_private(boot.folder / "user-data", boot.user_data.encode())
    with listener:
        return ground.start(
            Launch(
                argv=boot.argv(listener.fileno(), parent_pipe),
                environment=boot.environment(),
                folder=boot.folder,
                home=boot.home,
                descriptors=(listener.fileno(), parent_pipe),
                parent_pipe=parent_pipe,
            )
        )


def destroy(node_id: str, process: subprocess.Popen[bytes]) -> bool:
    """End the node at once with everything that it started; False when something was still there after 5 s.

    Its first process is stopped, then everything below it killed, then the process itself: as long as it is there
    it is the parent of every orphan of the node (Linux), so that nothing escapes.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        processes.kill_below(process.pid, mark=(MARK, node_id))
        process.kill()
        process.wait()
    return sweep(node_id)


def sweep(node_id: str) -> bool:
    """End whatever bears the node's mark, with everything below it; False when something was left after 5 s."""
    return processes.kill_marked((MARK, node_id))


def end_orphans(nodes: Collection[int]) -> None:
    """End the children of this process, and everything below them, whose pids are not in `nodes`.

    This process adopts what a node leaves behind whose first process was killed by somebody else: it may bear no mark.
    """
    own = os.getpid()
    while orphans := [p.pid for p in processes.listing() if p.parent == own and p.pid not in nodes]:
        for pid in orphans:
            processes.kill_below(pid)
            os.kill(pid, signal.SIGKILL)  # it is there, as a zombie at least, until it is waited for
            os.waitpid(pid, 0)


def freeze(node_id: str, process: subprocess.Popen[bytes]) -> None:
    """Stop every process of the node, so that it answers nothing and yet is there."""
    processes.stop_tree(process.pid, mark=(MARK, node_id))


def thaw(node_id: str, process: subprocess.Popen[bytes]) -> None:
    """Let every process of the node go on."""
    processes.continue_tree(process.pid, mark=(MARK, node_id))


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


# Ends the node that it runs on, as `shutdown` does on a machine: `python -m gpucloud.adapters.local.node`.
#
# The node's first process is the topmost one above this that bears the node's mark.


def power_off() -> int:
    """End the node and return 0; 1 where this is none."""
    name = os.environ.get(MARK)
    first = first_of(os.getpid(), frozenset(processes.marked(MARK, name))) if name else None
    if first is None:
        sys.stderr.write("this is no node of the embedded fleet\n")
        return 1
    os.kill(first, signal.SIGTERM)
    os.kill(first, signal.SIGCONT)  # one that was stopped ends too
    return 0


def first_of(pid: int, members: frozenset[int]) -> int | None:
    """Return the topmost process above `pid` that belongs to the node; None when there is none."""
    parents = {process.pid: process.parent for process in processes.listing()}
    found = None
    while (pid := parents.get(pid, 0)) in members:
        found = pid
    return found


if __name__ == "__main__":
    sys.exit(power_off())
