"""Who the caller is to AWS."""

from __future__ import annotations

from gpucloud.adapters.aws.faults import explained
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.account import Caller


def caller_of(aws: Aws) -> Caller:
    """Return who the caller is, within 3 s.

    CredentialsError names the profile and the region that were used; ProvisionError when AWS does not answer.
    """
    region = aws.region
    where = f"{f'profile {aws.profile}' if aws.profile else 'no profile'}, region {region}"
    with explained(f"log in to AWS ({where})"):
        known = aws.client("sts", region, quick=True).get_caller_identity()
    return Caller(
        account=str(known["Account"]),
        arn=str(known["Arn"]),
        profile=aws.profile,
        region=region,
        partition=aws.partition,
    )


def account_of(aws: Aws) -> str:
    """Return the caller's account number."""
    return caller_of(aws).account
