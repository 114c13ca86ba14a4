"""The job: what the user asked for, as one frozen value (DESIGN §4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path


class Cloud(str, Enum):
    """Where machines come from."""

    LOCAL = "local"
    AWS = "aws"
    SSH = "ssh"


class Market(str, Enum):
    """How machines are paid: interruptible, or not."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"


class MarketPolicy(str, Enum):
    """Which markets a job takes: one, or `auto`: spot while there is any, else on demand."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"
    AUTO = "auto"

    def allows(self, market: Market) -> bool:
        """Whether machines of that market may be taken."""
        return self is MarketPolicy.AUTO or self.value == market.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Machines wanted: `nodes` machines with `gpus` GPUs (one worker process each); `types` empty: any that fits."""

    nodes: int = 1
    gpus: int = 1
    gpu: tuple[str, ...] = ()
    vram_gib: int | None = None
    market: MarketPolicy = MarketPolicy.SPOT
    regions: tuple[str, ...] = ()
    types: tuple[str, ...] = ()


class Access(str, Enum):
    """How SSH reaches a machine on AWS."""

    PUBLIC = "public"  # its public address, from the caller's own address only
    PRIVATE = "private"  # its private address: the caller is in the network already (VPN, peering, bastion)
    SESSION_MANAGER = "session_manager"  # through AWS Systems Manager: no inbound rule at all


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsChoices:
    """The job file's `aws:` section; what is None or empty is gpucloud's own choice.

    `image` is `deep-learning`, `ubuntu`, `ami-…` or `ssm:/parameter/path`; `user` its login. `subnets` (one a zone)
    and `instance_profile` are the user's own where a company forbids making them. `alert_usd` is a month's sum over all
    jobs: AWS writes to `alert_email` at 80 % of it.
    """

    profile: str | None = None
    image: str = "deep-learning"
    image_owners: tuple[str, ...] = ()
    user: str = "ubuntu"
    disk_gib: int = 100
    access: Access = Access.PUBLIC
    subnets: tuple[str, ...] = ()
    instance_profile: str | None = None
    permissions_boundary: str | None = None
    kms_key: str | None = None
    capacity_reservation: str | None = None
    capacity_block: str | None = None
    alert_email: str | None = None
    alert_usd: Decimal = Decimal(100)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When to save: at most one of `every` and `every_steps`; neither means auto."""

    every: timedelta | None = None
    every_steps: int | None = None
    keep: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job file. Paths are absolute; `source` is the file it was read from."""

    name: str
    run: str
    budget_usd: Decimal
    source: Path
    code: Path
    cloud: Cloud = Cloud.LOCAL
    aws: AwsChoices = field(default_factory=AwsChoices)
    resources: Resources = field(default_factory=Resources)
    setup: str | None = None
    store: str | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    deadline: timedelta | None = None
    data: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
