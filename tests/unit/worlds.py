"""Builds what a decision is made from, with short words."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

from gpucloud.domain.job.spec import Job, Market, Resources
from gpucloud.domain.node.node import EndCause, Fault, GroupView, Node, NodeState, Notice, PeerReport, Refusal
from gpucloud.domain.node.status import AttemptStatus, Outcome, Progress, RunState, Status
from gpucloud.domain.offer import Offer, Pool
from gpucloud.domain.state.order import Order
from gpucloud.domain.state.state import Attempt, Cooldown, JobState, Member
from gpucloud.domain.supervision.snapshot import Goal, NodeSnapshot, Readiness, Snapshot
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.jobstore.orders import Orders

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
POOL = Pool(instance_type="local.p2.xlarge", zone="us-east-2a", market=Market.SPOT)
OTHER_POOL = Pool(instance_type="local.p2.xlarge", zone="us-east-2b", market=Market.SPOT)
LATER = NOW + timedelta(minutes=30)


def state(**changes):
    plain = {
        "job": "digits",
        "pool": POOL,
        "cap_usd_per_hour": Decimal("0.9"),
        "group": f"gpucloud-{changes.get('job', 'digits')}",
        "paid_until": LATER,
    }
    return JobState(**{**plain, **changes})


def job(**changes):
    plain = {
        "name": "digits",
        "run": "train.py",
        "budget_usd": Decimal(1),
        "source": Path("/home/me/digits.yaml"),
        "code": Path("/home/me"),
        "resources": Resources(nodes=2),
    }
    return Job(**{**plain, **changes})


def order(store="file:///store", name="digits", **changes):
    plain = {
        "number": 1,
        "store": store,
        "job": name,
        "base": name,
        "run": 1,
        "by": "me@here",
        "at": NOW,
        "first_at": NOW - timedelta(hours=1),
        "host": "here",
        "resolved": job(name=name),
        "spec_sha256": "0" * 64,
        "file_budget_usd": Decimal(1),
        "budget_usd": Decimal(1),
    }
    return Order(**{**plain, **changes})


def put_job(jobs, first_state=None, **ordered):
    """Write a job's first order and state into its store, as a start does."""
    Orders(jobs=jobs, clock=SystemClock()).first(order(jobs.store.url, jobs.job, **ordered))
    jobs.create(first_state if first_state is not None else state(job=jobs.job))


def goal(**changes):
    return Goal(**{"nodes": 2, "budget_usd": Decimal(1), **changes})


def node(node_id, **changes):
    plain = {
        "id": node_id,
        "pool": POOL,
        "state": NodeState.RUNNING,
        "launched_at": NOW - timedelta(minutes=5),
        "address": "127.0.0.10",
        "port": 2222,
        "user": "me",
        "private_address": "127.0.0.10",
        "interface": "lo",
        "host_key": "ssh-ed25519 AAAA",
    }
    return Node(**{**plain, **changes})


def gone(node_id, cause=EndCause.INTERRUPTED):
    return NodeSnapshot(node=node(node_id, state=NodeState.TERMINATED, ended_at=NOW, end_cause=cause))


def progress(step=30, **changes):
    plain = {
        "step": step,
        "first_step": 1,
        "total_steps": 100,
        "loss": 0.5,
        "phase": "train",
        "committed_step": None,
        "step_seconds": 0.1,
        "age_s": 0.1,
    }
    return Progress(**{**plain, **changes})


def part(number=1, outcome=None, step=None, **changes):
    return AttemptStatus(
        attempt=number,
        state=RunState.EXITED if outcome else RunState.RUNNING,
        outcome=outcome,
        exit_code=None,
        progress=progress(step, **changes) if step is not None else None,
        failed_rank=0 if outcome is Outcome.FAILED else None,
        over_s=changes.get("age_s") if outcome else None,
    )


def up(
    node_id, attempt=None, *, notice=False, readiness=Readiness.READY, silent=0.0, told=True, unhealthy=None, **changes
):
    """A node that is up, prepared and told, unless said otherwise."""
    heard, rebalance = changes.pop("peer_report", PeerReport.NOTHING), changes.pop("rebalance", None)
    trial = changes.pop("trial", None)
    status = Status(
        rebalance=rebalance,
        heartbeat=1,
        epoch=1,
        boot_id="b",
        notice=Notice(action="terminate", at=NOW + timedelta(minutes=2)) if notice else None,
        attempt=attempt,
        unhealthy=unhealthy,
    )
    return NodeSnapshot(
        refused=changes.pop("refused", None),
        node=node(node_id, **changes),
        readiness=readiness,
        error="no pip" if readiness is Readiness.FAILED else None,
        status=status if readiness is Readiness.READY else None,
        silent_for=timedelta(seconds=silent),
        told=told,
        peer_report=heard,
        trial=trial,
        reporter="c" if heard is not PeerReport.NOTHING else "",
    )


def opened(*node_ids, number=1, **changes):
    members = tuple(Member(node_id=node_id, rank=rank) for rank, node_id in enumerate(node_ids))
    return Attempt(number=number, members=members, port=29500, started_at=NOW - timedelta(minutes=1), **changes)


def offer(pool=OTHER_POOL, usd="0.3"):
    return Offer(pool=pool, usd_per_hour=Decimal(usd), cap_usd_per_hour=Decimal("0.9"), as_of=NOW, gpus=1)


def refusal(fault=Fault.CAPACITY, *, pool=POOL, ago=1.0):
    at = NOW - timedelta(seconds=ago)
    return Refusal(pool=pool, fault=fault, code="InsufficientInstanceCapacity", message="none there now", at=at)


def cooldown(pool=POOL, *, fault=Fault.CAPACITY, ago=60.0, left=240.0, tries=1):
    return Cooldown(
        pool=pool,
        first_at=NOW - timedelta(seconds=ago),
        until=NOW + timedelta(seconds=left),
        tries=tries,
        fault=fault,
        code="InsufficientInstanceCapacity",
        message="none there now",
    )


def snapshot(*nodes, group_size=2, armed=LATER, exists=True, refusals=(), **changes):
    plain = {
        "now": NOW,
        "state": state(),
        "payable_until": LATER,
        "payable_with_another": LATER,
    }
    group = GroupView(
        exists=exists, size=group_size, armed_until=armed, nodes=tuple(item.node for item in nodes), refusals=refusals
    )
    return Snapshot(**{**plain, "group": group, "nodes": tuple(nodes), **changes})
