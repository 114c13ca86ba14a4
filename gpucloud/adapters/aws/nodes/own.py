"""The level of a group as one of its own machines sets it: within the bounds that it finds, and down to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucloud.adapters.aws.nodes.arming import set_to_nothing
from gpucloud.adapters.aws.nodes.insisting import insist, unless_gone
from gpucloud.adapters.aws.nodes.watch import Watch
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

    def resize(self, watch: Watch, size: int, pool: Pool) -> None:  # noqa: ARG002  it is the group's
        """Bring the group to `size`; ProvisionError without a group, or above its limit.

        0 ends every machine in one call, this one too, and leaves a group that no machine can raise again.
        """
        listing, view = watch.renewed()
        if listing.group is None:
            raise watch.place.missing()
        most = int(listing.group.get("MaxSize", 0))
        if size > most:
            raise ProvisionError(
                f"{watch.place}: its machines may not raise its limit from {most} to {size}",
                hint="run `gpucloud train` outside",
            )
        if size == 0:
            set_to_nothing(self._aws, watch.place, self._sleep)
            watch.memory.set_level(0, watch.now())
            return
        with self._aws.calling("autoscaling", f"set the size of {watch.place} to {size}", watch.place.region) as client:
            for node in reversed(view.counted[size:] if size < view.size else ()):
                self._end(client, node.id)
            self._set(client, watch, size)

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
