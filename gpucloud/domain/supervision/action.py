"""What can be done for a job, as values; every one may be done twice."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.node.node import Fault
from gpucloud.domain.node.status import Stop
from gpucloud.domain.offer import Offer, Pool
from gpucloud.domain.state.order import BudgetChange
from gpucloud.domain.state.state import ExitReason, Interruption


@dataclass(frozen=True, slots=True, kw_only=True)
class Provision:
    """Have the cloud's free parts made: a group of size 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Move the shut-off to `until`, on the cloud first."""

    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ObeyOrder:
    """Write down that the order of this number is acted on: no shut-off that the cloud has is later than it pays for.

    `changes` are the budgets that were ordered since the last one that was acted on.
    """

    number: int
    changes: tuple[BudgetChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Set the level of the group."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoolDown:
    """Write down that the pool refused: it is left alone for `length`, twice that the next time, `longest` at most."""

    pool: Pool
    fault: Fault
    code: str
    message: str
    length: timedelta
    longest: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Turn to another pool; what was made in another region is removed first."""

    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Appoint:
    """Write down that machines of the offer's pool are asked for beside those that work, to take over from them."""

    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Write down that no machines take over: what was asked for beside is given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """Write down that the job's pool is now the one whose machines stand beside; the others are given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Start the bootstrap of these nodes; it goes on beside everything else."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Write to these nodes' agents what is wanted of them."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """Write down the next attempt with its members in rank order; `Tell` then starts it."""

    number: int
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteInterruptions:
    """Write down which nodes are being interrupted or are lost."""

    interruptions: tuple[Interruption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Look at these nodes' GPUs before attempt `number`, and at the ways between them; beside everything else."""

    number: int
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineNodes:
    """Write down that these nodes take no part any more: `(node id, why)` each; `Replace` then ends them."""

    nodes: tuple[tuple[str, str], ...]
    may_pass: frozenset[str] = frozenset()
    """Those of them whose reason may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """Write down that the attempt is to end, how and why; `Tell` then ends it. `message` is for the user."""

    how: Stop
    reason: ExitReason
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseAttempt:
    """The attempt is over on every member; a reason that is not retried ends the job too.

    `message` is for the user, where more is to be said than the reason.
    """

    reason: ExitReason
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Relieve:
    """Count a node with a notice no more: another one is started, and it stays in its group meanwhile."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """End these nodes by choice; the level starts others."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BringHome:
    """Fetch the outputs of an attempt that is over, while its machines are there.

    `message` is of the pause that follows: whoever makes it may be off by then, and is with what did not come.
    """

    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """Have the cloud take this node, as a rehearsal."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The job is over."""

    reason: ExitReason
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TearDown:
    """End every machine, close the ledger, remove the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A machine stops driving its job, which goes on when a command outside says so; nothing is lost."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StayOn:
    """Whoever was to leave the job to its machines stays: they have not shown that they can drive it, and why."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do but to look again; `briefly` where a look some seconds from now decides."""

    why: str
    briefly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """There is nothing left to do for this goal."""


OnTheCloud = Provision | Arm | Resize | Move | Relieve | Replace | Drill | TearDown
Succession = Appoint | Dismiss | TakeOver
LedgerTransition = (
    ObeyOrder
    | CoolDown
    | QuarantineNodes
    | OpenAttempt
    | NoteInterruptions
    | EndAttempt
    | CloseAttempt
    | Finish
    | Pause
    | Succession
)
OnNodes = Prepare | Inspect | Tell | BringHome
Idle = StayOn | Wait | Done
Action = OnTheCloud | LedgerTransition | OnNodes | Idle
