"""Node groups on AWS: the size, machines and shut-off of the Auto Scaling group that Terraform made."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.adapters.aws.nodes import arming
from gpucloud.adapters.aws.nodes.arming import (
    Left,
    Purge,
    end_all,
    lift,
    put_auto_shutdown,
    set_to_nothing,
    shut_down_now,
)
from gpucloud.adapters.aws.nodes.launching import insist, unless_gone
from gpucloud.adapters.aws.nodes.listing import RELIEVED_TAG, Place, Reach
from gpucloud.adapters.aws.nodes.sizing import OwnSizing, Sizing
from gpucloud.adapters.aws.nodes.watch import Listed, Recollection, Watch
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Access, Market
from gpucloud.domain.node.node import GroupView, Node, NodeState
from gpucloud.domain.offer import EfaLayout, Pool

_LATELY = timedelta(seconds=60)


class AwsNodeGroup:
    """Implements `NodeGroup`; a group's name is `<region>/<cluster>`. Thread-safe.

    `host_key` gives a machine's public host key by region, cluster and instance, None while it is not known; `efa_of`
    how EFA interfaces lie on machines of a type. A view is believed for `interval_s`, or until our own change; an
    empty listing after a purge only with another one `settle_s` later. `own`: it runs on a machine of the group, with
    that machine's rights: it sets the level within its limit and ends members, and leaves the rest to who is outside.
    """

    def __init__(  # noqa: PLR0913  what differs between a laptop, a company's network and a test
        self,
        aws: Aws,
        *,
        user: str,
        access: Access,
        host_key: Callable[[str, str, str], str | None],
        efa_of: Callable[[str], EfaLayout],
        port: int = 22,
        now: Callable[[], datetime] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        interval_s: float = 3.0,
        settle_s: float = 1.0,
        own: bool = False,
    ) -> None:
        self._aws = aws
        self._user, self._port, self._access = user, port, access
        self._host_key = host_key
        now = now or aws.now  # a schedule runs by AWS's clock
        self._now, self._sleep = now, sleep
        self._interval, self._settle_s = timedelta(seconds=interval_s), settle_s
        self._own = own
        self._sizing: Sizing | OwnSizing = (
            OwnSizing(aws, sleep=sleep)
            if own
            else Sizing(aws, efa_of=efa_of, now=now, sleep=sleep, retry=self._interval)
        )
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="aws-group")
        self._watches: dict[Place, Watch] = {}
        self._lock = threading.Lock()

    def describe(self, group: str) -> GroupView:
        """Return the group as AWS listed it within `interval_s`; up to 60 s old while AWS cannot be asked."""
        watch = self._watch(group)
        with watch.lock:
            return watch.view()

    def arm(self, group: str, until: datetime) -> None:
        """Set the shut-off, to the whole second before, and read it back; a time that has passed is this moment.

        What would keep it from ending machines is lifted first; as long as that stands, the group is not armed.
        """
        with self._changing(group) as watch:
            listing = watch.renewed()[0]
            if listing.group is None:
                raise watch.place.missing()
            lift(self._aws, watch.place, listing, lambda: watch.renewed()[0], self._sleep)
            at = put_auto_shutdown(self._aws, watch.place, until, listing.schedule, now=self._now, sleep=self._sleep)
            if at is None:
                shut_down_now(self._aws, watch.place, now=self._now, sleep=self._sleep)
                watch.memory.set_level(0, self._now())
            watch.memory.shutdown_at = at or min(until, self._now())

    def resize(self, group: str, size: int, pool: Pool, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Set the level; machines that AWS does not start are refusals in the view."""
        with self._changing(group) as watch:
            self._sizing.resize(watch, watch.renewed(), size, pool, cap_usd_per_hour)

    def relieve(self, group: str, node_id: str, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Have one machine more in the group, beside this one, which stays in it: no schedule ends what has left it."""
        with self._changing(group) as watch:
            listed = watch.renewed()
            node = _found(watch.place, listed, node_id)
            if node.state is NodeState.TERMINATED or node.relieved:
                return
            # Marked, with nothing to come in its place, it would be ended for nothing.
            listing, view = self._sizing.with_time(watch, listed)
            with self._aws.calling("ec2", f"mark {node_id} as relieved", watch.place.region) as ec2:
                ec2.create_tags(Resources=[node_id], Tags=[{"Key": RELIEVED_TAG, "Value": "true"}])
            relieved = watch.relieve(node_id, listing)
            self._sizing.resize(watch, (listing, relieved), view.size, node.pool, cap_usd_per_hour)

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:  # noqa: ARG002  never the same again
        """End one machine by its id; the group starts another one unless the machine was relieved."""
        with self._changing(group) as watch:
            node = _found(watch.place, watch.renewed(), node_id)
            if node.state is NodeState.TERMINATED or self._end_in_group(watch, node):
                return
            if not self._own:  # a machine may not end what is not in its group
                arming.end(self._aws, watch.place, (node_id,))

    def purge(self, group: str, *, keep: tuple[tuple[str, str], ...] = ()) -> None:  # noqa: ARG002  no disk stays
        """Set the level to 0, end every machine of the cluster, and return when none is listed any more."""
        with self._changing(group) as watch:
            if watch.renewed()[0].group is not None:
                set_to_nothing(self._aws, watch.place, self._sleep)
                watch.memory.set_level(0, self._now())
            launched = watch.memory.last_launch
            lately = launched is not None and self._now() - launched < _LATELY
            purge = Purge(
                place=watch.place,
                listings=3 if lately else 2,
                settle_s=self._settle_s,
                end=lambda ids: self._end_quietly(watch, ids),
                now=self._now,
                sleep=self._sleep,
            )
            end_all(lambda: self._left(watch), purge)

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> str | None:
        """Have AWS take a spot machine with two minutes' notice; without notice, end it."""
        with self._changing(group) as watch:
            node = _found(watch.place, watch.renewed(), node_id)
            if node.state is NodeState.TERMINATED:
                return None
            if not notice:
                arming.end(self._aws, watch.place, (node_id,))
                return None
            if node.pool.market is not Market.SPOT:
                raise ProvisionError(f"{node_id} is not a spot machine: AWS does not take it", hint="market: spot")
            listing = watch.renewed()[0]
            if listing.group is not None:
                return arming.send_notice(self._aws, watch.place, listing.group, node_id, self._sleep)
            return None

    @contextlib.contextmanager
    def _changing(self, group: str) -> Iterator[Watch]:
        watch = self._watch(group)
        with watch.lock:
            try:
                yield watch
            finally:
                watch.changed()

    def _watch(self, group: str) -> Watch:
        place = Place.of(group)
        with self._lock:
            if place not in self._watches:
                reach = Reach(region=place.region, user=self._user, port=self._port, access=self._access)
                self._watches[place] = Watch(
                    aws=self._aws,
                    place=place,
                    memory=Recollection(reach=reach),
                    threads=self._threads,
                    host_key=self._host_key,
                    now=self._now,
                    interval=self._interval,
                )
            return self._watches[place]

    def _end_in_group(self, watch: Watch, node: Node) -> bool:
        """End it as a member: the group replaces it at once, but for one that was replaced. False for no member."""
        with self._aws.calling("autoscaling", f"end {node.id}", watch.place.region) as client:
            asked = {"InstanceId": node.id, "ShouldDecrementDesiredCapacity": node.relieved}
            ends = unless_gone(
                lambda: insist(lambda: client.terminate_instance_in_auto_scaling_group(**asked), self._sleep)
            )
        if ends and node.relieved:
            watch.memory.let_go(node.id, self._now())
        return ends

    def _end_quietly(self, watch: Watch, ids: tuple[str, ...]) -> None:
        """What AWS could not take now is asked for again in the next round."""
        try:
            arming.end(self._aws, watch.place, ids)
        except ProvisionError as error:
            if not error.may_pass:
                raise

    def _left(self, watch: Watch) -> Left | None:
        try:
            listing, view = watch.renewed()
        except ProvisionError as error:
            if not error.may_pass:
                raise
            return None
        members = tuple(str(member["InstanceId"]) for member in listing.members)
        return Left(alive=tuple(node.id for node in view.alive), members=members)


def _found(place: Place, listed: Listed, node_id: str) -> Node:
    listing, view = listed
    found = [node for node in view.nodes if node.id == node_id]
    if listing.group is None and not found:
        raise place.missing()
    if not found:
        raise ProvisionError(f"{place} has no machine {node_id}", hint="take an id from the group's list")
    return found[0]
