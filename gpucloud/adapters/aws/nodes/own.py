"""The level of a group as one of its own machines sets it: within the bounds that it finds, and down to nothing."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from gpucloud.adapters.aws.nodes.insisting import insist, unless_gone
from gpucloud.adapters.aws.nodes.sizing import require_time
from gpucloud.adapters.aws.nodes.watch import Listed, Watch
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.offer import Pool


class OwnSizing:
    """Sets levels with the rights of `terraform/aws/cluster`'s role: neither bounds nor pool nor shut-off are its own.

    The group starts and replaces machines by itself, as long as its level stands and its shut-off lies ahead.
    """

    def __init__(self, aws: Aws, *, sleep: Callable[[float], None]) -> None:
        self._aws = aws
        self._sleep = sleep

    def resize(
        self,
        watch: Watch,
        listed: Listed,
        size: int,
        pool: Pool,  # noqa: ARG002  it is the group's
        cap_usd_per_hour: Decimal | None,  # noqa: ARG002  so is what its machines may cost
    ) -> None:
        """Bring the group, as just listed, to `size`; ProvisionError without one, above its limit, near its shut-off.

        0 ends every machine in one call, this one too: the group's minimum is always 0.
        """
        listing, view = listed
        if listing.group is None:
            raise watch.place.missing()
        most = int(listing.group.get("MaxSize", 0))
        if size > most:
            raise ProvisionError(
                f"{watch.place}: its machines may not raise its limit from {most} to {size}",
                hint="run `gpucloud train` outside",
            )
        if size > view.size:
            require_time(watch.place, listing, watch.now())
        with self._aws.calling("autoscaling", f"set the size of {watch.place} to {size}", watch.place.region) as client:
            for node in reversed(view.counted[size:] if 0 < size < view.size else ()):
                self._end(client, node.id)
            self._set(client, watch, size)

    def with_time(self, watch: Watch, listed: Listed) -> Listed:
        """Return what is listed; ProvisionError where no machine would be started now, so near is the shut-off."""
        require_time(watch.place, listed[0], watch.now())
        return listed

    def _end(self, client: Any, node_id: str) -> None:
        asked = {"InstanceId": node_id, "ShouldDecrementDesiredCapacity": True}
        unless_gone(lambda: insist(lambda: client.terminate_instance_in_auto_scaling_group(**asked), self._sleep))

    def _set(self, client: Any, watch: Watch, size: int) -> None:
        insist(
            lambda: client.set_desired_capacity(
                AutoScalingGroupName=watch.place.cluster, DesiredCapacity=size, HonorCooldown=False
            ),
            self._sleep,
        )
        watch.memory.set_level(size, watch.now())
