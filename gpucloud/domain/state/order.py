"""What the user wants of a job: one numbered order, written by the user's side alone.

`control/order.json` holds it, signed. Whoever supervises the job reads it at every pass and goes by the newest; what
happened stands in `JobState`, which says the number of the order that was acted on last.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum

from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.job.spec import Cloud, Job
from gpucloud.domain.state.state import ExitReason, JobState

VERSION = 1

# Ends of the script that a new run follows; after any other end the same job goes on from its checkpoint.
CLOSED = (ExitReason.SUCCEEDED.exit_code, ExitReason.USER_ERROR.exit_code)


class Until(str, Enum):
    """How far a job is to go.

    LAUNCHED is in no order: it is how far a process stays that leaves the job to its machines.
    """

    LAUNCHED = "launched"  # machines there that need nobody outside
    READY = "ready"  # machines up and prepared
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """Another budget that was ordered: by which order and whom, when, from what to what."""

    number: int
    by: str
    at: datetime
    old_usd: Decimal
    new_usd: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that the user wants of one run of a job; every field of it stands here and nowhere else."""

    version: int = VERSION
    number: int
    """Rises by one with every order for the run."""
    store: str
    """The URL of the store that it is for: an order that was copied elsewhere counts for nothing."""
    job: str
    """The run's name."""
    base: str
    """The name in the job file, of which this is run `run`."""
    run: int
    by: str
    """User and host that gave it."""
    at: datetime
    """When, by the store's clock."""
    first_at: datetime
    """When the run's first order was given: its deadline counts from then."""
    host: str
    """Which gpucloud home gave it: paths in `resolved` mean something there alone."""
    resolved: Job
    """The job as its file said when it was started last, with what the command line added."""
    spec_sha256: str
    file_budget_usd: Decimal
    """The budget that the job file named at the last start."""
    budget_usd: Decimal
    code_sha256: str = ""
    """The tree that attempts run, in `control/code`; empty where it is too large to be kept there."""
    until: Until = Until.FINISHED
    end: ExitReason | None = None
    """Why the user wants the job to end; None while it is to go on."""
    keep: bool = False
    drill: bool = False
    hold: timedelta | None = None
    """For how long the machines stay up for a mended script when it fails by its own error; None for not at all."""
    unattended: timedelta | None = None
    """For how long the job's own machines drive it; None where a supervisor outside does."""
    deadline_at: datetime | None = None
    budget_changes: tuple[BudgetChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """An order as it is stored: its JSON as one string, whose UTF-8 bytes are signed, and by which key.

    Key and signature are empty where nobody signs.
    """

    order: str
    key: str = ""
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """The very bytes that the signature is of."""
        return self.order.encode()

    @property
    def signature_bytes(self) -> bytes:
        """The signature; empty for what is none."""
        try:
            return base64.b64decode(self.signature, validate=True)
        except (ValueError, binascii.Error):
            return b""


def sealed(order: Order, key: str = "", signature: bytes = b"") -> Envelope:
    """Return the envelope of the order; `signature` is of the bytes that `sealed(order).signed` gives."""
    return Envelope(order=to_json(order), key=key, signature=base64.b64encode(signature).decode())


def opened(envelope: Envelope) -> Order:
    """Return the order in the envelope, whoever signed it. Raises Malformed."""
    return from_json(Order, envelope.order)


def followed(order: Order, by: str, at: datetime) -> Order:
    """Return the order as the next one, given by somebody now."""
    return replace(order, number=order.number + 1, by=by, at=at)


def with_budget(order: Order, usd: Decimal) -> Order:
    """Return the order with another budget, and who changed it; the same one for the same budget."""
    if usd == order.budget_usd:
        return order
    change = BudgetChange(number=order.number, by=order.by, at=order.at, old_usd=order.budget_usd, new_usd=usd)
    return replace(order, budget_usd=usd, budget_changes=(*order.budget_changes, change))


def run_of(base: str, name: str) -> int | None:
    """Return which run of the job `base` one of that name would be: 1, then 2 for `base-2`, …; None for none of it."""
    if name == base:
        return 1
    number = re.fullmatch(re.escape(base) + r"-(\d{1,9})", name, re.ASCII)
    return int(number[1]) if number is not None else None


def is_of_another_file(order: Order, job: Job, spec_sha256: str, *, is_there: bool) -> bool:
    """Whether another job file than the job's began the run; `is_there`: that one is here, beside the job's own.

    Paths mean something on one machine alone, and a file that is gone was moved: then what it said tells.
    """
    if order.resolved.source == job.source:
        return False
    return is_there or (order.spec_sha256 != spec_sha256 and order.resolved.run != job.run)


def undrillable(job: Job) -> str | None:
    """Return why machines that drive the job cannot take one of themselves for a drill; None if they can."""
    return "on AWS, machines that drive their job have no right to take one" if job.cloud is Cloud.AWS else None


def undrilled(order: Order, state: JobState) -> str | None:
    """Return why the drill of a job that has succeeded did not take place; None where it did, or none was wanted."""
    if not order.drill or state.drilled or state.exit_reason is not ExitReason.SUCCEEDED:
        return None
    if order.unattended is not None and (unable := undrillable(order.resolved)) is not None:
        return f"the drill did not take place: {unable}"
    told = any(attempt.first_step is not None for attempt in state.attempts)
    why = "the script came to its end too soon" if told else "the script was over before it told a step"
    return f"the drill did not take place: {why}"


def without_drill_done(order: Order, state: JobState) -> Order:
    """Return the order to give again by who goes on under it: a drill that took place is wanted no second time."""
    return replace(order, drill=order.drill and not state.drilled)


def is_same_wish(one: Order, other: Order) -> bool:
    """Whether both want the same, whoever gave them when."""
    return replace(one, number=other.number, by=other.by, at=other.at, host=other.host) == other


def keeps(order: Order, state: JobState) -> bool:
    """Whether the machines of a job that succeeded are to stay up until their paid time is over."""
    return order.keep and order.end is None and state.exit_reason is ExitReason.SUCCEEDED


def held_until(order: Order, state: JobState) -> datetime | None:
    """Return until when machines of a job whose script or setup failed stay up for a mended one; None for not at all.

    Machines that drive their job end with it: nobody is there who mends it.
    """
    if order.hold is None or order.end is not None or order.unattended is not None:
        return None
    return state.failed_at + order.hold if state.failed_at is not None else None


def is_finished(state: JobState) -> bool:
    """Whether the run lacks its teardown at the most. One whose setup failed goes on after it: nothing has run."""
    return state.exit_code in CLOSED and not (state.setup_failed and state.torn_down)


def is_closed(order: Order, state: JobState) -> bool:
    """Whether the next `train` starts a new run instead of going on with this one: its end, or only its teardown."""
    return is_finished(state) and (state.torn_down or keeps(order, state))
