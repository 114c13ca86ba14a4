"""Nodes as the cloud lists them, and its notices when it takes one."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from urllib.parse import quote, unquote

from gpucloud.domain.errors import FleetElsewhere
from gpucloud.domain.job.spec import Market
from gpucloud.domain.offer import Pool
from gpucloud.domain.untrusted import in_calendar, in_one_line


class NodeState(str, Enum):
    """The cloud's own word on a node."""

    PENDING = "pending"
    RUNNING = "running"
    TERMINATED = "terminated"


class EndCause(str, Enum):
    """Why a node ended; decides what is charged."""

    INTERRUPTED = "interrupted"  # the cloud took it
    SCHEDULE = "schedule"  # the prepaid time was over
    CHOICE = "choice"  # we ended it
    CRASH = "crash"  # the embedded cloud itself died


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a node group. `host_key` is `ssh-ed25519 AAAA…`, pinned; None until it is known.

    `address` and `port` are where SSH listens for the supervisor; `private_address` is what the other
    nodes reach; `interface` carries traffic between nodes (`GLOO_SOCKET_IFNAME`), None where the cloud does not say:
    the node's agent then finds it. `proxy` is a command whose input and output lead to SSH, empty for none. `root` is
    the agent's folder, from the login's home; `devices` are the GPUs of the machine that are the node's (indices or
    UUIDs, as CUDA_VISIBLE_DEVICES takes them), empty for all. `impaired`: the cloud itself finds that it does not work.
    `relieved`: another machine was started in its place, and the level counts it no more; it ends with its group.
    `end_cause` is set before the end where the cloud is to end it by our choice. `remains`: it has ended, and what was
    written there may lie there all the same: a host of the user's own, of which nothing was removed yet.
    """

    id: str
    pool: Pool
    state: NodeState
    launched_at: datetime
    address: str
    port: int
    user: str
    private_address: str
    interface: str | None
    host_key: str | None = None
    proxy: tuple[str, ...] = ()
    root: str = ".gpucloud"
    devices: tuple[str, ...] = ()
    relieved: bool = False
    ended_at: datetime | None = None
    end_cause: EndCause | None = None
    impaired: bool = False
    remains: bool = False

    @property
    def is_there(self) -> bool:
        """Whether it can be asked for what was written there."""
        return self.remains or self.state is not NodeState.TERMINATED

    @property
    def place(self) -> str:
        """Return what it has in common with later nodes on the same disk: a host of the user's own is taken again."""
        return f"{self.user}@{self.address}:{self.port}/{self.root}" if self.pool.market is Market.OWNED else self.id


class Fault(str, Enum):
    """What kind of refusal a cloud's error is; decides the next step."""

    CAPACITY = "capacity"  # none there now: another pool
    QUOTA = "quota"  # the account may not have so many: another family or region, or ask for more
    CREDENTIALS = "credentials"  # the caller is not known, or no longer
    PERMISSION = "permission"  # the caller, or the cloud's own service for it, may not do this
    PARAMETER = "parameter"  # the request can never succeed as it is
    THROTTLING = "throttling"  # too many calls: slower
    TRANSIENT = "transient"  # the same call may succeed later
    UNKNOWN = "unknown"  # stop safely


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The cloud did not start a machine: of which pool, its own code, what that means in one line, and when.

    `hint` is what to do about it where no other pool helps.
    """

    pool: Pool
    fault: Fault
    code: str
    message: str
    at: datetime
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A node group as listed: its level, its shut-off time, every node alive or lately ended, and late refusals."""

    exists: bool
    size: int
    armed_until: datetime | None
    nodes: tuple[Node, ...]
    refusals: tuple[Refusal, ...] = ()
    unseen: str | None = None
    """Why it cannot be listed from here: it is told as it was known last."""
    from_there: str = ""
    """What a command begins with that goes on with such machines, or ends them; nothing where none can."""

    @property
    def alive(self) -> tuple[Node, ...]:
        """Nodes that may cost money."""
        return tuple(node for node in self.nodes if node.state is not NodeState.TERMINATED)

    @property
    def counted(self) -> tuple[Node, ...]:
        """Nodes that the level counts: alive and not relieved."""
        return tuple(node for node in self.alive if not node.relieved)

    def there(self, node_id: str) -> Node | None:
        """Return the node if it can be asked for what was written there."""
        return next((node for node in self.nodes if node.id == node_id and node.is_there), None)

    @property
    def most_alive(self) -> int:
        """How many nodes may cost money at once: the level may ask for some that are not there yet."""
        return max(len(self.counted), self.size) + len(self.alive) - len(self.counted)


