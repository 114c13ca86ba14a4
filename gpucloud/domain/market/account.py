"""Who the caller is to the cloud, and how much the cloud lets it rent."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An identity: the account, its own name (an ARN), the profile that was used, the region and its partition."""

    account: str
    arn: str
    profile: str | None
    region: str
    partition: str

    def __str__(self) -> str:
        profile = f", profile {self.profile}" if self.profile else ""
        return f"account {self.account} as {self.arn.rpartition(':')[2]}{profile}, region {self.region}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """A quota in vCPUs: its code and name, the limit, and what of it is in use (running and asked for).

    `limit` and `used` are None where the caller may not read them.
    """

    region: str
    code: str
    name: str
    limit: int | None
    used: int | None

    @property
    def left(self) -> int | None:
        """How many vCPUs can still be started; None when that is not known."""
        return None if self.limit is None or self.used is None else max(0, self.limit - self.used)

    def holds(self, vcpus: int) -> bool:
        """Whether so many can be started, as far as is known."""
        return self.left is None or self.left >= vcpus


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequest:
    """A wish for a higher quota; `status` is the cloud's own word (PENDING, CASE_OPENED, APPROVED, DENIED …)."""

    region: str
    code: str
    name: str
    wanted: int
    status: str
    asked_at: datetime
