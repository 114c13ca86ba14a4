"""Node groups of a fleet that tests may cut off, part and heal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.adapters.local.records import NodeRecord
from tests.emulation import program
from tests.emulation.grounds import Drill, drill_of
from tests.emulation.rights import missing_right

CUTTABLE = program("tests.emulation.daemon")
OWN_SPACES = (*CUTTABLE, "--own-spaces")
ALLOW = "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu), or run as root"


def own_spaces(home_mib: int = 0) -> tuple[str, ...]:
    """Return the daemon whose nodes have namespaces of their own; fail where they cannot run."""
    why = missing_right()
    assert why is None, f"nodes with namespaces of their own cannot run here: {why}; {ALLOW}"
    return (*OWN_SPACES, "--home-mib", str(home_mib))


class EmulatedGroup(LocalNodeGroup):
    """The product's groups, and what only nodes on the tests' grounds can meet with."""

    def __init__(self, root: Path, *, daemon: tuple[str, ...] | None = None, clock_factor: float | None = None) -> None:
        super().__init__(root, daemon=daemon, clock_factor=clock_factor)

    def cut(self, group: str, node_id: str) -> None:
        """Have nothing reach the node, and nothing it sends arrive: SSH, and its link to the other nodes if it has one.

        What runs on it goes on. On loopback the other nodes still reach it.
        """
        self._drill(group, node_id, cut=True)

    def part(self, group: str, node_id: str, segment: int) -> None:
        """Put the node on that side of a partition: it reaches nodes of the same side only, and SSH still answers."""
        assert "--own-spaces" in self._daemon, "nodes on loopback have no network that could be parted"
        self._drill(group, node_id, segment=segment)

    def heal(self, group: str, node_id: str) -> None:
        """Undo `freeze`, `cut` and `part`."""
        self._drill(group, node_id, cut=False, segment=0)
        self._change(group, node_id, _thawed)

    @property
    def _daemon(self) -> tuple[str, ...]:
        return self._folder.settings().daemon or ()

    def _drill(self, group: str, node_id: str, **changed: bool | int) -> None:
        assert self._daemon[: len(CUTTABLE)] == CUTTABLE, "the product's own daemon cuts nothing off"
        folder = self._folder.node_folder(group, node_id)
        replaced: Drill = replace(drill_of(folder), **changed)
        replaced.write(folder)


def _thawed(node: NodeRecord) -> NodeRecord:
    return replace(node, frozen=False)