NO_GROUP = GroupView(exists=False, size=0, armed_until=None, nodes=())
"""What is listed where there is no group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The embedded fleet of one home: `identity` tells it from every other one, `host` and `home` where it was made.

    Its groups are named after it, as those of a cloud after their region: no call for a group of it reaches another.
    What the name says of the place may have been written by anybody who may write the job's state: it is told alone.
    """

    identity: str
    host: str
    home: str

    def named(self, group: str) -> str:
        """Return the group's whole name."""
        return f"{self.identity}@{quote(self.host, safe='')}{quote(self.home)}/{group}"

    def elsewhere(self, of: str, *, is_here: bool) -> FleetElsewhere:
        """Return the error for who asks in another home for machines `of` a job; `is_here`: that one is on its host."""
        place = f"{in_one_line(self.home)} on {in_one_line(self.host)}"
        whose = f"the machines of {of} are on the embedded fleet of another home ({place}), "
        if not is_here:
            return FleetElsewhere(f"{whose}and not seen from here")
        return FleetElsewhere(f"{whose}which alone sees them", hint=f"the same command there, with {self.variable}")

    @property
    def variable(self) -> str:
        """The variable with which a command here is one of that home."""
        return f"GPUCLOUD_HOME={shlex.quote(in_one_line(self.home))}"


def fleet_of(group: str | None) -> Fleet | None:
    """Return the embedded fleet after which a group is named; None for those of clouds, and of before they were."""
    found = re.fullmatch(r"([0-9a-f]{32})@([^/]*)(/.*)?/[^/]+", group or "", re.DOTALL)
    if found is None:
        return None
    return Fleet(identity=found[1], host=unquote(found[2]), home=unquote(found[3] or "/"))


def is_same_group(one: str, other: str) -> bool:
    """Whether the names are of one group: a home may have moved since, or its host be called otherwise."""
    fleets = fleet_of(one), fleet_of(other)
    if fleets[0] is None or fleets[1] is None:
        return one == other
    return fleets[0].identity == fleets[1].identity and one.rpartition("/")[2] == other.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The cloud will take the node at `at` (EC2: `spot/instance-action`)."""

    action: str
    at: datetime


# What the instance metadata service says about the node's end, as a `Notice`.


_ACTIONS = ("terminate", "stop", "hibernate")


def notice_from(instance_action: str) -> Notice | None:
    """Return the notice in a `spot/instance-action` document; None for a document that says nothing known.

    `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}` (EC2 User Guide, "Spot Instance interruption
    notices"). An unknown document is no reason to stop a training run, hence None and no error.
    """
    try:
        document = json.loads(instance_action)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("action") not in _ACTIONS:
        return None
    at = _time(document.get("time"))
    return Notice(action=document["action"], at=at) if at else None


def recommended_at(rebalance: str) -> datetime | None:
    """Return since when a `events/recommendations/rebalance` document recommends to leave; None for an unknown one.

    `{"noticeTime": "2020-10-27T08:22:00Z"}` (EC2 User Guide, "EC2 instance rebalance recommendations").
    """
    try:
        document = json.loads(rebalance)
    except (ValueError, RecursionError):
        return None
    return _time(document.get("noticeTime")) if isinstance(document, dict) else None


def _time(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        # Python 3.10 does not read the `Z`.
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))
        at = at.replace(tzinfo=timezone.utc) if at.tzinfo is None else at.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
    return at if in_calendar(at) else None


# What another machine of the job says of one that is silent.


class PeerReport(str, Enum):
    """Nothing, or one of two things; a machine that refuses SSH is as dead to us as one that is off."""

    NOTHING = "nothing"  # nobody was asked, or who was asked could not tell
    ALIVE = "alive"
    DEAD = "dead"


def peer_report_of(exit_code: int, said: str) -> PeerReport:
    """Return the word in the answer of `knock` on a peer; any other answer says nothing."""
    words = {word.value: word for word in PeerReport}
    return words.get(said.strip(), PeerReport.NOTHING) if exit_code == 0 else PeerReport.NOTHING
