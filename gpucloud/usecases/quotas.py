"""What a job needs of the account's quotas, what there is, and asking for more."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.account import Headroom, QuotaRequest
from gpucloud.domain.errors import NoCapacity, UsageError
from gpucloud.domain.job import Job
from gpucloud.domain.plan import fitting
from gpucloud.ports import Account, MarketData


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One quota that the job's machines count against; `vcpus` is the least of it that some offer of the job needs."""

    room: Headroom
    vcpus: int
    instance_type: str

    @property
    def enough(self) -> bool:
        """Whether the machines can be started."""
        return self.room.holds(self.vcpus)

    @property
    def wish(self) -> int:
        """The limit to ask for: what is used and what is needed."""
        return (self.room.used or 0) + self.vcpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Answers about quotas for one market and account."""

    market: MarketData
    account: Account

    def needs(self, job: Job) -> tuple[Need, ...]:
        """Return each quota that the job could use, that of its best offer first; NoCapacity without any offer."""
        found: dict[tuple[str, str], Need] = {}
        for offer in fitting(job, self.market.offers(job.resources)):
            room = self.account.headroom(offer)
            need = Need(room=room, vcpus=offer.vcpus * job.resources.nodes, instance_type=offer.pool.instance_type)
            known = found.get((room.region, room.code))
            if known is None or need.vcpus < known.vcpus:
                found[room.region, room.code] = need
        if not found:
            raise NoCapacity(f"no machine that is known does what {job.name} asks", hint="fewer wishes in `resources:`")
        return tuple(found.values())

    def request(self, job: Job, vcpus: int | None) -> QuotaRequest:
        """Ask for as much as the job needs, or for `vcpus`; UsageError when that is there already."""
        need = self.needs(job)[0]
        wanted = vcpus if vcpus is not None else need.wish
        if need.room.limit is not None and wanted <= need.room.limit:
            raise UsageError(
                f"the quota {need.room.name!r} in {need.room.region} is {need.room.limit} vCPUs already",
                hint="--vcpus N asks for more than that",
            )
        return self.account.ask_for_more(need.room, wanted)
