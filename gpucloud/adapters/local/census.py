"""Everything of the embedded cloud: its node groups and the nodes that live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpucloud.adapters.local.folder import Folder
from gpucloud.adapters.local.market import LocalMarket
from gpucloud.adapters.local.records import GroupRecord, NodeRecord
from gpucloud.domain.strays import CLUSTER, MANAGED, STORE, Thing
from gpucloud.ports import Provisioner

ACCOUNT = "embedded"


class LocalCensus:
    """Implements `Census` for the embedded cloud at `root`."""

    account = ACCOUNT
    regional = False

    def __init__(self, root: Path, provisioner: Provisioner) -> None:
        self._folder = Folder(root)
        self._provisioner = provisioner

    def things(self) -> tuple[Thing, ...]:
        """Return every group, and every node that lives."""
        if not self._folder.exists:
            return ()
        with self._folder.locked():
            groups = tuple(record for name in self._folder.groups() if (record := self._folder.group(name)))
            nodes = {record.name: self._folder.nodes(record.name) for record in groups}
        found = [_thing(record) for record in groups]
        found += [_machine(record, node) for record in groups for node in nodes[record.name] if node.alive]
        return tuple(found)

    def remove(self, cluster: str, region: str, things: tuple[Thing, ...], *, story: Callable[[str], None]) -> None:
        """End the group's nodes and remove it."""
        del things
        self._provisioner.destroy(self._provisioner.group(cluster, region), story=story)


def _thing(record: GroupRecord) -> Thing:
    own = ((MANAGED, "true"), (CLUSTER, record.name), (STORE, record.store))
    tags = {**dict(record.tags), **dict(own)}
    return Thing(kind="node-group", id=record.name, account=ACCOUNT, region=record.region, tags=tuple(tags.items()))


def _machine(record: GroupRecord, node: NodeRecord) -> Thing:
    group, prices = _thing(record), LocalMarket().prices(node.pool, node.launched_at, node.launched_at)
    return Thing(
        kind="instance",
        id=node.id,
        account=ACCOUNT,
        region=record.region,
        tags=group.tags,
        since=node.launched_at,
        usd_per_hour=prices[-1].usd_per_hour,
    )
