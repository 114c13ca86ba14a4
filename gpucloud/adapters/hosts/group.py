"""Groups of own hosts: a level of hosts that are taken, and those that do not serve."""

from __future__ import annotations

import getpass
import inspect
import json
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from gpucloud.adapters.hosts import onhost
from gpucloud.adapters.hosts.records import (
    GRACE,
    POOL,
    WRITTEN,
    Excluded,
    Hosts,
    Place,
    Recollection,
    UsedHost,
    all_ended,
    candidates,
    ended,
    levelled,
    runs_until,
    settled,
)
from gpucloud.domain.errors import (
    GpucloudError,
    HostUnreachable,
    KeyRefused,
    NodeError,
    ProvisionError,
    RemoteCommandFailed,
)
from gpucloud.domain.job.quantities import format_moment
from gpucloud.domain.node.node import NO_GROUP, EndCause, Fault, GroupView, Node, Refusal
from gpucloud.domain.offer import Pool
from gpucloud.ports import Completed, Shell

_NEVER_AGAIN = timedelta(days=365)
_REST = timedelta(minutes=10)  # a host that was given back as unfit is taken last for so long


@dataclass(slots=True)
class SshNodeGroup:
    """Implements `NodeGroup` over hosts that exist. `places` gives the job file's hosts, in its order.

    A host that cannot be taken is excluded, and another of the list is taken in its place; the level is then what
    could be taken, and the refusals say why it is not more. `drill_s` is how long a host stays after a drill's notice.
    """

    records: Recollection
    hosts: Asking
    places: Callable[[], tuple[Place, ...]]
    drill_s: float = 2.0
    _owner: str = field(default_factory=lambda: f"{getpass.getuser()}@{socket.gethostname()}")

    def describe(self, group: str) -> GroupView:
        """Return the group as its record says now; ends and replaces what a drill has taken."""
        record = self.records.read(group)
        if record is None:
            return NO_GROUP
        now = self.records.now()
        seen = settled(record, now)
        if any(a.alive != b.alive and b.end_cause is EndCause.INTERRUPTED for a, b in _pairs(record, seen)):
            seen = self._follow(group)
        return seen.view(self.records.now())

    def arm(self, group: str, until: datetime) -> None:
        """Set the shut-off, and tell the hosts how long they are taken; one that does not answer is told later."""
        until = max(until, self.records.now())
        record = self.records.change(group, lambda r: replace(settled(r, self.records.now()), armed_until=until))
        self.hosts.ask([self._order("keep", node, record) for node in record.nodes if node.alive])

    def resize(
        self,
        group: str,
        size: int,
        pool: Pool,
        *,
        cap_usd_per_hour: Decimal | None = None,  # noqa: ARG002  nothing here costs more
    ) -> None:
        """Set the level; ProvisionError when it is above 0 and no shut-off lies ahead."""

        def change(record: Hosts) -> Hosts:
            now = self.records.now()
            record = settled(record, now)
            if size > 0 and (record.armed_until is None or record.armed_until <= now):
                raise ProvisionError(
                    f"{group}: no host is taken without an end ahead (it is {record.armed_until})", hint="arm it first"
                )
            return levelled(replace(record, size=size), now)

        self.records.change(group, change)
        self._follow(group, pool)

    def relieve(
        self,
        group: str,
        node_id: str,
        *,
        cap_usd_per_hour: Decimal | None = None,  # noqa: ARG002  nothing here costs more
    ) -> None:
        """Count the node no more: another host is taken now."""
        self._change_node(group, node_id, lambda node: replace(node, relieved=True))
        self._follow(group)

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:
        """End our processes on the host and free it; the next one is taken, this one again only as the last.

        A `bad` one is not taken again for as long as the group is there.
        """

        def change(node: UsedHost) -> UsedHost:
            return replace(ended(node, self.records.now(), EndCause.CHOICE), given_up=True)

        before = self._change_node(group, node_id, change)
        if before is not None and not before.relieved:
            now = self.records.now()
            mark = pass_over(before.place.name, "was given back as unfit", now, last_until=now + _REST)
            mark = replace(mark, again_at=now + _NEVER_AGAIN, lasting=True) if bad else mark
            self.records.change(group, lambda record: marked(record, (mark,), told=False))
        self._follow(group)

    def purge(self, group: str, *, keep: tuple[tuple[str, str], ...] = ()) -> None:
        """Free every host, and remove all of the job there but what is to be kept.

        ProvisionError naming those that may still run something of the job.
        """
        if self.records.read(group) is None:
            return

        def change(record: Hosts) -> Hosts:
            now = self.records.now()
            return levelled(replace(settled(record, now), size=0, nodes=all_ended(record, now, keep)), now)

        wanted = self.records.change(group, change)
        left = self._clear(group, whole=True)
        if left and wanted.armed_until is not None:
            ends = format_moment(wanted.armed_until, self.records.now())
            raise ProvisionError(
                f"{group}: {'; '.join(left)}; what runs there ends by itself at {ends}",
                hint="repeat the command when they answer",
            )

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> None:
        """Take the host away, as a drill: own hosts give no notice, it is gone after `drill_s` or at once."""

        def change(node: UsedHost) -> UsedHost:
            now = self.records.now()
            if not notice:
                return ended(node, now, EndCause.INTERRUPTED)
            return replace(node, leaves_at=node.leaves_at or now + timedelta(seconds=self.drill_s))

        self._change_node(group, node_id, change)
        self._follow(group)

    def uncleared(self, group: str) -> tuple[tuple[str, datetime | None], ...]:
        """Return the ids of ended nodes that may have left something on their hosts; until when it may run there."""
        record, now = self.records.read(group), self.records.now()
        left = [node for node in record.nodes if not node.alive and not node.cleared] if record else []
        return tuple((node.id, runs_until(node, record, now)) for node in left if record)

    def _change_node(self, group: str, node_id: str, change: Callable[[UsedHost], UsedHost]) -> UsedHost | None:
        """Change a node that is alive, and return it as it was; one that has ended stays as it is: None."""
        before: list[UsedHost] = []

        def changed(record: Hosts) -> Hosts:
            record = settled(record, self.records.now())
            found = [node for node in record.nodes if node.id == node_id]
            if not found:
                raise ProvisionError(f"{group} has no node {node_id}", hint="take an id from the group's list")
            before[:] = [node for node in found if node.alive]
            return replace(record, nodes=tuple(change(n) if n in before else n for n in record.nodes))

        self.records.change(group, changed)
        return before[0] if before else None

    def _follow(self, group: str, pool: Pool | None = None) -> Hosts:
        """Make the hosts follow the record: free what has ended, take what the level asks for."""
        record = self.records.change(group, lambda r: levelled(settled(r, self.records.now()), self.records.now()))
        if any(node.is_to_free for node in record.nodes):
            self._clear(group)
        while (record := self._settled(group)).size > len(record.counted):
            asked = candidates(record, self.places(), self.records.now())[: record.size - len(record.counted)]
            if not asked:
                return self.records.change(group, lambda r: fallen_short(r, self.places(), self.records.now()))
            self._take(group, record, asked, pool)
        return record

    def _settled(self, group: str) -> Hosts:
        return self.records.change(group, lambda r: settled(r, self.records.now()))

    def _take(self, group: str, record: Hosts, places: tuple[Place, ...], pool: Pool | None) -> None:
        """Ask the hosts, all at once, and write down who came. Numbers are drawn before: no id is ever used twice."""
        first = record.launched
        self.records.change(group, lambda r: replace(r, launched=max(r.launched, first + len(places))))
        pool = pool or (record.nodes[-1].pool if record.nodes else POOL)
        wanted = [self._candidate(record, place, first + at + 1, pool) for at, place in enumerate(places)]
        answers = self.hosts.ask([self._order("take", node, record) for node in wanted])
        came, marks = [], []
        for node, answer in zip(wanted, answers, strict=True):
            why = why_not(answer, self.records.now())
            if why is None and not isinstance(answer, GpucloudError):
                came.append(_arrived(node, answer.get("address"), self.records.now()))
            elif why is not None:
                marks.append(pass_over(node.place.name, why[0], self.records.now(), lasting=why[1]))
        self.records.change(group, lambda r: marked(replace(r, nodes=(*r.nodes, *came)), tuple(marks)))

    def _candidate(self, record: Hosts, place: Place, number: int, pool: Pool) -> UsedHost:
        job = record.name.removeprefix("gpucloud-")
        # The token: two people may share a login, and call their jobs the same; the name: homes may be shared by hosts.
        root = f".gpucloud/jobs/{job}-{record.token[:8]}/{place.name}"
        return UsedHost(
            id=f"{place.name}-{number}",
            place=place,
            pool=pool,
            root=root,
            private_address=place.private_address or place.address,
            launched_at=self.records.now(),
        )

    def _clear(self, group: str, *, whole: bool = False) -> list[str]:
        """Free the hosts of ended nodes; what was written there stays unless `whole`. Return what could not be done."""
        record = self._settled(group)
        gone = [node for node in record.nodes if not node.alive and not node.cleared and (whole or node.is_to_free)]
        # A host that was taken again since is cleared with its newest node; its root is the same.
        again = {node.place.name for node in record.nodes if node.alive}
        asked = [node for node in gone if node.place.name not in again]
        left, clean = [], {node.id for node in gone if node.place.name in again}
        orders = [self._order("release", n, record, record.kept(n) if whole else WRITTEN) for n in asked]
        for node, answer in zip(asked, self.hosts.ask(orders), strict=True):
            over = runs_until(node, record, self.records.now()) is None
            if isinstance(answer, GpucloudError):
                left += [] if over or node.given_up else [answer.message]
            elif answer.get("left"):
                left += [] if over else [f"{node.id}: {', '.join(answer['left'])} left"]
            else:
                clean.add(node.id)
        self.records.change(
            group,
            lambda r: replace(r, nodes=tuple(n.as_released(whole=whole) if n.id in clean else n for n in r.nodes)),
        )
        return left

    def _order(self, do: str, node: UsedHost, record: Hosts, keep: tuple[str, ...] = ()) -> Order:
        now = self.records.now()
        return Order(
            node=node.node(),
            order={
                "do": do,
                "root": node.root,
                "token": record.token,
                "name": node.place.name,
                "node": node.id,
                "job": record.name.removeprefix("gpucloud-"),
                "owner": self._owner,
                "until": ((record.armed_until or now) + GRACE).timestamp(),
                "now": now.timestamp(),
                "devices": list(node.place.devices),
                "store": self.records.path(record.name),
                "keep": list(keep),
            },
        )


