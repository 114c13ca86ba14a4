"""What may be done here with a job that is known from a store, by who signed what is wanted of it.

Whoever can write to a store, the job's own machines among them, can put anything there. So nothing is started by what
lies in a store unless somebody whom the reader trusts signed it; what nobody signed can be shown and ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.state.order import Order
from gpucloud.domain.state.state import ExitReason

OWN = "own"
"""How the user's own key is called in lists; nobody else's may be."""
_CLOCKS_DIFFER = timedelta(minutes=5)  # orders are given by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something is not done, and what would change that."""

    why: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OrderMark:
    """The newest order of a run that was seen here: when the run's first one was given, and its number."""

    first_at: datetime
    number: int


def mark_of(order: Order) -> OrderMark:
    """Return the order's own mark."""
    return OrderMark(first_at=order.first_at, number=order.number)


def is_ahead(order: Order, now: datetime) -> bool:
    """Return whether an order says that it was given in the future: every later one would count as put back."""
    return max(order.first_at, order.at) > now + _CLOCKS_DIFFER


def refuse_order(
    order: Order, *, signed_by: str | None, seen: OrderMark | None, key: str = "", ahead: bool = False
) -> Refusal | None:
    """Return why an order of a store is not acted on here, None if it may be; to end a job needs nobody's word.

    `key` is the fingerprint of the key that signed it, as its envelope says. `ahead`: it says that it was given in the
    future, and the own key did not sign it.
    """
    if order.end is not None:
        return None
    if signed_by is None:
        return Refusal(
            why=f"order {order.number} for {order.job}, by {order.by[:80]!r} as it says, is signed by nobody you trust"
            f" ({_named(key)})",
            hint="gpucloud keys add NAME KEY trusts a key; `gpucloud train FILE` gives an order of your own",
        )
    if signed_by != OWN and (what := unusable(order)) is not None:
        return Refusal(why=f"order {order.number} for {order.job}: {what}", hint="`gpucloud train FILE` gives your own")
    if ahead:
        return Refusal(
            why=f"order {order.number} for {order.job}, signed by {signed_by}, says that it was given in the future",
            hint="is that machine's clock right? `gpucloud train FILE` gives an order of your own",
        )
    if seen is not None and mark_of(order) < seen:
        return Refusal(
            why=f"order {order.number} for {order.job} is older than order {seen.number}, which was here before:"
            " somebody put it back",
            hint="`gpucloud train FILE` gives a newer one",
        )
    return None


def _named(key: str) -> str:
    """Whoever wrote the envelope wrote this too: what is no fingerprint is not told."""
    return f"the key is {key}" if re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", key) else "by no key"


def end_alone(order: Order) -> Order:
    """Return what counts of an order to end a job that is unsigned or was put back: that it ends, for nothing.

    A budget would pay for machines until the end is through, and machines that were to be kept would stay.
    """
    nothing = Decimal(0)
    return replace(order, end=ExitReason.STOPPED, budget_usd=nothing, keep=False, drill=False, budget_changes=())


def unusable(order: Order) -> str | None:
    """Return what of an order no job file can say: a program here could take it for an option. None for a good one."""
    job, said = order.resolved, []
    for host in job.ssh.hosts:
        said += [host.address, host.user, host.private_address, host.interface]
        hops = [hop.strip() for hop in host.jump.split(",")] if host.jump is not None else []
        said += [*hops, *(hop.rpartition("@")[2] for hop in hops)]
    for word in (*said, job.aws.user, job.aws.image, job.image):
        if word is not None and not re.fullmatch(r"[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]*", word):
            return f"{word!a:.80} is no name or address"
    if not re.fullmatch(r"([0-9a-f]{64})?", order.code_sha256):
        return f"{order.code_sha256!a:.80} is no tree of code"
    return None


def refuse_elsewhere(order: Order, *, has_file: bool) -> Refusal | None:
    """Return why an order that was given elsewhere, or by another person, is not acted on here; None if it may be.

    What it names of the machine that gave it means something else here. `has_file`: the job file is here too, and what
    it names of this machine is its reader's own word.
    """
    job = order.resolved
    if job.cloud is Cloud.LOCAL:
        what = "runs on the embedded fleet of another machine"
    elif has_file:
        return None
    elif not order.code_sha256:
        what = "takes its code from a folder of another machine"
    elif job.cloud is Cloud.SSH:
        what = "logs in to its hosts with keys of another machine"
    elif job.secrets:
        what = f"needs {', '.join(job.secrets)} of another machine's environment"
    elif any(not source.startswith("s3://") for source, _ in job.data):
        what = "takes its data from a folder of another machine"
    else:
        return None
    hint = "have its job file here, or go on where it was started; `gpucloud train FILE` gives an order of your own"
    return Refusal(why=f"{order.job} {what}", hint=hint)


def is_own_group(group: str | None, job: str) -> bool:
    """Return whether a group is the job's own: machines can write a job's state, and name another's group there."""
    return group is None or group.rpartition("/")[2] == f"gpucloud-{job}"


def ending_cloud(job: str, group: str | None, *, in_s3: bool, is_here: bool) -> Cloud | Refusal:
    """Return the cloud on which a job of a store that nobody signed may be ended from here, or why it is not.

    Its machines are told by the name of their group, which is the job's: no other group is touched on such a word.
    `is_here`: this machine's embedded fleet has that group.
    """
    region = (group or "").rpartition("/")[0]
    if not is_own_group(group, job):
        return Refusal(
            why=f"{job} names the group {group!r:.80}, which is not its own", hint="gpucloud gc lists strays"
        )
    if in_s3 and (group is None or region):
        return Cloud.AWS
    if not in_s3 and (group is None or is_here):
        return Cloud.LOCAL
    return Refusal(
        why=f"{job} runs on machines that only its owner reaches", hint=f"gpucloud down {job}, where it was started"
    )
