"""The level of a group on AWS, from outside or by one of its own machines within the bounds that it finds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.arming import set_to_nothing, until_listed
from gpucloud.adapters.aws.nodes.launching import (
    NOT_ALLOWED,
    NoLaunchCall,
    insist,
    launch,
    pinned,
    settings,
    subnet_of,
    unless_gone,
)
from gpucloud.adapters.aws.nodes.listing import LEAST_AHEAD, AutoShutdown, Listing, Place, held_back, read_auto_shutdown
from gpucloud.adapters.aws.nodes.watch import Listed, Watch
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.node.node import GroupView
from gpucloud.domain.offer import EfaLayout, Pool
from gpucloud.system.retries import Retry

_LAG = Retry(first_s=0.5, tries=5)  # an older answer than one before it is one of some seconds ago


class Sizing:
    """Sets levels. Remembers when AWS has no `LaunchInstances`: the group then starts machines by itself.

    A pool that was refused is asked for again after `retry`, not before.
    """

    def __init__(
        self,
        aws: Aws,
        *,
        efa_of: Callable[[str], EfaLayout],
        now: Callable[[], datetime],
        sleep: Callable[[float], None],
        retry: timedelta,
    ) -> None:
        self._aws = aws
        self._efa_of = efa_of
        self._now, self._sleep = now, sleep
        self._retry = retry
        self._launches = True

    def resize(self, watch: Watch, listed: Listed, size: int, pool: Pool, cap_usd_per_hour: Decimal | None) -> None:
        """Bring the group, as just listed, to `size`; ProvisionError without one.

        And, to start machines, with too little time ahead. That is told by AWS's clock, which shuts off, and by what
        AWS lists, before the launch and after it. AWS's own level holds the machines that were relieved, too, until
        they are gone.
        """
        if listed[0].group is None:
            raise watch.place.missing()
        listing, view = self.with_time(watch, listed) if size > 0 else listed
        template = self._template(watch, pool, cap_usd_per_hour) if size > 0 else None
        with self._aws.calling("autoscaling", f"set the size of {watch.place} to {size}", watch.place.region) as client:
            if size < view.size:
                self._lower(client, size, pool, view)
            gone = self._let_go(client, watch, listing)
            beside = len(watch.memory.beside(listing))
            level, wanted = _given_up(listing, view, pool) - gone + beside, size + beside
            changes = settings(listing, wanted, pool, template)
            self._settle(client, watch, min(wanted, level), changes, listing=listing)
            if wanted > level and not watch.memory.was_refused(pool, self._now() - self._retry):
                self._grow(client, watch, wanted, pool, listing=listing, level=level)
                self._confirm(watch, listing)

    def with_time(self, watch: Watch, listed: Listed) -> Listed:
        """Return what AWS lists once it lists a schedule: one that was read back may lack in a later answer.

        ProvisionError where no machine would be started now, so near is the shut-off.
        """
        tries = _LAG.begin(self._sleep)
        while listed[0].shutdown_at is None and not held_back(listed[0]) and tries.again():
            listed = watch.renewed()
        require_time(watch.place, listed[0], self._now())
        return listed

    def _template(self, watch: Watch, pool: Pool, cap_usd_per_hour: Decimal | None) -> dict[str, str]:
        return pinned(self._aws, watch.place, pool, self._efa_of(pool.instance_type), cap_usd_per_hour)

    def _confirm(self, watch: Watch, before: Listing) -> None:
        """What was started while the shut-off fired, or was removed, is ended now: only what recurs would end it.

        A listing that lags is read again for as long as the shut-off that stood before cannot have fired.
        """
        aws, place = self._aws, watch.place

        def stands(listed: AutoShutdown) -> bool:
            return listed.armed is not None and listed.armed > (listed.asked_at or self._now())

        listed = read_auto_shutdown(aws, place)
        at = before.schedule.at
        lags = at is not None and at > (listed.asked_at or self._now())
        if stands(listed) or (lags and until_listed(aws, place, stands, self._sleep)):
            return
        set_to_nothing(aws, place, self._sleep)
        watch.memory.set_level(0, self._now())
        raise ProvisionError(
            f"{place}: the shut-off fired, or was removed, while machines were started: the group is set to 0",
            hint="the same command again",
            may_pass=True,
        )

    def _lower(self, client: Any, size: int, pool: Pool, view: GroupView) -> None:
        """Those of another pool go, then the newest, by their ids, each taking its place in the level along."""
        kept_first = sorted(view.counted, key=lambda node: node.pool != pool)
        for node in reversed(kept_first[size:]):
            _end(client, node.id, self._sleep)

    def _let_go(self, client: Any, watch: Watch, listing: Listing) -> int:
        """What was relieved and is gone leaves with its place, which the group would fill; return how many."""
        gone = watch.memory.outlived(listing)
        for node_id in gone:
            self._end_dead(client, watch, node_id)
            watch.memory.let_go(node_id, self._now())
        return len(gone)

    def _end_dead(self, client: Any, watch: Watch, node_id: str) -> None:
        """The group may have let it go by itself meanwhile: then no right to end members is one to end it."""
        try:
            _end(client, node_id, self._sleep)
        except botocore.exceptions.ClientError as error:
            if code_of(error) not in NOT_ALLOWED or node_id in watch.renewed()[0].counted:
                raise

    def _settle(self, client: Any, watch: Watch, level: int, changes: dict[str, Any], *, listing: Listing) -> None:
        """Give the group its bounds and what it starts; a level that falls is set along with them."""
        now = self._now()
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
                self._launch(client, watch, size, pool, listing=listing, level=level)
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

    def _launch(self, client: Any, watch: Watch, size: int, pool: Pool, *, listing: Listing, level: int) -> None:
        memory, settling = watch.memory, listing.settles(self._now())
        launched = launch(
            client,
            self._sleep,
            self._now,
            name=watch.place.cluster,
            number=size - level,
            pool=pool,
            subnet=subnet_of(listing, pool),
            token=memory.token(watch.place, pool, size, level, self._now()),
            settling=settling,
        )
        now = self._now()
        memory.answered()
        memory.started(launched.ids, pool, now)
        memory.refused(pool, launched.refusals)
        memory.set_level(level + len(launched.ids), now)


def require_time(place: Place, listing: Listing, now: datetime) -> None:
    """Raise ProvisionError unless a shut-off that ends every machine lies far enough ahead to start one."""
    until, at = listing.shutdown_at, listing.schedule.asked_at or now
    if until is not None and until - at >= LEAST_AHEAD:
        return
    held = held_back(listing)
    why = f"something holds it back: {', '.join(held)}" if held else f"it is {listing.schedule.armed}"
    raise ProvisionError(
        f"{place}: no machine starts without a shut-off time {LEAST_AHEAD.total_seconds():.0f} s ahead ({why})",
        hint="arm the group first",
        may_pass=True,
    )


def _given_up(listing: Listing, view: GroupView, pool: Pool) -> int:
    """Return the level to grow from: machines that the group cannot get in its old pool are not waited for."""
    relieved = {node.id for node in view.nodes if node.relieved}
    counting = {node.id for node in view.counted} | (listing.counted - relieved)
    refused = pool != listing.pool and any(refusal.pool == listing.pool for refusal in view.refusals)
    return min(view.size, len(counting)) if refused else view.size


def _end(client: Any, node_id: str, sleep: Callable[[float], None]) -> None:
    """End a member with its place in the level; one that is gone is ended."""
    asked = {"InstanceId": node_id, "ShouldDecrementDesiredCapacity": True}
    unless_gone(lambda: insist(lambda: client.terminate_instance_in_auto_scaling_group(**asked), sleep))


# The level of a group as one of its own machines sets it: within the bounds that it finds, and down to nothing.


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
                _end(client, node.id, self._sleep)
            self._set(client, watch, size)

    def with_time(self, watch: Watch, listed: Listed) -> Listed:
        """Return what is listed; ProvisionError where no machine would be started now, so near is the shut-off."""
        require_time(watch.place, listed[0], watch.now())
        return listed

    def _set(self, client: Any, watch: Watch, size: int) -> None:
        insist(
            lambda: client.set_desired_capacity(
                AutoScalingGroupName=watch.place.cluster, DesiredCapacity=size, HonorCooldown=False
            ),
            self._sleep,
        )
        watch.memory.set_level(size, watch.now())