def _pairs(before: Hosts, after: Hosts) -> tuple[tuple[UsedHost, UsedHost], ...]:
    return tuple(zip(before.nodes, after.nodes, strict=True))


def _arrived(node: UsedHost, reached: str | None, now: datetime) -> UsedHost:
    """Where the user named no address between hosts, it is the one that the host itself was reached by."""
    address = node.place.private_address or reached or node.private_address
    return replace(node, private_address=address, launched_at=now)


# Hosts that do not serve: why, when they are asked again, and what that means for the level.


_AGAIN = timedelta(seconds=20)


def why_not(answer: dict[str, Any] | GpucloudError, now: datetime) -> tuple[str, bool] | None:
    """Return why the host was not taken, and whether that lasts until somebody changes something; None: it was."""
    if isinstance(answer, GpucloudError):
        lasting = not isinstance(answer, HostUnreachable) or isinstance(answer, KeyRefused)
        hint = f" (hint: {answer.hint})" if lasting and answer.hint else ""
        return f"{answer.message}{hint}", lasting
    if "store" in answer:
        return _store_words(answer), True
    holder = answer.get("held")
    if holder is None:
        return None
    until = datetime.fromtimestamp(float(holder["until"]), timezone.utc)
    devices = f"GPUs {', '.join(holder['devices'])}" if holder["devices"] else "it"
    ends = format_moment(until, now, seconds=False)
    return f"{holder['job']} of {holder['owner']} has {devices} until {ends}, unless it goes on", False


