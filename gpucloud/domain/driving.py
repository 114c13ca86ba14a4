"""A job that drives itself: the order that its machines go by, and which jobs can."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.bootstrap.noderecord import LARGEST_CODE_BYTES
from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.job import Cloud, Job, Market
from gpucloud.domain.ledger import Terms
from gpucloud.domain.quantities import format_span
from gpucloud.domain.supervision.seen import Rules

VERSION = 3
_LONGEST_S = 3600.0  # between two passes or two writes: a supervisor outside has seconds

USUAL_TIME = timedelta(hours=8)
"""For how long a job drives itself where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveOrder:
    """All that a machine needs to supervise the job `name` as a supervisor outside would, within its own group.

    What is wanted of the job stands in its `Order`, which the machine reads too.

    It holds the cluster's private SSH key: the object is for its owner's eyes (mode 0600 in a folder), and for the
    machines of this one cluster, whose own code could read it there and open no other machine with it. `tree` is the
    job's code, `package` our zip, both keys below the store; `tree_name` is how the code's folder is called. `records`
    is the embedded cloud's folder, empty elsewhere. `on_demand` is what types of its machines cost on demand in its
    region, as it is known outside: machines may not ask, and of most regions have a bound alone.
    """

    version: int
    name: str
    cluster: str
    group: str
    job: Job
    store: str
    region: str | None
    tree: str
    tree_name: str
    package: str
    package_sha256: str
    rules: Rules
    terms: Terms
    period_s: float
    flush_s: float
    node_python: str
    power_off: tuple[str, ...] = ()
    records: str = ""
    on_demand: tuple[tuple[str, Decimal], ...] = ()
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unable:
    """Why a job cannot drive itself, and what to do about it."""

    why: str
    hint: str


def unkept(job: Job, market: Market) -> str | None:
    """Return what a supervisor outside does for the job, and its machines on that market cannot; None where nothing.

    Machines may end each other and buy none: no policy can be asked what to change to.
    """
    if job.deadline is None or job.deadline_policy is None or market is not Market.SPOT:
        return None
    return (
        f"while its machines drive it, nobody changes over to machines on demand for its deadline of"
        f" {format_span(job.deadline)}: it keeps spot machines, and may be late. A supervisor that stays, or"
        f" `resources: {{market: on_demand}}`, keeps it"
    )


def order_key(cluster: str) -> str:
    """Return the key of the cluster's order."""
    return f"clusters/{cluster}/drive.json"


def parse_order(text: str | bytes) -> DriveOrder:
    """Return the order. Raises Malformed."""
    order = from_json(DriveOrder, text)
    if order.version != VERSION:
        raise Malformed(f"an order of version {order.version}; this gpucloud knows {VERSION}")
    if not all(0 < seconds <= _LONGEST_S for seconds in (order.period_s, order.flush_s)):
        raise Malformed("an order whose passes have no length, or one of hours")
    rates = (
        getattr(one, one_field.name)
        for one in order.terms.rates
        for one_field in fields(one)
        if one_field.name != "region"
    )
    sums = (*(usd for _, usd in order.on_demand), *rates)
    if min(sums, default=0) < 0 or order.terms.disk_gib < 0:
        raise Malformed("an order with a price below nothing")
    return order


def unable(job: Job, store: str, *, code_fits: bool) -> Unable | None:
    """Return why the job's machines cannot drive it: what they would need is with the caller only. None if they can."""
    outside = "leave --unattended out: a supervisor outside then drives it"
    if job.cloud is Cloud.SSH:
        return Unable(why="own hosts are not refilled by any cloud", hint=outside)
    if job.cloud is Cloud.LOCAL and store.startswith("s3://"):
        return Unable(why="machines of the embedded fleet have no credentials for S3", hint="store: a folder")
    if job.secrets:
        named = ", ".join(job.secrets)
        return Unable(why=f"secrets are not in the store, and a later machine needs {named}", hint=outside)
    own = next((source for source, _ in job.data if not source.startswith("s3://")), None)
    if own is not None:
        return Unable(why=f"data: {own} lies on this machine", hint="put it into S3: data: {s3://bucket/prefix: …}")
    if not code_fits:
        size = LARGEST_CODE_BYTES >> 20
        return Unable(why=f"the code is larger than {size} MiB", hint="name what is not needed in .gpucloudignore")
    return None
