"""What a cloud lists, beside what is written down: the machines that a job has had, and strays.

Strays bear gpucloud's tags in an account and belong to no living job. The rules for when they may be removed are those
of Karpenter's garbage collection (the cloud is listed first, then the own records) and of cloud custodian (mark, wait,
look again): two sightings at least a minute apart, and exact owner tags only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.errors import FleetElsewhere
from gpucloud.domain.job.quantities import format_moment, span_of
from gpucloud.domain.node.node import NO_GROUP, EndCause, GroupView, Node, NodeState, fleet_of
from gpucloud.domain.node.status import OUTPUT, UNTOLD, Progress
from gpucloud.domain.state.state import Attempt, Interruption, InterruptionKind, JobState, UsageInterval
from gpucloud.domain.supervision.membership import unit_of
from gpucloud.domain.supervision.self_driving import Arming, as_armed_at_least

MANAGED, CLUSTER, JOB, STORE = "gpucloud:managed", "gpucloud:cluster", "gpucloud:job", "gpucloud:store"
APART = timedelta(seconds=60)
_PREFIX = "gpucloud-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One thing that a cloud lists: a machine, a disk, a group, a key. `usd_per_hour` is None where it is not known."""

    kind: str
    id: str
    account: str
    region: str
    tags: tuple[tuple[str, str], ...]
    since: datetime | None = None
    usd_per_hour: Decimal | None = None

    @property
    def key(self) -> str:
        """What tells it from every other thing."""
        return f"{self.account}/{self.region}/{self.kind}/{self.id}"

    def tag(self, name: str) -> str | None:
        """Return the tag's value, None without it."""
        return dict(self.tags).get(name)

    @property
    def cluster(self) -> str:
        """The cluster that it says it is of."""
        return self.tag(CLUSTER) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose things are looked for: those of one account whose jobs keep their state in one store."""

    account: str
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a living job may have: everything of its cluster in these regions, None for any region."""

    cluster: str
    regions: frozenset[str] | None

    def covers(self, thing: Thing) -> bool:
        """Whether the thing is the job's."""
        return thing.cluster == self.cluster and (self.regions is None or thing.region in self.regions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ripe:
    """The strays of one cluster in one region, all of them seen twice: they may be removed together."""

    cluster: str
    region: str
    things: tuple[Thing, ...]


def is_owned(thing: Thing, owner: Owner) -> bool:
    """Whether every tag says, to the letter, that it was made for a job of this owner; a look-alike is foreign."""
    return (
        thing.account == owner.account
        and thing.tag(MANAGED) == "true"
        and thing.tag(STORE) == owner.store
        and thing.cluster.startswith(_PREFIX)
        and thing.tag(JOB) == thing.cluster.removeprefix(_PREFIX) != ""
    )


def claim(cluster: str, state: JobState | None, *, regional: bool) -> Claim | None:
    """Return what the job may have; None for one that does not exist or is torn down.

    A job is in its pool's region, and for as long as it moves in that of its group (`<region>/<cluster>`) too.
    """
    if state is None or state.torn_down:
        return None
    group = (state.group or "").rpartition("/")[0]
    regions = {state.pool.region, *([group] if group else [])}
    return Claim(cluster=cluster, regions=frozenset(regions) if regional else None)


def strays(things: Iterable[Thing], claims: Iterable[Claim], owner: Owner) -> tuple[Thing, ...]:
    """Return what is the owner's and no living job's."""
    living = tuple(claims)
    return tuple(t for t in things if is_owned(t, owner) and not any(one.covers(t) for one in living))


def sighted(found: Iterable[Thing], before: Mapping[str, datetime], now: datetime) -> dict[str, datetime]:
    """Return when each stray was first seen as one; what is no stray any more is forgotten."""
    return {thing.key: min(before.get(thing.key, now), now) for thing in found}


def ripe(found: Iterable[Thing], first_seen: Mapping[str, datetime], now: datetime) -> tuple[Ripe, ...]:
    """Return the clusters of which every stray was seen as one a minute ago and more."""
    places: dict[tuple[str, str], list[Thing]] = {}
    for thing in found:
        places.setdefault((thing.cluster, thing.region), []).append(thing)
    return tuple(
        Ripe(cluster=cluster, region=region, things=tuple(some))
        for (cluster, region), some in sorted(places.items())
        if all(now - first_seen.get(thing.key, now) >= APART for thing in some)
    )


# The machines that a job has had, brought up to date with what the cloud lists.
#
# One rule for all who reckon with them: a machine that the cloud lists no longer has ended, at the latest when the time
# that was armed last was over. What it costs up to then is what `status` shows, and what the budget counts.
# One that was let go is on no list: it runs until that time is over. What it may cost from now to then is promised.


FindFleet = Callable[["str | None"], "FleetElsewhere | None"]
"""Tells of a group that it is on the embedded fleet of another home."""
LISTED_LATE = timedelta(seconds=60)
"""For so long a list may lack what lives: nothing is written down for good before."""


def with_intervals(intervals: tuple[UsageInterval, ...], nodes: tuple[Node, ...]) -> tuple[UsageInterval, ...]:
    """Return the lives with every listed node added or brought up to date; what was let go is seen again."""
    known = {interval.node_id: interval for interval in intervals}
    for node in nodes:
        interval = known.get(node.id) or UsageInterval(node_id=node.id, pool=node.pool, launched_at=node.launched_at)
        if interval.ended_at is None:
            interval = replace(interval, missing_at=None, let_go_until=None)
        if node.state is NodeState.TERMINATED and interval.ended_at is None:
            interval = replace(interval, ended_at=node.ended_at or node.launched_at, end_cause=node.end_cause)
        known[node.id] = interval
    return tuple(known.values())


def as_listed(state: JobState, group: GroupView, now: datetime) -> JobState:
    """Return the state with the ends that the group lists, and with those of machines that it lists no longer.

    Nobody may have written an end down yet. What is missed for the first time may only be listed late: it counts as
    alive for a minute more, and where it was paid until a time, for a minute after that at the most.
    """
    listed = {node.id for node in group.nodes}
    intervals = (
        interval
        if interval.ended_at is not None or interval.node_id in listed
        else _missing(interval, state.paid_until, now)
        for interval in with_intervals(state.nodes, group.nodes)
    )
    return replace(state, nodes=tuple(intervals))


def list_group(describe: Callable[[str], GroupView], state: JobState, now: Callable[[], datetime]) -> GroupView:
    """Return the job's group as the cloud describes it now.

    One on the embedded fleet of another home is told as it was known last, while machines of it may live.
    """
    try:
        return describe(state.group) if state.group is not None else NO_GROUP
    except FleetElsewhere as error:
        at = now()
        return _unlisted(state, error, at) if may_live(state, at) else NO_GROUP


def list_here(describe: Callable[[str], GroupView], state: JobState) -> GroupView:
    """Return the job's group as the cloud describes it now; none where it is on the embedded fleet of another home."""
    with suppress(FleetElsewhere):
        return describe(state.group) if state.group is not None else NO_GROUP
    return NO_GROUP


def living_elsewhere(find: FindFleet, state: JobState, now: datetime) -> FleetElsewhere | None:
    """Return the error for machines of the job that live on the embedded fleet of another home that is here.

    What is on another host, or was in a folder that is gone, is ended by nobody else: it switches itself off.
    """
    away = find(state.group)
    return until_paid(away, state, now) if away is not None and away.is_here and may_live(state, now) else None


def may_live(state: JobState, now: datetime) -> bool:
    """Whether machines of the job may live that cannot be listed: until the time that was armed last is over.

    None does where the job has ended, and its state knows the end of each.
    """
    is_paid = state.paid_until is not None and now - state.paid_until < LISTED_LATE
    return is_paid and not (state.status.ended and not state.alive)


def _unlisted(state: JobState, error: FleetElsewhere, now: datetime) -> GroupView:
    """Return the group as the state tells of it, where it cannot be listed: its machines as they were known last."""
    nodes = tuple(
        Node(
            id=interval.node_id,
            pool=interval.pool,
            state=NodeState.RUNNING,
            launched_at=interval.launched_at,
            address="",
            port=0,
            user="",
            private_address="",
            interface=None,
        )
        for interval in state.alive
    )
    why, fleet = until_paid(error, state, now).message, fleet_of(state.group)
    there = f"{fleet.variable} " if fleet is not None and error.is_here else ""
    return GroupView(
        exists=True, size=len(nodes), armed_until=state.paid_until, nodes=nodes, unseen=why, from_there=there
    )


def unseen_words(group: GroupView, supervisor: str | None) -> str | None:
    """Return why a group cannot be listed here, and whose commands reach its machines; None where it is listed."""
    if supervisor is None or not group.from_there:
        return group.unseen
    return f"{group.unseen}; {supervisor} has the job, and does what `gpucloud down` and `gpucloud budget` here ask"


def until_paid(error: FleetElsewhere, state: JobState, now: datetime) -> FleetElsewhere:
    """Return the error with the time at which the machines have switched themselves off at the latest."""
    until = format_moment(state.paid_until or now, now)
    return FleetElsewhere(f"{error.message}; paid until {until}, they count as gone after that", hint=error.hint)


def let_go(state: JobState, now: datetime) -> JobState:
    """Return the state without its group, which nobody here can end: its machines may live to the end of their time."""
    until = state.paid_until or now
    intervals = (one if one.ended_at or one.let_go_until else replace(one, let_go_until=until) for one in state.nodes)
    return replace(state, group=None, nodes=tuple(intervals))


def as_taken_over(
    describe: Callable[[str], GroupView], state: JobState, find_armed: Callable[[], Arming | None], now: datetime
) -> JobState:
    """Return the state as whoever takes the job over here reckons with it: without machines that he lets go."""
    try:
        if state.group is not None and fleet_of(state.group) is not None:
            describe(state.group)
    except FleetElsewhere as error:
        known = as_armed_at_least(state, find_armed())
        return state if error.is_here else replace(let_go(known, now), group=state.group)
    return state


def may_live_to(interval: UsageInterval, now: datetime) -> datetime | None:
    """Return until when one that was let go may live and cost; None for any other, and once that is over."""
    until = interval.let_go_until if interval.is_let_go else None
    return until if until is not None and until > now else None


def ended(interval: UsageInterval, paid_until: datetime | None, now: datetime) -> UsageInterval:
    """Return the life with its end, of which nobody tells: what was armed bounds it, and when it was missed.

    One that was let go has none before its paid time is over.
    """
    until = interval.let_go_until
    if interval.ended_at is not None or (until is not None and until > now):
        return interval
    at = until or min(moment for moment in (now, interval.missing_at, paid_until) if moment is not None)
    cause = EndCause.SCHEDULE if at in (paid_until, until) else None
    return replace(interval, ended_at=max(at, interval.launched_at), end_cause=cause)


def _missing(interval: UsageInterval, paid_until: datetime | None, now: datetime) -> UsageInterval:
    if interval.let_go_until is not None:
        return ended(interval, paid_until, now)
    since = interval.missing_at or now
    first = min(since, paid_until) if paid_until is not None else since
    interval = replace(interval, missing_at=since)
    return ended(interval, paid_until, now) if now - first >= LISTED_LATE else interval


def stopped_at(interruption: Interruption, state: JobState) -> datetime:
    """Return when training stopped for it: when its machine went without notice, else with the attempt's last step.

    Who was away, or waited whether a silent machine comes again, noticed it later. Of a script that tells no steps,
    or of which only its saves are counted, it is the last word of the machine that went, or its attempt's end.
    """
    noticed, kind = interruption.noticed_at, interruption.kind
    attempt = next((one for one in state.attempts if one.number == interruption.attempt), None)
    by_saves = attempt is not None and unit_of(attempt, state.checkpoint) is Counts.SAVES
    last = attempt.last_step_at if attempt is not None and not by_saves else None
    gone = next((one for one in state.nodes if one.node_id == interruption.node_id), None)
    end = gone.ended_at if gone is not None and kind is not InterruptionKind.FROZEN else None
    if kind is InterruptionKind.NOTICE and (end is None or end > noticed):
        left = max(noticed, attempt.ended_at) if attempt is not None and attempt.ended_at is not None else noticed
        return last or left
    word = (gone.last_word_at or gone.silent_at) if gone is not None else None
    return min(noticed, end or last or word or noticed)


def resumed(
    interruptions: tuple[Interruption, ...],
    stops: tuple[datetime, ...],
    attempt: Attempt,
    progress: Progress,
    now: datetime,
) -> tuple[Interruption, ...]:
    """Return interruptions with since when training goes on after them, once the open attempt's script tells a step.

    `stops` are when training stopped for each.
    """
    if not tells_step(progress):
        return interruptions
    at = _first_stepped_at(attempt, progress, now)
    return tuple(
        replace(one, stopped_at=stop, resumed_at=max(at, one.noticed_at))
        if one.resumed_at is None and one.attempt is not None and one.attempt < attempt.number
        else one
        for one, stop in zip(interruptions, stops, strict=True)
    )


def tells_step(progress: Progress) -> bool:
    """Whether a script tells a step of its own in its attempt: a save, or what was put back, is none."""
    return progress.phase == OUTPUT or (progress.phase != UNTOLD and progress.step >= progress.first_step)


def _first_stepped_at(attempt: Attempt, progress: Progress, now: datetime) -> datetime:
    """Return when the attempt's first step was made, as its node tells: nobody may have looked on then."""
    since = span_of(progress.age_s + max(0, progress.step - progress.first_step) * (progress.step_seconds or 0.0))
    return min(now, max(attempt.started_at, now - since))
