"""One group being watched: asked at most once an interval, with what was learned between listings, which lag."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone

from gpucloud.adapters.aws.faults import code_in, known, known_of_new
from gpucloud.adapters.aws.nodes.listing import (
    Described,
    Listing,
    Place,
    Reach,
    ended_by_a_user,
    is_relieved,
    node_of,
    read,
    refusal_of,
    with_activities,
)
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError, StoreError
from gpucloud.domain.node.node import EndCause, GroupView, Node, NodeState, Refusal
from gpucloud.domain.offer import Pool

# A view that cannot be renewed now is believed for so long.
_BELIEVED = timedelta(seconds=60)
_KEY_EVERY = timedelta(seconds=1)

Listed = tuple[Listing, GroupView]
"""What AWS lists of a group, raw and in our words."""


@dataclass
class Watch:
    """Knows one group. Whoever calls it holds `lock`."""

    aws: Aws
    place: Place
    memory: Recollection
    threads: Executor
    host_key: Callable[[str, str, str], str | None]
    now: Callable[[], datetime]
    interval: timedelta
    lock: threading.RLock = field(default_factory=threading.RLock)
    _view: GroupView | None = None
    _listing: Listing | None = None
    _asked_at: datetime | None = None
    _read_at: datetime | None = None
    _keys_asked: dict[str, datetime] = field(default_factory=dict)

    def view(self) -> GroupView:
        """Return the group as last listed, at most `interval` ago. While AWS cannot be asked, as of up to 60 s ago."""
        now = self.now()
        if self._view is not None and self._asked_at is not None and now - self._asked_at < self.interval:
            return self._view
        try:
            return self.renewed()[1]
        except ProvisionError as error:
            if self._listing is None or self._is_too_old(now) or not error.may_pass:
                raise
            self._asked_at = now
            self._view = self.memory.view(self._listing, now)
            return self._view

    def renewed(self) -> Listed:
        """Ask AWS now and return what it lists; `exists=False` when there is no group."""
        asked_at = self.now()
        listing = read(self.aws, self.place, self.threads)
        if self._needs_activities(listing):
            listing = with_activities(listing, self.aws, self.place)
        view = self.memory.view(listing, self.now())
        self._view = replace(view, nodes=self._with_keys(view))
        self._listing, self._asked_at, self._read_at = listing, asked_at, asked_at
        return listing, self._view

    def relieve(self, node_id: str, listing: Listing) -> GroupView:
        """Remember that another machine comes in its place, and return what was listed in that light."""
        self.memory.relieve(node_id)
        return self.memory.view(listing, self.now())

    def changed(self) -> None:
        """Something was done to the group: the next view asks AWS."""
        self._asked_at = None

    def _is_too_old(self, now: datetime) -> bool:
        return self._read_at is None or now - self._read_at > _BELIEVED

    def _needs_activities(self, listing: Listing) -> bool:
        """Only the group's own story says why it is below its level, or that a shut-off has fired."""
        if listing.group is None:
            return False
        below = len(listing.counted) < listing.desired
        ended = any(ended_by_a_user(i) and not self.memory.is_known_ended(i["InstanceId"]) for i in listing.instances)
        return below or (ended and listing.schedule.at is None and self.memory.shutdown_at is None)

    def _with_keys(self, view: GroupView) -> tuple[Node, ...]:
        without = [n.id for n in view.nodes if n.state is NodeState.RUNNING and n.host_key is None]
        for _ in self.threads.map(self._ask_key, [node_id for node_id in without if self._may_ask(node_id)]):
            pass  # raises what a thread raised
        return tuple(replace(node, host_key=self.memory.host_keys.get(node.id)) for node in view.nodes)

    def _may_ask(self, node_id: str) -> bool:
        now = self.now()
        last = self._keys_asked.get(node_id)
        if last is not None and now - last < _KEY_EVERY:
            return False
        self._keys_asked[node_id] = now
        return True

    def _ask_key(self, node_id: str) -> None:
        """A key that cannot be had now is asked for again: whoever connects waits for it, with a limit of his own."""
        try:
            key = self.host_key(self.place.region, self.place.cluster, node_id)
        except (ProvisionError, StoreError):
            return
        if key is not None:
            self.memory.host_keys[node_id] = key