_STORE = {
    "missing": ("there is no {folder}, the store's folder", "a folder that all hosts share"),
    "another": ("{folder} is another folder there than the store's here", "a folder that all hosts share"),
    "unreadable": ("{login} may not read {folder}, the store's folder of {owner}", "log in as {owner}"),
    "unwritable": ("{login} may not write to {folder}, the store's folder of {owner}", "log in as {owner}"),
}


def _store_words(answer: dict[str, Any]) -> str:
    """Return why a host cannot use the store's folder, and what helps: its files are their owner's alone."""
    told = {key: str(answer.get(key) or "somebody else") for key in ("folder", "login", "owner")}
    why, fix = (text.format(**told) for text in _STORE[answer["store"]])
    mount = ", or mount it for writing" if answer["store"] == "unwritable" else ""
    return f"{why}: {fix}{mount}, or store: s3://bucket/prefix"


def pass_over(
    name: str, why: str, now: datetime, *, lasting: bool = False, last_until: datetime | None = None
) -> Excluded:
    """Return a host's mark: it is asked again in 20 s."""
    again_at = now + _AGAIN
    return Excluded(name=name, why=why, again_at=again_at, last_until=last_until or again_at, lasting=lasting)


def marked(record: Hosts, marks: tuple[Excluded, ...], *, told: bool = True) -> Hosts:
    """Return the record with the marks, the newest of each host, and with a refusal for each that is to be told."""
    if not marks:
        return record
    names = {mark.name for mark in marks}
    kept = tuple(mark for mark in record.excluded if mark.name not in names)
    refusals = tuple(
        _refusal(Fault.TRANSIENT, f"{m.name}: {m.why}", "HostExcluded", m.again_at - _AGAIN) for m in marks if told
    )
    return replace(record, excluded=(*kept, *marks), refusals=(*record.refusals, *refusals)[-64:])


