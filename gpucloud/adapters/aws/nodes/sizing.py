"""The level of a group on AWS: more machines by one synchronous launch, fewer by ending the newest."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from gpucloud.adapters.aws.nodes.insisting import insist, unless_gone
from gpucloud.adapters.aws.nodes.launching import NoLaunchCall, launch, settings, subnet_of
from gpucloud.adapters.aws.nodes.listing import Listing
from gpucloud.adapters.aws.nodes.watch import Watch
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.node import GroupView
from gpucloud.domain.offer import Pool


class Sizing:
    """Sets levels. Remembers when AWS has no `LaunchInstances`: the group then starts machines by itself.

    A pool that was refused is asked for again after `retry`, not before.
    """

    def __init__(
        self,
        aws: Aws,
        *,
        efa_of: Callable[[str], int],
        now: Callable[[], datetime],
        sleep: Callable[[float], None],
        retry: timedelta,
    ) -> None:
        self._aws = aws
        self._efa_of = efa_of
        self._now, self._sleep = now, sleep
        self._retry = retry
        self._launches = True

    def resize(self, watch: Watch, size: int, pool: Pool) -> None:
        """Bring the group to `size`; ProvisionError without a group or, above 0, without a shut-off that AWS lists."""
        listing, view = watch.renewed()
        if listing.group is None:
            raise watch.place.missing()
        if size > 0 and (listing.shut_off is None or listing.shut_off <= self._now()):
            raise ProvisionError(
                f"{watch.place}: no machine starts without a shut-off time ahead (it is {view.armed_until})",
                hint="arm the group first",
            )
        with self._aws.calling("autoscaling", f"set the size of {watch.place} to {size}", watch.place.region) as client:
            if size < view.size:
                self._lower(client, size, pool, view)
            level = _given_up(listing, view, pool)
            self._settle(client, watch, min(size, level), size, pool, listing=listing)
            if size > level and not watch.memory.was_refused(pool, self._now() - self._retry):
                self._grow(client, watch, size, pool, listing=listing, level=level)

    def _lower(self, client: Any, size: int, pool: Pool, view: GroupView) -> None:
        """Those of another pool go, then the newest, by their ids, each taking its place in the level along."""
        kept_first = sorted(view.counted, key=lambda node: node.pool != pool)
        for node in reversed(kept_first[size:]):
            self._end(client, node.id)

    def _end(self, client: Any, node_id: str) -> None:
        asked = {"InstanceId": node_id, "ShouldDecrementDesiredCapacity": True}
        unless_gone(lambda: insist(lambda: client.terminate_instance_in_auto_scaling_group(**asked), self._sleep))

    def _settle(self, client: Any, watch: Watch, level: int, size: int, pool: Pool, *, listing: Listing) -> None:
        """Give the group its bounds and what it starts; a level that falls is set along with them."""
        now = self._now()
        changes = settings(listing, size, pool, watch.place.template(self._efa_of(pool.instance_type)))
        falls = level < watch.memory.level(listing, now)
        if falls:
            changes["DesiredCapacity"] = level
        if changes:
            insist(
                lambda: client.update_auto_scaling_group(AutoScalingGroupName=watch.place.cluster, **changes),
                self._sleep,
            )
        if falls:
            watch.memory.set_level(level, now)

    def _grow(self, client: Any, watch: Watch, size: int, pool: Pool, *, listing: Listing, level: int) -> None:
        if self._launches:
            try:
                self._launch(client, watch, size, pool, subnet=subnet_of(listing, pool), level=level)
            except NoLaunchCall as error:
                self._launches = not error.lasting
            else:
                return
        insist(
            lambda: client.set_desired_capacity(
                AutoScalingGroupName=watch.place.cluster, DesiredCapacity=size, HonorCooldown=False
            ),
            self._sleep,
        )
        watch.memory.set_level(size, self._now())

    def _launch(self, client: Any, watch: Watch, size: int, pool: Pool, *, subnet: str, level: int) -> None:
        memory = watch.memory
        launched = launch(
            client,
            self._sleep,
            self._now,
            name=watch.place.cluster,
            number=size - level,
            pool=pool,
            subnet=subnet,
            token=memory.token(watch.place, pool, size, level, self._now()),
        )
        now = self._now()
        memory.answered()
        memory.started(launched.ids, pool, now)
        memory.refused(pool, launched.refusals)
        memory.set_level(level + len(launched.ids), now)


def _given_up(listing: Listing, view: GroupView, pool: Pool) -> int:
    """Return the level to grow from: machines that the group cannot get in its old pool are not waited for."""
    counting = {node.id for node in view.counted} | listing.counted
    refused = pool != listing.pool and any(refusal.pool == listing.pool for refusal in view.refusals)
    return min(view.size, len(counting)) if refused else view.size