# What the last calls and the group's own activities taught: listings lag, and forget what ended.


# Of two machines asked for at once one may be started and one refused.
_SAME_MOMENT = timedelta(seconds=5)


@dataclass
class Recollection:
    """One group as far as this process knows it. `shutdown_at` is when it is shut off, or was.

    A machine that was started or seen lives on here while a listing lacks it (for `stale`), and stays ended once it
    has been seen to end. `stale` also bounds how long our own level is believed against the listing's.
    """

    reach: Reach
    stale: timedelta = timedelta(seconds=60)
    settling: timedelta = timedelta(seconds=10)
    forgotten: timedelta = timedelta(minutes=15)
    host_keys: dict[str, str] = field(default_factory=dict)
    last_launch: datetime | None = None
    shutdown_at: datetime | None = None
    _nodes: dict[str, Node] = field(default_factory=dict)
    _seen_at: dict[str, datetime] = field(default_factory=dict)
    _relieved: set[str] = field(default_factory=set)
    _let_go: set[str] = field(default_factory=set)
    _level: tuple[int, datetime] | None = None
    _refused: dict[Pool, tuple[Refusal, ...]] = field(default_factory=dict)
    _tokens: dict[str, str] = field(default_factory=dict)
    _answers: int = 0

    def view(self, listing: Listing, now: datetime) -> GroupView:
        """Return the group as listed, with what is known better."""
        self._take_in(listing, now)
        return GroupView(
            exists=listing.group is not None,
            size=max(0, self.level(listing, now) - len(self.beside(listing))),
            armed_until=self._armed(listing, now),
            nodes=tuple(sorted(self._nodes.values(), key=lambda node: node.launched_at)),
            refusals=self._refusals(listing, now),
        )

    def beside(self, listing: Listing) -> tuple[str, ...]:
        """Return the machines that were relieved and that AWS counts yet: its level holds them, ours does not."""
        return tuple(i for i in self._relieved_members(listing) if self._nodes[i].state is not NodeState.TERMINATED)

    def outlived(self, listing: Listing) -> tuple[str, ...]:
        """Return the machines that were relieved and have ended, and that AWS counts yet: it would start others."""
        return tuple(i for i in self._relieved_members(listing) if self._nodes[i].state is NodeState.TERMINATED)

    def level(self, listing: Listing, now: datetime) -> int:
        """Return the group's level as AWS counts: our own last one until listings can be expected to show it."""
        if listing.group is None:
            return 0
        fired = self.shutdown_at is not None and self.shutdown_at <= now
        if self._level is None or fired or now - self._level[1] > self.settling:
            return listing.desired
        return self._level[0]

    def set_level(self, size: int, now: datetime) -> None:
        """Remember the level that was set, as AWS counts."""
        self._level = (size, now)

    def started(self, ids: Iterable[str], pool: Pool, now: datetime) -> None:
        """Remember machines that AWS says it started; the pool is not refused any more."""
        for node_id in ids:
            self._nodes.setdefault(node_id, self._unlisted(node_id, pool, now))
            self._seen_at.setdefault(node_id, now)
            self.last_launch = now
        self._refused.pop(pool, None)

    def refused(self, pool: Pool, refusals: tuple[Refusal, ...]) -> None:
        """Remember why machines of the pool were not started."""
        if refusals:
            self._refused[pool] = refusals

    def was_refused(self, pool: Pool, since: datetime) -> bool:
        """Whether machines of the pool were refused in an answer later than `since`."""
        return any(refusal.at > since for refusal in self._refused.get(pool, ()))

    def relieve(self, node_id: str) -> None:
        """Remember that another machine comes in its place."""
        self._relieved.add(node_id)
        if node_id in self._nodes:
            self._nodes[node_id] = replace(self._nodes[node_id], relieved=True)

    def let_go(self, node_id: str, now: datetime) -> None:
        """Remember that a machine that was relieved was ended with its place in AWS's level, which is one less."""
        self._let_go.add(node_id)
        if self._level is not None:
            self.set_level(max(0, self._level[0] - 1), now)

    def is_known_ended(self, instance_id: str) -> bool:
        """Whether the machine has been seen to end."""
        node = self._nodes.get(instance_id)
        return node is not None and node.state is NodeState.TERMINATED

    def token(self, place: Place, pool: Pool, size: int, level: int, now: datetime) -> str:
        """Return the client token of a launch: the same until it is answered, and for a repeat within the minute.

        A process that was killed before the answer came finds its token again; a launch that was answered never does.
        """
        ids = ",".join(sorted(self._nodes))
        wanted = f"{place} {pool} {ids} {level} {size}"  # two groups may ask for the same in the same minute
        text = f"{wanted} {self._answers} {now:%Y-%m-%dT%H:%M}"
        return self._tokens.setdefault(wanted, hashlib.sha256(text.encode()).hexdigest()[:32])

    def answered(self) -> None:
        """Remember that the last launch was answered: the next one is another."""
        self._tokens.clear()
        self._answers += 1

    def _relieved_members(self, listing: Listing) -> list[str]:
        counted = listing.counted - self._let_go
        return sorted(i for i in counted if i in self._nodes and self._nodes[i].relieved)

    def _take_in(self, listing: Listing, now: datetime) -> None:
        self.shutdown_at = listing.schedule.at or self.shutdown_at or fired_auto_shutdown(listing.activities)
        if self.shutdown_at is not None and self.shutdown_at <= now:
            self._level = None  # the shut-off set it to 0: armed anew, nothing is there that was set before
        counted = listing.counted
        for instance in listing.instances:
            node = node_of(instance, self.reach, self.shutdown_at, now)
            relieved = node.id in self._relieved or is_relieved(instance)
            key, impaired = self.host_keys.get(node.id), node.id in listing.impaired
            self._keep(replace(node, relieved=relieved, host_key=key, impaired=impaired), now)
        if listing.pool is not None and counted - self._nodes.keys():
            self.started(sorted(counted - self._nodes.keys()), listing.pool, now)
        self._miss({i["InstanceId"] for i in listing.instances}, now)

    def _keep(self, node: Node, now: datetime) -> None:
        known = self._nodes.get(node.id)
        if known is not None and known.ended_at is not None:
            if node.ended_at is None and now - known.ended_at <= self.stale:
                return  # an old answer
            node = _ended_once(known, node)
        if known is None and node.state is not NodeState.TERMINATED:
            self.last_launch = max(self.last_launch or node.launched_at, node.launched_at)
        self._nodes[node.id] = node
        self._seen_at[node.id] = now

    def _miss(self, listed: set[str], now: datetime) -> None:
        """A machine that no listing shows for so long has ended: AWS drops the ended ones after about an hour."""
        for node in tuple(self._nodes.values()):
            seen_at = self._seen_at[node.id]
            if node.id not in listed and node.state is not NodeState.TERMINATED and now - seen_at > self.stale:
                self._nodes[node.id] = replace(node, state=NodeState.TERMINATED, ended_at=now, end_cause=EndCause.CRASH)

    def _armed(self, listing: Listing, now: datetime) -> datetime | None:
        fired = self.shutdown_at if self.shutdown_at is not None and self.shutdown_at <= now else None
        return listing.shutdown_at or (fired if listing.group is not None else None)

    def _refusals(self, listing: Listing, now: datetime) -> tuple[Refusal, ...]:
        told = [refusal for refusals in self._refused.values() for refusal in refusals]
        told += refusals_told(listing, listing.pool) if listing.pool else ()
        told += self._deaths_at_launch(listing)
        return tuple(sorted((r for r in told if self._is_news(r, now)), key=lambda r: (r.at, r.code)))

    def _deaths_at_launch(self, listing: Listing) -> list[Refusal]:
        ends = {node.id: node.ended_at for node in self._nodes.values() if node.ended_at is not None}
        found = (refusal_of(i, ends[i["InstanceId"]]) for i in listing.instances if i["InstanceId"] in ends)
        return [refusal for refusal in found if refusal is not None]

    def _is_news(self, refusal: Refusal, now: datetime) -> bool:
        """A refusal is over when a machine of its pool was started since, or by age."""
        later = any(
            node.launched_at - _SAME_MOMENT > refusal.at
            and node.pool == refusal.pool
            and node.end_cause is not EndCause.INTERRUPTED
            for node in self._nodes.values()
        )
        return not later and now - refusal.at < self.forgotten

    def _unlisted(self, node_id: str, pool: Pool, now: datetime) -> Node:
        return Node(
            id=node_id,
            pool=pool,
            state=NodeState.PENDING,
            launched_at=now,
            address="",
            port=self.reach.port,
            user=self.reach.user,
            private_address="",
            interface=None,
            proxy=self.reach.proxy(node_id),
        )


