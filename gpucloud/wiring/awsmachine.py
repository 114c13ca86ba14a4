"""AWS as a machine of a job has it that drives itself: its own group and what things cost, with its role's rights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpucloud.domain.job import Access
from gpucloud.domain.offer import EfaLayout

if TYPE_CHECKING:
    from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
    from gpucloud.adapters.aws.session import Aws
    from gpucloud.domain.driving import DriveOrder
    from gpucloud.ports import MarketData
    from gpucloud.store import ObjectStore


def own_nodes(order: DriveOrder, store: ObjectStore) -> AwsNodeGroup:
    """Return the node groups as a machine reaches them: its peers by their private addresses, with host keys that its
    own role published; the instance's own role signs, and no bound or shut-off is moved. Raises ProvisionError.
    """
    from gpucloud.adapters.aws.account.identity import role_id_of
    from gpucloud.adapters.aws.machine.host_keys import HostKeys
    from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
    from gpucloud.wiring.aws import poll_s

    aws = _own_session(order)
    keys = HostKeys(store, order.cluster, role_id=role_id_of(aws))
    return AwsNodeGroup(
        aws,
        user=order.job.aws.user,
        access=Access.PRIVATE,
        host_key=lambda region, cluster, instance_id: keys.of(instance_id),  # noqa: ARG005  one cluster
        efa_of=lambda _: EfaLayout(),
        port=int(os.environ.get("GPUCLOUD_SSH_PORT", "22")),
        interval_s=poll_s(),
        own=True,
    )


def own_market(order: DriveOrder) -> MarketData:
    """Return what machines of the order's region cost; none is offered, for a machine buys none elsewhere."""
    from gpucloud.adapters.aws.prices.catalog import load
    from gpucloud.adapters.aws.prices.market import AwsMarket
    from gpucloud.usecases.owngroup import OwnMarket

    aws = _own_session(order)
    catalog = load().with_prices(aws.region, dict(order.on_demand))
    return OwnMarket(AwsMarket(aws, (aws.region,), catalog=catalog))


def _own_session(order: DriveOrder) -> Aws:
    """No profile: whatever the user calls his, the machine has its role."""
    from gpucloud.adapters.aws.session import Aws

    return Aws(None, order.region)
