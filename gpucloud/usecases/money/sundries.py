"""Bills what the budget does not count, once for each attempt, when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from gpucloud.domain.money.costs import Sundries, charges_of, saves_made, transfer_usd
from gpucloud.domain.money.ledger import ZERO
from gpucloud.domain.state.state import Attempt, JobState
from gpucloud.store.contract import puts_of
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.services import Services


@dataclass(frozen=True, slots=True, kw_only=True)
class SundryLedger:
    """Knows what an attempt used beside its machines. Only a store that costs something is asked about."""

    services: Services

    def bill(self, state: JobState, attempt: Attempt, sent: int) -> None:
        """Write the attempt's charges; `sent` are the bytes that came home. Raises StoreError."""
        rates = self.services.terms.rates_in(state.pool.region)
        if not rates.storage_usd_per_gib_month:
            return
        before = [one.ended_at for one in state.attempts if one.number < attempt.number and one.ended_at is not None]
        start, now = max(before, default=attempt.started_at), self.services.clock.now()
        puts, gets = self.services.tally.take()
        used = self._checkpoints(attempt)
        read, read_usd = self._read_from_afar(state, attempt)
        sundries = Sundries(
            attempt=attempt.number,
            start=start,
            end=max(start, now),
            puts=puts,
            gets=gets,
            sent=sent,
            read=read,
            read_usd=read_usd,
            **used,
        )
        self.services.jobs.bill_outside_budget(f"attempt-{attempt.number:06d}", charges_of(sundries, rates))

    def bill_sent(self, state: JobState, attempt: int, sent: int) -> None:
        """Write down the bytes that came home of an attempt which was closed before. Raises StoreError."""
        rates = self.services.terms.rates_in(state.pool.region)
        if sent and rates.storage_usd_per_gib_month:
            now = self.services.clock.now()
            charges = charges_of(Sundries(attempt=attempt, start=now, end=now, sent=sent), rates)
            self.services.jobs.bill_outside_budget(f"attempt-{attempt:06d}-outputs", charges)

    def _read_from_afar(self, state: JobState, attempt: Attempt) -> tuple[int, Decimal]:
        """Return the bytes and their price; a machine reads each set once, and those that took part before have it."""
        before = {member.node_id for one in state.attempts if one.number < attempt.number for member in one.members}
        new = sum(member.node_id not in before for member in attempt.members)
        found = [self.services.jobs.data_set(source) for source, _ in self.services.job.data]
        region = state.pool.region
        costing = [(one, usd) for one in found if one is not None and (usd := transfer_usd(one, region, new))]
        return sum(one.size for one, _ in costing) * new, sum((usd for _, usd in costing), ZERO)

    def _checkpoints(self, attempt: Attempt) -> dict[str, int]:
        jobs = self.services.jobs
        stored_checkpoints = StoredCheckpoints(
            store=jobs.store, prefix=jobs.checkpoints, keep=self.services.job.checkpoint.keep
        )
        found = [one for one in stored_checkpoints.standing() if one.found.manifest is not None]
        sizes = [piece.size for piece in found[0].found.manifest.pieces] if found and found[0].found.manifest else []
        return {
            "stored": sum(one.size or 0 for one in found),
            "saves": saves_made(attempt.first_step, attempt.last_step, tuple(one.commit.step for one in found)),
            "save_bytes": sum(sizes),
            "save_puts": sum(map(puts_of, sizes)) + 2,  # the manifest, and the list of what may be collected
        }
