"""The caller's AWS account: who it is, what it may rent."""

from __future__ import annotations

from gpucloud.adapters.aws.account import quotas
from gpucloud.adapters.aws.account.identity import caller_of
from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.account import Caller, Headroom, QuotaRequest
from gpucloud.domain.catalog import Catalog
from gpucloud.domain.offer import Offer


class AwsAccount:
    """Implements `Account`. Thread-safe."""

    def __init__(self, aws: Aws, *, catalog: Catalog | None = None) -> None:
        self._aws = aws
        self._quotas = quotas.Quotas(aws, catalog or load())

    def caller(self) -> Caller:
        """Return who the caller is, within 3 s; CredentialsError names the profile and region that were used."""
        return caller_of(self._aws)

    def headroom(self, offer: Offer) -> Headroom:
        """Return the quota that machines of this offer count against; what may not be read is None."""
        return self._quotas.headroom(offer)

    def ask_for_more(self, headroom: Headroom, vcpus: int) -> QuotaRequest:
        """Ask AWS to raise the quota to `vcpus`; an open request for as much is returned as it stands."""
        return quotas.ask_for_more(self._aws, headroom, vcpus)

    def requests(self, region: str) -> tuple[QuotaRequest, ...]:
        """Return the requests made in the region, the newest first."""
        return quotas.requests(self._aws, region)
