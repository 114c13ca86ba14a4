"""The ledger beside the cloud's own bill, which costs money to ask for: asked once a day, and kept in the store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.billed import Billed
from gpucloud.domain.errors import UsageError
from gpucloud.domain.ledger import Charge
from gpucloud.ports import BillingData
from gpucloud.usecases.jobstore import JobStore

FRESH = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciler:
    """Asks for one job's bill."""

    jobs: JobStore
    billing: BillingData

    def billed(self, charges: tuple[Charge, ...], now: datetime) -> Billed:
        """Return the cloud's figures since the first charge: those kept, while they are less than a day old.

        UsageError when the job has cost nothing yet.
        """
        if not charges:
            raise UsageError(f"{self.jobs.job} has cost nothing yet: there is nothing to compare")
        kept = self.jobs.billed()
        if kept is not None and now - kept.asked_at < FRESH:
            return kept
        found = self.billing.of_job(self.jobs.job, min(charge.start for charge in charges), now)
        self.jobs.keep_billed(found)
        return found