def fallen_short(record: Hosts, places: tuple[Place, ...], now: datetime) -> Hosts:
    """Return the record at the level that was reached, with the refusal that says why it is not more.

    Waiting helps where another job may end or a host may boot; where too many have a lasting fault, it does not.
    """
    if len(record.counted) >= record.size:
        return record
    lasting = sum(mark.lasting for mark in record.excluded)
    fault = Fault.PARAMETER if len(places) - lasting < record.size else Fault.CAPACITY
    whys = "; ".join(f"{mark.name}: {mark.why}" for mark in record.excluded)
    message = f"{len(record.counted)} of {record.size} hosts; {whys or 'no other host is in the job file'}"
    refusal = _refusal(fault, message, "NoHost", now)
    return replace(record, size=len(record.counted), refusals=(*record.refusals, refusal)[-64:])


def _refusal(fault: Fault, message: str, code: str, at: datetime) -> Refusal:
    return Refusal(pool=POOL, fault=fault, code=code, message=message, at=at)


# Asking hosts, several at once: to be taken, to be kept, to be cleared.


AT_ONCE = 8
_LIMIT_S = 30.0
_LATEST_S = 16725225600.0  # the end of the calendar, year 2500
# Its own program is read there: as a word it were longer than the 8 kB that Debian's csh takes.
_RUN = 'exec "${GPUCLOUD_PYTHON:-python3}" -I -c "import sys; exec(sys.stdin.buffer.read($1))"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one host is told; see `onhost.answer`."""

    node: Node
    order: dict[str, Any]


class Asking:
    """Speaks to hosts over connections of its own, which end with each call."""

    def __init__(self, shell: Callable[[], Shell]) -> None:
        self._shell = shell

    def ask(self, orders: Sequence[Order]) -> tuple[dict[str, Any] | GpucloudError, ...]:
        """Return each host's answer, or why it gave none, in the order of the orders."""
        if not orders:
            return ()
        shell = self._shell()
        try:
            with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(orders)), thread_name_prefix="hosts") as pool:
                return tuple(pool.map(lambda order: _answer(shell, order), orders))
        finally:
            shell.close()


def _answer(shell: Shell, order: Order) -> dict[str, Any] | GpucloudError:
    try:
        return _asked(shell, order)
    except GpucloudError as error:
        return error


def _asked(shell: Shell, order: Order) -> dict[str, Any]:
    source, asked = inspect.getsource(onhost).encode(), json.dumps(order.order).encode()
    host = shell.host(order.node)
    done = host.run(("sh", "-c", _RUN, "sh", str(len(source))), stdin=source + asked, timeout_s=_LIMIT_S)
    host.close()
    if done.exit_code != 0:
        raise _failed(order.node, done)
    lines = done.stdout.splitlines()
    try:
        return _usable(json.loads(lines[-1]))  # a login banner may come first
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        raise NodeError(f"{order.node.id}: an answer that is none: {done.stdout[-200:]!r}") from error


def _usable(answer: Any) -> dict[str, Any]:
    """Return an answer of which every word can be used: others of the login may write there too.

    Raises ValueError, TypeError, LookupError.
    """
    found = dict(answer)
    if not found.keys() & {"address", "held", "store", "left"}:
        raise ValueError("nothing that a host answers")
    if (holder := found.get("held")) is not None:
        _require_words(holder["job"], holder["owner"], *holder["devices"])
        if not 0 <= holder["until"] < _LATEST_S:
            raise ValueError("a time that cannot be")
    if "store" in found and found["store"] not in _STORE:
        raise ValueError("a fault of a store that cannot be")
    _require_words(*(found.get(key) or "" for key in ("folder", "login", "owner")))
    _require_words(found.get("address") or "", *(found.get("left") or ()))
    return found


def _require_words(*found: object) -> None:
    if not all(isinstance(word, str) for word in found):
        raise TypeError("a word that is none")


def _failed(node: Node, done: Completed) -> RemoteCommandFailed:
    """Say what the host answered, and how to see which of the two that it must have it lacks."""
    said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace").splitlines()[-1:]
    return RemoteCommandFailed(
        f"{node.id}: exit code {done.exit_code}{f': {said[0]}' if said else ''}",
        hint=f"`ssh {node.user}@{node.address} \"exec /bin/sh -c 'python3 -V'\"` must say 3.10 or newer: if its login"
        " shell does not start that, chsh -s /bin/sh",
    )
