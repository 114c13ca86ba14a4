"""What a job's order means to whoever supervises it; the only place where a `Goal` is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.job import Cloud
from gpucloud.domain.order import Order, Until
from gpucloud.domain.protection import Saving
from gpucloud.domain.supervision.seen import Goal, Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervising:
    """Who supervises a job.

    `node` is the machine of the job that does, empty for a process outside. `leaves`: a process outside that stays only
    until the machines drive the job; `began_at` is when it began, by the store's clock. `saving` is how the
    job's script saves, as far as it knows.
    """

    node: str = ""
    leaves: bool = False
    began_at: datetime | None = None
    saving: Saving = Saving.UNKNOWN


OUTSIDE = Supervising()
"""A process outside that stays for as long as there is something to do."""


def goal_of(order: Order, who: Supervising) -> Goal:
    """Return what the order means to that supervisor.

    Machines may end each other and buy none, so that no policy is theirs; on AWS a drill is another role's.
    """
    job, on_machine = order.resolved, bool(who.node)
    aws = job.cloud is Cloud.AWS
    return Goal(
        nodes=job.resources.nodes,
        budget_usd=order.budget_usd,
        number=order.number,
        budget_changes=order.budget_changes,
        end=order.end,
        least_nodes=job.resources.least_nodes,
        until=Until.LAUNCHED if who.leaves else order.until,
        keep=order.keep,
        hold=order.hold if order.unattended is None and not on_machine else None,
        drill=order.drill and not (on_machine and aws),
        first_at=order.first_at,
        deadline_at=order.deadline_at,
        idle=job.idle,
        began_at=who.began_at,
        self_driving=on_machine,
        within_rights=on_machine and aws,
        give_up=job.checkpoint.give_up,
        saves_alone=job.checkpoint.directory is not None,
        uses_library=who.saving is Saving.RESUME,
        saves_nothing=who.saving in (Saving.NONE, Saving.NOTHING),
        begins_anew=job.checkpoint.none,
        policy=None if on_machine else job.deadline_policy,
        work=None if on_machine else job.work,
    )


def rules_for(unattended: timedelta | None, rules: Rules) -> Rules:
    """Return the cloud's rules for such a job; machines that nobody looks after are paid for the whole time at once."""
    if unattended is None:
        return rules
    return replace(rules, wall=replace(rules.wall, horizon=unattended))
