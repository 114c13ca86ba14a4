"""Own hosts as a cloud: nothing to make, and the price that the user names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal

from gpucloud.adapters.hosts.group import SshNodeGroup
from gpucloud.adapters.hosts.records import POOL, Recollection
from gpucloud.domain.job.spec import Resources
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.ports import Clock, ClusterSpec


class SshMarket:
    """Implements `MarketData`: one offer at one price. `check` raises when the hosts cannot be used at all.

    What is asked of the GPUs is taken as given: the node's own facts and the gate hold it against what is there.
    """

    def __init__(self, usd_per_hour: Decimal, clock: Clock, check: Callable[[], object]) -> None:
        self._usd_per_hour = usd_per_hour
        self._clock = clock
        self._check = check

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        """Return the one offer."""
        self._check()
        offer = Offer(
            pool=POOL,
            usd_per_hour=self._usd_per_hour,
            cap_usd_per_hour=self._usd_per_hour,
            as_of=self._clock.now(),
            gpus=wanted.gpus,
            gpu=wanted.gpu[0] if wanted.gpu else None,
            vram_gib=wanted.vram_gib,
        )
        return (offer,)

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:  # noqa: ARG002
        """Return the price, which does not change."""
        return (PricePoint(since=start, usd_per_hour=self._usd_per_hour),)


# What there is to make for own hosts: the record of who has them.


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
