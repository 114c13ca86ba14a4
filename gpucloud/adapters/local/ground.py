"""What embedded nodes stand on: the one point at which another kind of node is put in.

The daemon is given `Grounds`. Its own entry gives it `Loopback`; tests whose nodes need a network of their own have an
entry of theirs, which the fleet's folder names (`records.Settings.daemon`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpucloud.adapters.local import place
from gpucloud.adapters.local.imds import Instance, Metadata


class Ground(Protocol):
    """What one node stands on: its network, and what its first process is started in."""

    @property
    def interface(self) -> str:
        """The name of the interface that carries the traffic between nodes."""
        ...

    @property
    def private(self) -> str | None:
        """Where the other nodes reach it; None: at its own address."""
        ...

    @property
    def metadata(self) -> Metadata:
        """Its metadata service; whoever closes the ground has closed it."""
        ...

    @property
    def variables(self) -> dict[str, str]:
        """What of the node's environment is the ground's."""
        ...

    @property
    def stands(self) -> bool:
        """Whether it is there; a node ends with its ground."""
        ...

    def start(self, launch: Launch) -> subprocess.Popen[bytes]:
        """Start the node's first process. OSError when that fails."""
        ...

    def follow(self, process: subprocess.Popen[bytes], *, frozen: bool) -> None:
        """Make the ground as it is wanted now; called in every round of the daemon. Raises ProvisionError."""
        ...

    def close(self) -> None:
        """Give back what the node had, once none of its processes is left."""
        ...


class Grounds(Protocol):
    """Makes grounds, one for each node."""

    @property
    def pids(self) -> frozenset[int]:
        """Its own processes below the daemon: no orphans of a node."""
        ...

    def make(self, address: str, taken: Collection[str | None], instance: Callable[[], Instance]) -> Ground:
        """Return the ground of a node that SSH reaches at `address`. Raises ProvisionError.

        `taken` are the private addresses of the nodes that live; `instance` is what the metadata service tells.
        """
        ...

    def close(self) -> None:
        """End what all grounds share."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A node's first process: its command, its whole environment, its folders, and the descriptors it inherits.

    `parent_pipe`, one of these, is closed when the daemon dies: then the node ends.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    home: Path
    descriptors: tuple[int, ...]
    parent_pipe: int

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in a session of its own; what it writes goes to `console.log`."""
        with (self.folder / "console.log").open("wb") as console:
            return subprocess.Popen(
                self.argv,
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                pass_fds=self.descriptors,
                start_new_session=True,
            )


class Loopback:
    """Implements `Grounds`: nodes are processes of this machine, and meet on loopback."""

    pids: frozenset[int] = frozenset()

    def make(
        self,
        address: str,
        taken: Collection[str | None],  # noqa: ARG002  nodes meet at their addresses
        instance: Callable[[], Instance],
    ) -> Ground:
        """Return the ground of a node at that address."""
        return OnLoopback(address, instance)

    def close(self) -> None:
        """Do nothing."""


class OnLoopback:
    """Implements `Ground`."""

    private = None
    stands = True

    def __init__(self, address: str, instance: Callable[[], Instance]) -> None:
        self.interface = place.interface()
        self.metadata = Metadata(address, instance)

    @property
    def variables(self) -> dict[str, str]:
        """Where the metadata service is, which on EC2 has an address of its own."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.metadata.url}

    def start(self, launch: Launch) -> subprocess.Popen[bytes]:
        """Start the node's first process."""
        return launch.start()

    def follow(self, process: subprocess.Popen[bytes], *, frozen: bool) -> None:
        """Do nothing: loopback stays as it is."""

    def close(self) -> None:
        """Close the metadata service."""
        self.metadata.server_close()