def _ended_once(known: Node, node: Node) -> Node:
    """An end keeps its earliest time, and a cause that was told: a later shut-off time does not change it."""
    if node.ended_at is None or known.ended_at is None:
        return node
    cause = node.end_cause if known.end_cause is EndCause.CRASH else known.end_cause
    return replace(node, ended_at=min(known.ended_at, node.ended_at), end_cause=cause)


# What an Auto Scaling group says of its own doings: refused launches, and a shut-off that has fired.


def refusals_told(listing: Listing, pool: Pool) -> tuple[Refusal, ...]:
    """Return the latest refusal of every pool and code. `pool` is the group's: a message may name another type."""
    activities = listing.activities
    latest: dict[tuple[Pool, str], Refusal] = {}
    for activity in activities:
        if activity["StatusCode"] == "Failed" and activity["Description"].startswith("Launching"):
            refusal = _refusal(activity, pool, settling=listing.settles(activity["StartTime"]))
            key = (refusal.pool, refusal.code)
            if key not in latest or latest[key].at < refusal.at:
                latest[key] = refusal
    return tuple(latest.values())


def fired_auto_shutdown(activities: Iterable[Described]) -> datetime | None:
    """Return when a schedule last set the group to 0: AWS forgets a schedule that has fired."""
    told = (
        re.search(r"At (\S+Z) a scheduled action .*desired: 0\b", activity.get("Cause") or "")
        for activity in activities
    )
    times = [datetime.strptime(m[1], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc) for m in told if m]
    return max(times, default=None)


def _refusal(activity: Described, pool: Pool, *, settling: bool) -> Refusal:
    text = activity.get("StatusMessage") or ""
    code = code_in(text)
    meaning = known_of_new(code, text) if settling else known(code)
    return Refusal(
        pool=_named(text, activity.get("Details") or "", pool),
        fault=meaning.fault,
        code=code or "Failed",
        message=meaning.line or text[:300],
        at=activity.get("EndTime") or activity["StartTime"],
        hint=meaning.step,
    )


def _named(text: str, details: str, pool: Pool) -> Pool:
    """The pool may have been changed since: AWS names the zone, and the type when it has no capacity."""
    kind = re.search(r"sufficient ([a-z0-9-]+\.[a-z0-9-]+) capacity", text)
    zone = re.search(r'"Availability Zone": ?"([a-z0-9-]+)"', details)
    return replace(pool, instance_type=kind[1] if kind else pool.instance_type, zone=zone[1] if zone else pool.zone)
