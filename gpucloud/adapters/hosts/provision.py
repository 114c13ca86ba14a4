"""What there is to make for own hosts: the record of who has them."""

from __future__ import annotations

from collections.abc import Callable

from gpucloud.adapters.hosts.group import SshNodeGroup
from gpucloud.adapters.hosts.recollection import Recollection
from gpucloud.ports import ClusterSpec


class SshProvisioner:
    """Implements `Provisioner`: hosts are there already."""

    def __init__(self, records: Recollection, group: SshNodeGroup) -> None:
        self._records = records
        self._group = group

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  hosts have no region
        """Return the cluster's own name."""
        return name

    def image(self, region: str) -> None:
        """Return None: hosts have what they have."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        """Make the record and return the group's name; there is nothing to tell."""
        del story
        return self._records.make(spec.name).name

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        """Free what is taken, and forget the group; hosts that cannot be asked are named."""
        if self._records.read(group) is None:
            return
        self._group.purge(group)
        for node_id in self._group.uncleared(group):
            story(f"{node_id} does not answer: files of the job may be left there, below ~/.gpucloud/jobs")
        self._records.remove(group)
        story("own hosts: all are free, nothing of the job is left on those that answer")
