"""What a machine that drives its own job may do to its cloud: its group's level and nodes, and no later shut-off."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal

from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job import Resources
from gpucloud.domain.node import GroupView
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.ports import ClusterSpec, MarketData, NodeGroup

_OUTSIDE = "run `gpucloud train` outside"


class OwnGroup:
    """Implements `NodeGroup` for one group only, its shut-off never later than it is. Raises ProvisionError."""

    def __init__(self, groups: NodeGroup, own: str) -> None:
        self._groups = groups
        self._own = own

    def describe(self, group: str) -> GroupView:
        """Return the group as the cloud lists it now."""
        return self._groups.describe(self._checked(group))

    def arm(self, group: str, until: datetime) -> None:
        """Move the shut-off closer."""
        armed = self._groups.describe(self._checked(group)).armed_until
        if armed is None or until > armed:
            raise ProvisionError(f"{group}: a machine may not move its shut-off from {armed} to {until}", hint=_OUTSIDE)
        self._groups.arm(group, until)

    def resize(self, group: str, size: int, pool: Pool, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Set the level."""
        self._groups.resize(self._checked(group), size, pool, cap_usd_per_hour=cap_usd_per_hour)

    def relieve(self, group: str, node_id: str, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Count a node that is being taken no more."""
        self._groups.relieve(self._checked(group), node_id, cap_usd_per_hour=cap_usd_per_hour)

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:
        """End one node by choice."""
        self._groups.terminate(self._checked(group), node_id, bad=bad)

    def purge(self, group: str) -> None:
        """Refused: whoever ends all machines and waits for it is none of them."""
        raise ProvisionError(f"{group}: a machine cannot see its own group end", hint=_OUTSIDE)

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> None:
        """Ask the cloud to take a node, as a drill."""
        self._groups.interrupt(self._checked(group), node_id, notice=notice)

    def _checked(self, group: str) -> str:
        if group != self._own:
            raise ProvisionError(f"{group}: a machine of {self._own} may not touch it", hint=_OUTSIDE)
        return group


class OwnMarket:
    """Implements `MarketData` where nothing is bought: what machines cost, and no offer of others."""

    def __init__(self, market: MarketData) -> None:
        self._market = market

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:  # noqa: ARG002
        """Return none."""
        return ()

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the pool's price points that cover start..end, in order."""
        return self._market.prices(pool, start, end)


class OwnProvisioner:
    """Implements `Provisioner` where nothing can be made or removed: machines have no Terraform."""

    def __init__(self, own: str) -> None:
        self._own = own

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  there is only one
        """Return the machine's own group."""
        return self._own

    def image(self, region: str) -> None:
        """Return None: what there is was chosen outside."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:  # noqa: ARG002
        """Refused."""
        raise ProvisionError(f"{spec.name}: a machine cannot make its own group", hint=_OUTSIDE)

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:  # noqa: ARG002
        """Refused."""
        raise ProvisionError(f"{group}: a machine cannot remove its own group", hint=_OUTSIDE)
